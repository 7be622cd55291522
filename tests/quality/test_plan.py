"""From a config's `quality` section to runs, and their names."""

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_routing_bench.config import load as config
from moe_routing_bench.grid.run_spec import Adaptation, Run, content_sha256
from moe_routing_bench.quality import code, evaluate, language_model, plan
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.formats.weights import WEIGHTS

PERFT = {
    "label": "p",
    "base": "e",
    "variant": ["R", "S"],
    "rank": [2, 8],
    "corpora": {"stdlib": 2000},
    "steps": 30,
    "lr": 0.01,
}
ENTRY = {"label": "e", "router": ["dense"], "seed": [1, 2, 3], "corpora": {"stdlib": 1000}, "steps": 50, "lr": 0.01}
GRID = {"grid": [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]}


def expand(*entries: dict, perft: tuple[dict, ...] = ()) -> plan.Plan:
    """As the workflow does."""
    loaded = config.load(GRID | {"quality": list(entries)} | ({"perft": list(perft)} if perft else {}))
    return plan.expand(loaded["quality"], loaded.get("perft", []))


def test_a_run_a_seed_and_one_timing(text: str) -> None:
    """The first seed is timed and traced, for all."""
    planned = expand(ENTRY | {"timing": True, "trace_tokens": 100, "corpora": {text: "all"}})
    first, *rest = planned.finals.values()
    assert [run.seed for run in (first, *rest)] == [1, 2, 3] and not planned.pilots
    assert first.keep_weights and first.trace_tokens == 100 and first.eval_every == 50 and first.corpora == {text: None}
    assert not any(run.keep_weights or run.trace_tokens for run in rest)
    assert (
        planned.timing == {first.name: list(planned.finals)}
        and len({run.config_hash for run in planned.finals.values()}) == 1
    )
    assert Path(f"results/cpu/runs/{first.name}.parquet") in planned.files("cpu")


def test_pilots_are_runs_that_the_others_name() -> None:
    """One for each rate, of the first seed, with a schedule of its own."""
    entry = {name: value for name, value in ENTRY.items() if name != "lr"} | {"pilot": {"lr": [0.1, 0.01], "steps": 20}}
    planned = expand(entry)
    assert [(run.lr, run.seed, run.steps, run.warmup, run.purpose) for run in planned.pilots.values()] == [
        (0.1, 1, 20, 2, "pilot"),
        (0.01, 1, 20, 2, "pilot"),
    ]
    short = expand(entry | {"warmup": 1}).pilots.values()
    assert [run.warmup for run in short] == [1, 1], "no longer than that of the entry"
    assert all(run.pilots == tuple(planned.pilots) and run.lr is None for run in planned.finals.values())
    with pytest.raises(UserError, match="one of lr and pilot"):
        expand(entry | {"lr": 0.1})
    with pytest.raises(UserError, match="one of lr and pilot"):
        expand({name: value for name, value in ENTRY.items() if name != "lr"})


def test_dense_has_one_run_whatever_the_axes_of_routers() -> None:
    """Networks, capacities and drop policies are the routers'."""
    axes = {"network": ["linear", "mlp"], "capacity_factor": [1.0, "none"], "drop_policy": ["random", "score"]}
    assert len(expand(ENTRY | axes).finals) == 3


def test_the_name_changes_with_the_spec_and_the_spec_comes_back(text: str) -> None:
    """Of a user's own text, with its content."""
    run = Run(corpora={text: None}, pilots=("a",), lr=None)
    assert Run.from_spec(run.spec) == run and len({run.name, Run().name, Run(dim=128).name, Run(seed=1).name}) == 4
    spec, name = run.spec, run.name
    (Path(text) / "00.txt").write_text("other words")
    assert Run(corpora={text: None}, pilots=("a",), lr=None).name != name
    with pytest.raises(UserError, match="another content"):
        Run.from_spec(spec)


OWN = {
    "router": "base",
    "network": "mlp",
    "options": {"tile": 8},
    "capacity_factor": 2.0,
    "drop_policy": "random",
    "train_mode": "frozen_router",
    "seed": 1,
    "lr": 0.5,
    "pilots": ("a",),
    "lr_source": "study",
    "trace_tokens": 8,
    "keep_weights": True,
}
COMMON = {
    "experts": 16,
    "top_k": 1,
    "match": "parameters",
    "dim": 128,
    "layers": 3,
    "heads": 2,
    "expert_hidden": 64,
    "corpora": {"kjv": None},
    "validation_share": 0.2,
    "max_epochs": 2.0,
    "sequence": 64,
    "batch": 32,
    "steps": 200,
    "warmup": 5,
    "weight_decay": 0.0,
    "clip": 0.5,
    "eval_every": 50,
    "shared_hidden": 16,
    "validation_tokens": 512,
    "altered": False,
}


@pytest.mark.parametrize("name", [*OWN, *COMMON])
def test_runs_that_are_compared_differ_in_their_rule_and_seed_alone(name: str) -> None:
    """Every field is part of the spec; those of size, text and schedule are part of the hash that compared runs share."""
    other = Run(**{name: (OWN | COMMON)[name]})
    assert other.hash != Run().hash and (other.config_hash == Run().config_hash) == (name in OWN)


def test_names_and_places_of_files_are_part_of_the_hash_of_a_text(tmp_path: Path) -> None:
    """The same bytes in files of other names, or cut elsewhere, are another text."""
    hashes = set()
    for number, files in enumerate(({"a": "one", "b": "two"}, {"a": "one", "c": "two"}, {"a": "on", "b": "etwo"})):
        folder = tmp_path / str(number) / "text"
        folder.mkdir(parents=True)
        for name, words in files.items():
            (folder / name).write_text(words)
        hashes.add(content_sha256(folder))
    assert len(hashes) == 3
    (tmp_path / "0").rename(tmp_path / "elsewhere")
    assert content_sha256(tmp_path / "elsewhere" / "text") in hashes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"config\.quality\[0\]\.steps: got 0"),
        ({"stepz": 5}, "did you mean 'steps'"),
        ({"warmup": 50}, "warmup: got 50; allowed: 0 to steps - 1 = 49"),
        ({"dim": 36, "heads": 4}, "a multiple of 2 x heads = 8"),
        ({"corpora": {"no/such/file": "all"}}, "got 'no/such/file'"),
        ({"corpora": {"stdlib": 0}}, r"config\.quality\[0\]\.corpora\.stdlib: got 0"),
        ({"top_k": 9}, "at most experts = 8"),
        ({"capacity_factor": [0]}, r"capacity_factor\[0\]: got 0"),
        ({"label": "E 8"}, "lower-case"),
        ({"drop_policy": ["oldest"]}, "position, random, score"),
    ],
)
def test_mistakes_are_explained(change: dict, message: str) -> None:
    """In one line, before anything runs."""
    with pytest.raises(UserError, match=message):
        expand(ENTRY | change)


def test_an_adaptation_a_variant_rank_and_seed() -> None:
    """Of the run of its seed, with that run's model; all of these runs keep their weights, others do not."""
    entry = ENTRY | {"router": ["softk"], "dim": 32}
    planned = expand(entry, ENTRY | {"label": "f"}, perft=(PERFT | {"alpha": 4.0, "batch": 7},))
    assert len(planned.adaptations) == 2 * 2 * 3 and not planned.adaptation_pilots
    bases = {run.name: run for run in planned.finals.values() if run.label == "e"}
    assert all(run.keep_weights == (run.label == "e") for run in planned.finals.values())
    for one in planned.adaptations.values():
        base = bases[one.base]
        assert (one.run.seed, one.run.dim, one.run.router, one.run.corpora) == (
            base.seed,
            32,
            "softk",
            {"stdlib": 2000},
        )
        assert (one.run.steps, one.run.warmup, one.run.eval_every, one.run.batch, one.alpha) == (30, 3, 30, 7, 4.0)
        assert not one.run.keep_weights and Adaptation.from_spec(one.spec) == one
    assert len({(one.variant, one.rank, one.run.seed) for one in planned.adaptations.values()}) == 12
    assert Path(f"results/cpu/perft/{next(iter(planned.adaptations))}.parquet") in planned.adaptation_files("cpu")
    untouched = expand(entry)
    assert not any(run.keep_weights for run in untouched.finals.values()) and not untouched.all_adaptations


def test_pilots_of_adaptations_are_by_variant_and_rank() -> None:
    """Of the first seed; the adaptations of all seeds name them."""
    entry = {name: value for name, value in PERFT.items() if name != "lr"} | {"pilot": {"lr": [0.1, 0.01], "steps": 10}}
    planned = expand(ENTRY | {"router": ["softk"]}, perft=(entry,))
    assert len(planned.adaptation_pilots) == 2 * 2 * 2 and len(planned.all_adaptations) == 8 + 12
    for one in planned.adaptations.values():
        pilots = [planned.adaptation_pilots[name] for name in one.run.pilots]
        assert one.run.lr is None and [each.run.lr for each in pilots] == [0.1, 0.01]
        assert {(each.variant, each.rank, each.run.seed, each.run.steps) for each in pilots} == {
            (one.variant, one.rank, 1, 10)
        }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "g"}, "perft base: got 'g'"),
        ({"variant": ["T"]}, r"config\.perft\[0\]\.variant\[0\]: got 'T'"),
        ({"rank": [0]}, r"config\.perft\[0\]\.rank\[0\]: got 0"),
        ({"adapters": 2, "top_k": 3}, "at most adapters = 2"),
        ({"pilot": {"lr": [0.1], "steps": 5}}, "one of lr and pilot"),
        ({"warmup": 30}, "warmup: got 30"),
    ],
)
def test_mistakes_in_adaptations_are_explained(change: dict, message: str) -> None:
    """Before anything is trained."""
    with pytest.raises(UserError, match=message):
        expand(ENTRY | {"router": ["softk"]}, perft=(PERFT | change,))


def test_a_base_is_one_router_with_experts() -> None:
    """The seeds of one config, and not the dense model's."""
    for routers in (["dense"], ["softk", "switch_top1"]):
        with pytest.raises(UserError, match="one router but dense"):
            expand(ENTRY | {"router": routers}, perft=(PERFT,))
    with pytest.raises(UserError, match="a label once"):
        expand(ENTRY | {"router": ["softk"]}, perft=(PERFT, PERFT))


def test_labels_tell_entries_apart() -> None:
    """Two entries of one label would rank as one."""
    with pytest.raises(UserError, match="a label once"):
        expand(ENTRY, ENTRY | {"dim": 128})


def test_the_published_config_holds_what_it_promises() -> None:
    """At least 12 rules at E=8 and 6 at E=32 with 5 seeds, 20 million parameters, 50 MB a run at E=32."""
    pytest.importorskip("moe_routing_kernels.routers.zoo")
    effective = config.load(Path(__file__).parents[2] / "config/quality.yaml")
    runs = plan.expand(effective["quality"]).finals.values()
    for label, rules, least in (("e8", 12, 0), ("e32", 6, 50_000_000)):
        mine = [run for run in runs if run.label == label]
        routers = {run.router for run in mine} - {"dense"}
        assert len(routers) >= rules and len(mine) == 5 * (len(routers) + 1) and "dense" in {run.router for run in mine}
        with torch.device("meta"):
            all_experts = language_model.build(dataclasses.replace(mine[0], router="dense", match="parameters"), [])
        assert language_model.parameters(all_experts)[0] >= 20_000_000
        text = 18_000_000  # of 19.2 MB, the training share
        assert least <= mine[0].steps * mine[0].tokens_per_step <= 4 * text
    adaptations = plan.expand(effective["quality"], effective["perft"]).adaptations.values()
    assert {one.variant for one in adaptations} == {"R", "E", "D", "S"}
    assert {one.rank for one in adaptations} >= {2, 32} and len({one.run.seed for one in adaptations}) == 5
    modes = [run for run in runs if run.label == "modes" and run.router == "softk"]
    assert len(modes) == 15 and len({run.train_mode for run in modes}) == 3


def test_the_config_of_formats_holds_what_it_promises() -> None:
    """Rules that learn and rules that do not, 5 seeds of each, experts whose sizes every format fills, and text that needs no network."""
    pytest.importorskip("moe_routing_kernels.routers.zoo")
    effective = config.load(Path(__file__).parents[2] / "config/quality-formats.yaml")
    runs = list(plan.expand(effective["quality"]).finals.values())
    seeds = {router: {run.seed for run in runs if run.router == router} for router in {run.router for run in runs}}
    assert len(seeds) == 6 and all(len(found) == 5 for found in seeds.values())
    assert {tuple(run.corpora) for run in runs} == {("stdlib",)}
    assert all(
        WEIGHTS[name].packs(size) for run in runs for name in evaluate.FORMATS for size in (run.dim, run.expert_hidden)
    )


def test_which_edits_make_runs_and_adaptations_stale() -> None:
    """What trains them, and every router; not how they are planned and compared, and a run depends on no adapter."""
    runs, adaptations = (
        {one.stem for one in files if one.parent.name == "quality"}
        for files in (code.training_files(), code.adaptation_files())
    )
    trained = {
        "cleaning",
        "code",
        "texts",
        "evaluate",
        "expert_loads",
        "language_model",
        "moe_layer",
        "token_dispatch",
        "stage_clock",
        "run_rows",
        "loop",
        "steps",
        "timing",
        "engine",
        "prepared",
        "train",
    }
    assert {name for name in runs if not name.endswith("__init__")} == trained
    assert adaptations - runs == {"adaptation_rows", "adapt"}
    assert all(Path(name).is_file() for name in code.adaptation_files())
    assert any(one.match("routers/rules/expert_counts.py") for one in code.training_files())
