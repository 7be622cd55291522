"""The studies of config/studies: which runs they plan, what these have in common, and that a learning rate at the edge of its grid is no result."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moe_routing_bench.cli import status
from moe_routing_bench.config import load as config
from moe_routing_bench.grid.run_spec import DENSE, PACKAGES, Run
from moe_routing_bench.quality import evaluate, language_model, loop, plan, rates, run_rows, train
from moe_routing_bench.store import paths, platforms
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers.zoo import ZOO

STUDIES = Path(__file__).parents[2] / "config/studies"


def planned(study: str) -> plan.Plan:
    """As the workflow plans it."""
    return plan.expand(config.load(config.read_mapping(STUDIES / f"{study}.yaml"))["quality"])


def sizes(run: Run) -> tuple[int, int]:
    """All and active parameters of a model that is narrower and has one layer, without those of its routers."""
    small = dataclasses.replace(run, dim=16, heads=1, layers=1, vocabulary=256, corpora={"stdlib": 1})
    model = language_model.build(small, [1] * 256)
    routers = sum(p.numel() for router in model.routers for p in router.parameters())
    total, active = language_model.parameters(model)
    return total - routers, active - routers


def test_the_studies_have_their_runs() -> None:
    """A0 every rule and both dense models, five times; A1 whole runs at each rate; E three capacities in training."""
    a0 = list(planned("a0").finals.values())
    # A rule that is added belongs to the next study, not to one that is planned.
    named = {part for run in a0 for part in run.router.split("+")} - {DENSE}
    assert named <= set(ZOO) and len(named) >= 36 and any("+" in run.router for run in a0)
    shared = [run for run in a0 if run.shared_hidden]
    assert {run.shared_gate for run in shared} == {"plain", "gated", "joint"}
    active = [run.top_k * run.expert_hidden + run.shared_hidden for run in (shared[0], a0[0])]
    total = [run.experts * run.expert_hidden + run.shared_hidden for run in (shared[0], a0[0])]
    assert active[0] == active[1] and total[0] == total[1], "equal FLOPs and parameters"
    assert DENSE in {run.router for run in a0} and {run.seed for run in a0} == {17, 18, 19, 20, 21}
    assert {run.match for run in a0 if run.router == DENSE} == {"active_flops", "parameters"}
    a1 = planned("a1")
    assert len(a1.pilots) == 6 * 5 * 2 + 3 * 3 and all(run.steps == 3050 for run in a1.runs.values())
    for tried in ({run.lr or 0 for run in a1.pilots.values() if run.label == label} for label in ("a1_xs", "a1_s")):
        assert all(second / first == pytest.approx(2**0.5, rel=1e-3) for first, second in pairwise(sorted(tried)))
    assert {run.capacity_factor for run in planned("e").finals.values()} == {1.0, 1.25, None}
    for study in ("a0", "a1", "b", "c", "e"):
        assert all(set(run.corpora) == {PACKAGES} for run in planned(study).runs.values())


@pytest.mark.parametrize("study", ["b", "c"])
def test_runs_of_a_study_are_equal_in_parameters_and_flops(study: str) -> None:
    """But for routers; the dense models of B in one of the two each."""
    runs = {run.label: run for run in planned(study).finals.values() if run.router in ("softk", "topk_prenorm")}
    assert len({sizes(run) for run in runs.values()}) == 1
    if study == "b":
        total, active = sizes(next(iter(runs.values())))
        dense = {run.match: sizes(run) for run in planned("b").finals.values() if run.router == DENSE}
        assert dense == {"active_flops": (active, active), "parameters": (total, total)}


def test_names_of_stored_runs_stay() -> None:
    """Fields that came later are in a spec where they are not the default, and come back from it."""
    assert Run().name == "run-softk-E8-k2-cf1.25-seed17-2744bf61"
    later = {"shared_hidden": 8, "shared_gate": "gated", "vocabulary": 512, "validation_tokens": 9, "altered": False}
    later |= {"attention": "qk_norm"}
    run = Run(corpora={PACKAGES: None}, **later)
    assert (
        Run.from_spec(run.spec) == run and len({dataclasses.replace(run, **{k: v}).name for k, v in later.items()}) == 1
    )
    assert not any(name in Run().spec for name in later) and run.name != Run(corpora={PACKAGES: None}).name
    with pytest.raises(UserError, match="vocabulary: got 512; allowed: 256, the bytes"):
        Run(vocabulary=512)


def pilots(folder: Path, losses: dict[float, list[float]]) -> list[Path]:
    """The files of pilots with these last losses by learning rate."""
    files = []
    for lr, several in losses.items():
        for number, loss in enumerate(several):
            files.append(folder / f"{lr}-{number}.parquet")
            row = {"schema_version": run_rows.SCHEMA_VERSION, "lr": lr, "val_loss": loss, "router": "softk"}
            run_rows.write(files[-1], [row], "{}")
    return files


def test_the_best_rate_is_that_of_the_mean_over_seeds(tmp_path: Path) -> None:
    """A lucky seed decides nothing, and the curve is in the row."""
    files = pilots(tmp_path, {0.1: [2.0, 2.2], 0.2: [2.0, 2.0], 0.4: [1.9, 2.5]})
    lr, fields = rates.best(files)
    assert (lr, fields["pilot_lrs"], fields["pilot_losses"]) == (0.2, [0.1, 0.2, 0.4], [2.1, 2.0, 2.2])
    assert fields["pilot_losses_by_seed"] == [[2.0, 2.2], [2.0, 2.0], [1.9, 2.5]]


@pytest.mark.parametrize(("best", "side"), [(0.1, "smaller"), (0.4, "larger")])
def test_a_rate_at_the_edge_of_its_grid_is_no_result(tmp_path: Path, best: float, side: str) -> None:
    """Of three rates; two have no middle, and are taken as they are."""
    losses = {lr: [1.0 if lr == best else 2.0] for lr in (0.1, 0.2, 0.4)}
    with pytest.raises(UserError, match=f"{best:g}, at the edge of 0.1, 0.2, 0.4.*{side} rates"):
        rates.best(pilots(tmp_path, losses))
    assert rates.best(pilots(tmp_path, {0.1: [1.0], 0.2: [2.0]}))[0] == 0.1


def test_pilots_have_the_seeds_of_their_own(shared_text: str) -> None:
    """So that the run that is reported is not the one by which its rate was chosen."""
    entry = {
        "label": "e",
        "router": ["softk"],
        "seed": [1],
        "corpora": {shared_text: "all"},
        "pilot": {"lr": [0.1, 0.2], "steps": 50, "seed": [7, 8]},
    }
    made = plan.expand(config.load(GRID | {"quality": [entry]})["quality"])
    assert sorted((run.lr, run.seed) for run in made.pilots.values()) == [(0.1, 7), (0.1, 8), (0.2, 7), (0.2, 8)]
    (run,) = made.finals.values()
    assert run.seed == 1 and set(run.pilots) == set(made.pilots)


GRID = {"grid": [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]}


def test_a_shared_expert_is_every_tokens(shared_text: str) -> None:
    """It adds to the layer what it computes, counts as active, and changes no other weight at the start."""
    run = Run(experts=4, dim=16, heads=2, layers=1, expert_hidden=8, corpora={shared_text: None}, sequence=32, batch=2)
    plain, shared = (
        language_model.build(one, [1] * 256).eval() for one in (run, dataclasses.replace(run, shared_hidden=8))
    )
    state = shared.state_dict()
    first = {name: value for name, value in plain.state_dict().items() if name.startswith("blocks.0.ffn")}
    assert all(torch.equal(value, state[name]) for name, value in first.items())
    x, ids, positions = torch.randn(2, 32, 16), torch.zeros(2, 32, dtype=torch.int64), torch.arange(32)
    (one,), (other,) = plain.layers, shared.layers
    assert other.shared is not None
    with torch.no_grad():
        added = other(x, ids, positions) - one(x, ids, positions)
    torch.testing.assert_close(added.flatten(0, 1), other.shared.padded(x.flatten(0, 1)[None])[0], atol=1e-6, rtol=1e-3)
    more = [b - a for a, b in zip(language_model.parameters(plain), language_model.parameters(shared), strict=True)]
    assert more == [3 * 8 * 16] * 2


def test_validation_may_be_shorter(shared_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal share of each domain; and the last evaluation need not alter anything."""
    run = Run(dim=16, heads=2, layers=1, expert_hidden=8, corpora={shared_text: None}, sequence=32, batch=2)
    whole, short = (
        loop.Training(dataclasses.replace(run, validation_tokens=most), "cpu").validation for most in (0, 500)
    )
    assert (whole.total, short.total, short.size) == (1000, 500, 500)
    assert torch.equal(short.tokens[:501], whole.tokens[:501])
    assert evaluate.bits(1.0, short) == evaluate.bits(1.0, whole)


def stored_study(run: Run, lr: float, grid: list[float], **change: object) -> None:
    """A study of rates that this machine has stored: a final run whose rate is the best of the grid."""
    path = paths.quality(paths.folder(platforms.CPU, "study-a1"))
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: getattr(run, name) for name in ("label", "router", *rates.SIZE)}
    row = {"schema_version": run_rows.SCHEMA_VERSION, "purpose": "final", "lr": lr, "pilot_lrs": grid}
    run_rows.write(path, [row | fields | change], run.spec)


def test_a_study_takes_the_rates_that_another_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rule and size, whatever the number of experts; others have the declared rate, and rows and `plan` say so."""
    monkeypatch.chdir(tmp_path)
    sources = lambda: {run.router: (run.lr, run.lr_source) for run in planned("b").finals.values()}  # noqa: E731
    before = sources()
    assert set(before.values()) == {(0.001, rates.FALLBACK)}
    (one,) = (run for run in planned("b").finals.values() if run.router == "softk" and run.seed == 17)
    stored_study(one, 0.0014, [0.001, 0.0014, 0.002])
    assert sources() == before | {"softk": (0.0014, "study-a1")}
    (other,) = (run for run in planned("b").finals.values() if run.router == "softk" and run.seed == 17)
    assert other.config_hash == one.config_hash and Run.from_spec(other.spec) == other
    status.plan(config=[STUDIES / "b.yaml"], platform=platforms.CPU)
    said = [line for line in capsys.readouterr().out.splitlines() if "learning rates of" in line]
    assert (
        said[0].startswith("b: learning rates of fallback: dense 0.001, topk_prenorm 0.001") and "softk" not in said[0]
    )
    assert said[1] == "b: learning rates of study-a1: softk 0.0014"
    for size in ("dim", "layers", "vocabulary", "sequence", "batch", "steps"):
        stored_study(one, 0.0014, [0.001, 0.0014, 0.002], **{size: 2 * getattr(one, size)})
        assert sources() == before, f"a study of another {size}"
    stored_study(one, 0.002, [0.001, 0.0014, 0.002])
    with pytest.raises(UserError, match=r"0.002, at the edge of 0.001, 0.0014, 0.002.*add larger rates to its entry b"):
        planned("b")


def test_rows_say_where_the_rate_is_from(shared_text: str, tmp_path: Path) -> None:
    """And those of a rate of the run's own say nothing."""
    for source, said in (("study-a1", "study-a1"), (rates.FALLBACK, rates.FALLBACK), ("", "")):
        run = dataclasses.replace(TINY, corpora={shared_text: None}, lr_source=source)
        train.train(run, tmp_path / "run.parquet", "cpu")
        assert run_rows.last(tmp_path / "run.parquet")["lr_source"] == said


TINY = Run(dim=16, heads=2, layers=2, expert_hidden=16, sequence=32, batch=4, steps=3, warmup=1, altered=False)


@pytest.mark.parametrize(
    ("router", "factor", "policy", "causal", "in_evaluation"),
    [
        ("gshard_top2", 1.25, "position", False, False),  # second choices are seated after first ones
        ("gshard_top2", None, "position", True, True),
        ("softk", 1.25, "position", True, True),
        ("softk", 1.25, "score", False, False),
        ("softk", None, "score", True, True),
        ("sinkhorn", 1.25, "position", False, True),
        ("sinkhorn", 1.25, "random", False, False),
        ("expert_choice", None, "position", False, False),
    ],
)
def test_rows_say_whether_a_run_is_causal_with_its_capacity(
    shared_text: str, tmp_path: Path, router: str, factor: float | None, policy: str, causal: bool, in_evaluation: bool
) -> None:
    """Not what the rule is without one: a run with a leak is ranked apart from causal ones."""
    one = dataclasses.replace(TINY, router=router, capacity_factor=factor, drop_policy=policy)
    train.train(dataclasses.replace(one, corpora={shared_text: None}), tmp_path / "run.parquet", "cpu")
    stored = run_rows.last(tmp_path / "run.parquet")
    assert (stored["causal"], stored["causal_in_evaluation"]) == (causal, in_evaluation)
