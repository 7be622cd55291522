"""What choices cost, worked out by hand, and the table that ships: made of the stored rows, all of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from rows import frame, one

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import choices as command
from moe_routing_bench.cli.choices import of_runs, stored
from moe_routing_bench.comparison import origins, regret
from moe_routing_kernels import choices
from moe_routing_kernels.choices import Entry, Shape
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.implementations import ranked

ROOT = Path(__file__).parents[2]
SHAPE = Shape(1024, 8, 2, 512, 256, "swiglu", "bf16", "bf16", "bf16", None, "sm_90")
SMALL = Entry("small", "prefill", SHAPE, {"cute": 110.0, "triton": 100.0, "sonicmoe": 80.0})
LARGE = Entry("large", "prefill", replace(SHAPE, tokens=4096), {"cute": 200.0, "triton": 240.0, "torch_loop": 100.0})
VALUES = {
    "tokens": 1024,
    "experts": 8,
    "top_k": 2,
    "hidden": 512,
    "intermediate": 256,
    "activation": "swiglu",
    "dtype": "bf16",
    "packed": "bf16",
    "weights": "bf16",
    "phase": "prefill",
    "gpu_name": "NVIDIA H200",
    "git_sha": "ab",
    "started_at": "2026-11-21T06:55",
    "torch_version": "2",
}


def test_regret_in_the_table_and_left_out() -> None:
    """Each is chosen right in the table; left out, each takes what is best in the other cell."""
    small, large = regret.lines([SMALL, LARGE], [SMALL, LARGE])
    assert (small.best_own, small.best, large.best_own, large.best) == ("triton", "sonicmoe", "cute", "torch_loop")
    assert [one.name for one in small.choices] == ["triton", "cute"]
    assert [one.name for one in large.choices] == ["cute", "triton"]
    assert [(one.own, one.all) for one in small.choices] == [
        (0, pytest.approx(0.25)),
        (pytest.approx(0.1), pytest.approx(0.375)),
    ]
    assert [(one.own, one.all) for one in large.choices] == [
        (0, pytest.approx(1)),
        (pytest.approx(0.2), pytest.approx(1.4)),
    ]
    found = {one.what: (one.cells, one.mean, one.worst, one.met) for one in regret.summaries([small, large])}
    assert found == {
        "in the table, against the best of the candidates": (2, 0, 0, True),
        "in the table, against the best measured": (2, pytest.approx(0.625), pytest.approx(1), False),
        "left out, against the best of the candidates": (2, pytest.approx(0.15), pytest.approx(0.2), False),
        "left out, against the best measured": (2, pytest.approx(0.8875), pytest.approx(1.4), False),
    }


def test_left_out_are_all_cells_of_the_shape() -> None:
    """Another skew of the same sizes would give the answer away."""
    (line, *_) = regret.lines([SMALL], [SMALL, replace(SMALL, cell="skewed"), LARGE])
    assert line.choices[1].name == "cute"


@pytest.mark.parametrize(("architecture", "best"), [("sm_90", "torch_grouped_mm"), ("cpu", "torch_loop")])
def test_what_reads_loads_on_the_host_is_a_candidate_on_a_cpu(architecture: str, best: str) -> None:
    """On a GPU it waits for it."""
    times = {"torch_grouped_mm": 3.0, "torch_loop": 1.0}
    cell = replace(SMALL, times=times, shape=replace(SHAPE, architecture=architecture))
    assert [(line.best_own, line.choices[0].name) for line in regret.lines([cell], [cell])] == [(best, best)]


def test_a_choice_without_a_time_is_said() -> None:
    """Only what has a time in the cell can be judged there."""
    other = replace(LARGE, times={"cute_gather": 1.0, "cute": 2.0, "triton": 3.0})
    (line,) = regret.lines([SMALL], [SMALL, other])
    assert line.choices[1].name == "cute" and line.choices[1].unlimited == "cute_gather"
    assert line.choices[0].unlimited is None


def test_one_implementation_throughout() -> None:
    found = regret.always(regret.lines([SMALL, LARGE], [SMALL, LARGE]))
    assert [one.what for one in found] == ["cute", "triton", "torch_loop"]
    assert [one.cells for one in found] == [2, 2, 1]
    assert found[0].mean == pytest.approx(0.05) and found[0].worst == pytest.approx(0.1)


def test_peers_are_candidates_where_they_are_asked_for() -> None:
    (line, *_) = regret.lines([SMALL], [SMALL, LARGE], with_peers=True)
    assert line.best_own == line.choices[0].name == "sonicmoe"


def test_a_table_of_other_code_is_refused() -> None:
    with pytest.raises(UserError, match="got 'cute_of_old'"):
        regret.lines([SMALL], [replace(SMALL, times={"cute_of_old": 1.0})])
    assert regret.lines([replace(SMALL, times={"sonicmoe": 1.0})], []) == []
    assert regret.summaries([]) == []


def test_entries_are_rows_that_are_ok() -> None:
    """Rows of other benches and of layers with shared experts make none, nor does one of `auto` that says no choice; what is doubted is marked."""
    at = VALUES | {"cell": "a"}
    doubted = {"suspect": True, "suspect_reason": "drift", "git_dirty": True, "best_verdict": "faster"}
    found = regret.entries(
        frame(
            one("layer", "cute", **at, median_us=2.0),
            one("layer", "triton", **at, median_us=1.0, **{k: v for k, v in doubted.items() if k != "suspect"})
            | {"suspect": True},
            one("layer", "auto", **at, median_us=0.5),
            one("layer", "torch_loop", **at) | {"status": "crashed"},
            one("experts", "cute", **at, median_us=0.1),
            one("layer", "cute", **VALUES, cell="b", shared_intermediate=512, median_us=3.0),
        ),
        "run",
    )
    (entry,) = found
    assert entry.times == {"cute": 2.0, "triton": 1.0} and entry.shape == SHAPE
    assert entry.suspect == {"triton": "drift"} and entry.verdicts == {"triton": "faster"}
    assert (entry.commit, entry.card, entry.run, entry.versions) == ("ab+", "NVIDIA H200", "run", {"torch": "2"})


def test_a_row_of_auto_is_one_of_what_it_chose() -> None:
    """Where that was not measured by itself in the cell, on the card; and only of what can be chosen."""

    def auto(cell: str, us: float, chosen: str, **others: object) -> dict[str, object]:
        return one("layer", "auto", **VALUES | others, cell=cell, median_us=us, configuration=chosen)

    cute = one("layer", "cute", **VALUES, cell="a", median_us=2.0)
    rows = [
        cute,
        auto("a", 1.5, "cute"),
        auto("b", 1.0, "cute_dependent; its tiles"),
        auto("c", 1.0, "gone"),
        auto("a", 3.0, "cute", gpu_name="NVIDIA H100"),
    ]
    for given in (rows, rows[::-1]):
        found = {(entry.cell, entry.card): entry.times for entry in regret.entries(frame(*given), "run")}
        assert found == {
            ("a", "NVIDIA H200"): {"cute": 2.0},
            ("b", "NVIDIA H200"): {"cute_dependent": 1.0},
            ("a", "NVIDIA H100"): {"cute": 3.0},
        }


def test_entries_are_in_the_order_of_cells() -> None:
    """Each with its model, its capacity and its card, if it has one."""
    rows = [
        one("layer", "cute", **VALUES, cell="b", model="qwen3-30b-a3b", capacity_factor=1.25, median_us=2.0),
        one("layer", "cute", **VALUES | {"gpu_name": None}, cell="a", median_us=1.0),
    ]
    found = regret.entries(frame(*rows), "run")
    assert [(entry.cell, entry.model, entry.shape.capacity_factor) for entry in found] == [
        ("a", "", None),
        ("b", "qwen3-30b-a3b", 1.25),
    ]
    assert [(entry.card, entry.shape.architecture) for entry in found] == [("", "cpu"), ("NVIDIA H200", "sm_90")]
    assert type(found[1].shape.capacity_factor) is float, "as JSON has it"


def test_the_newest_measurement_of_a_cell_counts_and_one_of_few_implementations_replaces_none() -> None:
    older, newer = (replace(SMALL, measured=day, run=day, card="x") for day in ("2026-11-21", "2026-11-22"))
    assert regret.fullest([newer, older, LARGE]) == [LARGE, newer]
    fewer = replace(newer, measured="2026-11-23", times={"cute": SMALL.times["cute"]})
    assert len(SMALL.times) > 1 and regret.fullest([fewer, newer, older]) == [newer]


def test_an_unknown_card_is_refused() -> None:
    assert origins.architecture(None) == "cpu" and origins.architecture("NVIDIA H100 80GB HBM3") == "sm_90"
    assert origins.architecture("NVIDIA A100-SXM4-80GB") == "sm_80"
    regret.check_cards([SMALL])
    with pytest.raises(UserError, match=r"card: got 'NVIDIA T4'; allowed: A100, .*; hint: add its architecture"):
        regret.check_cards(
            [replace(SMALL, card="NVIDIA T4", shape=replace(SHAPE, architecture=origins.architecture("NVIDIA T4")))]
        )


def test_candidates_need_nobody_elses_package() -> None:
    ours = {one.name for one in BENCHES["layer"].implementations if one.peer is None}
    assert {one.name for one in ranked("layer")} <= ours


@pytest.mark.slow
def test_what_ships_is_made_of_the_stored_rows(monkeypatch) -> None:
    """The same bytes; after new rows: moe-routing-bench choices --force --out src/moe_routing_kernels/choices/regret.json"""
    monkeypatch.chdir(ROOT)
    entries = of_runs(stored())
    assert choices.text(entries) == choices.FILE.read_text(encoding="utf-8")
    assert regret.lines(entries, choices.load())


def test_entries_leave_out_plug_ins_shared_experts_and_expert_parallel_ranks() -> None:
    """A row with one of the axes of shared experts is not of the table, nor is one of another package, or of a rank that has fewer experts than its sizes say."""
    rows = [
        one("layer", "cute", median_us=2.0, **VALUES),
        one("layer", "triton", median_us=1.0, plugin="other:it", **VALUES),
        one("layer", "torch_loop", median_us=3.0, shared_intermediate=64, **VALUES),
        one("layer", "torch_grouped_mm", median_us=1.5, ep=2, **VALUES),
    ]
    assert [entry.times for entry in regret.entries(frame(*rows), "run")] == [{"cute": 2.0}]


def test_an_entry_is_as_old_as_its_first_row() -> None:
    rows = [
        one("layer", name, median_us=2.0, **VALUES | {"cell": "c", "started_at": at})
        for name, at in (("cute", "2026-11-22"), ("triton", "2026-11-21"), ("torch_loop", "2026-11-23"))
    ]
    (entry,) = regret.entries(frame(*rows), "run")
    assert entry.measured == "2026-11-21"


@pytest.mark.parametrize(
    ("mean", "worst", "met"),
    [(0.03, 0.15, True), (0.031, 0.0, False), (0.0, 0.151, False)],
)
def test_a_bar_is_of_the_mean_and_of_the_worst(mean: float, worst: float, met: bool) -> None:
    assert regret.Summary("all", 3, mean, worst).met == met


def test_another_package_is_judged_where_it_is_asked_for(monkeypatch, capsys):
    """By hand: SonicMoE takes 80 µs where the best of ours takes 100."""
    monkeypatch.setattr(command, "of_runs", lambda _: [SMALL])
    told = []
    for peers in (False, True):
        command.choices(["run"], peers=peers)
        told.append(capsys.readouterr().out)
    assert "triton 100" in told[0] and "in the table, against the best measured: mean 25.0%" in told[0]
    assert "in the table, against the best measured: mean 0.0%" in told[1]
