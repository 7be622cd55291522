"""From a config's `quality` section to runs, and their names."""

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_routing_bench import config
from moe_routing_bench.errors import UserError
from moe_routing_bench.quality import model, plan
from moe_routing_bench.quality.run import Run

ENTRY = {"label": "e", "router": ["dense"], "seed": [1, 2, 3], "corpora": {"stdlib": 1000}, "steps": 50, "lr": 0.01}
GRID = {"grid": [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]}


def expand(*entries: dict) -> plan.Plan:
    """As the workflow does."""
    return plan.expand(config.load(GRID | {"quality": list(entries)})["quality"])


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
        (0.1, 1, 20, 2, "pilot"), (0.01, 1, 20, 2, "pilot")]  # fmt: skip
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
        ({"drop_policy": ["oldest"]}, "position, random or score"),
    ],
)
def test_mistakes_are_explained(change: dict, message: str) -> None:
    """In one line, before anything runs."""
    with pytest.raises(UserError, match=message):
        expand(ENTRY | change)


def test_labels_tell_entries_apart() -> None:
    """Two entries of one label would rank as one."""
    with pytest.raises(UserError, match="a label once"):
        expand(ENTRY, ENTRY | {"dim": 128})


def test_the_published_config_holds_what_it_promises() -> None:
    """At least 12 rules at E=8 and 6 at E=32 with 5 seeds, 20 million parameters, 50 MB a run at E=32."""
    pytest.importorskip("moe_routing_bench.routers.zoo")
    effective = config.load(Path(__file__).parents[2] / "config/quality.yaml")
    runs = plan.expand(effective["quality"]).finals.values()
    for label, rules, least in (("e8", 12, 0), ("e32", 6, 50_000_000)):
        mine = [run for run in runs if run.label == label]
        routers = {run.router for run in mine} - {"dense"}
        assert len(routers) >= rules and len(mine) == 5 * (len(routers) + 1) and "dense" in {run.router for run in mine}
        with torch.device("meta"):
            all_experts = model.build(dataclasses.replace(mine[0], router="dense", match="parameters"), [])
        assert model.parameters(all_experts)[0] >= 20_000_000
        text = 18_000_000  # of 19.2 MB, the training share
        assert least <= mine[0].steps * mine[0].tokens_per_step <= 4 * text
