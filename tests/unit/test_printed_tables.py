"""The tables that commands print: every cell, of rows whose columns all have other numbers, so that a wrong column, unit or filter shows."""

from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest

from moe_routing_bench.cli import (
    accuracy,
    choices,
    claims,
    compare,
    printing,
    profile,
    scale,
    status,
    trace,
    train,
    watch,
)
from moe_routing_bench.cli import list as listed
from moe_routing_bench.comparison import runs
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.errors import UserError


def cells(table):
    """The texts of a table, by its rows."""
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_rows_of_a_cell():
    timed = {"status": "ok", "median_us": 12.345, "ci_low_us": 11.5, "ci_high_us": 13.75, "gb_per_s": 321.5}
    rows = [
        {"implementation": "cute", **timed, "share_of_roofline": 0.456, "speedup": 2.5},
        {"implementation": "torch", "status": "crashed", "reason": "no memory", "median_us": None},
        {"implementation": "triton", "status": "ok", "median_us": 1.0, "suspect": True, "suspect_reason": "drift"}
        | {"converged": False, "cold": False, "timer": "events", "reason": "none"},
        {"implementation": "gather", "status": "ok", "median_us": 1.0, "cold": False, "timer": "wall"},
    ]
    table = printing.results(Cell("gate", "T8", (("tokens", 8),)), rows)
    assert table.title == "gate T8" and table.caption is None
    assert cells(table) == [
        ["cute", "ok", "12.35", "11.50 to 13.75", "321.50", "46 %", "2.50", ""],
        ["torch", "crashed", "", "", "", "", "", "no memory"],
        ["triton", "ok", "1.00", "", "", "", "", "suspect: drift; interval still wide; L2 may be warm"],
        ["gather", "ok", "1.00", "", "", "", "", ""],
    ]


def test_loads_of_a_cell():
    """Of the first row that has them; drops are said where there is a limit."""
    loads = {"load_cv": 0.25, "load_max_over_mean": 1.75, "dead_experts": 3, "drop_rate": 0.125}
    free = printing._loads([{"load_cv": None}, loads, loads | {"load_cv": 9.0}])
    assert free == "loads: CV 0.25, busiest expert 1.75x the mean, 3 without a token"
    assert printing._loads([loads | {"capacity_factor": 1.5}]) == f"{free}; 12.5 % of the assignments dropped"
    assert printing._loads([{"load_cv": None}]) is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (89.4, "89 s"), (90.0, "2 min"), (3599.0, "60 min"), (3600.0, "1.0 h"), (9000.0, "2.5 h")],
)
def test_durations(seconds, said):
    assert printing.duration(seconds) == said


def test_places_are_counted_once_each():
    rows = [
        {"gpu_uuid": uuid, "gpu_name": "H200", "host": host, "slurm_job_id": job}
        for uuid, host, job in (("A", "n2", None), ("B", "n1", "7"), ("A", "n1", "7"))
    ]
    assert printing.places(rows) == "2 H200; 2 nodes (n1, n2); 1 SLURM job (7)"
    four = [{"host": f"n{i}", "slurm_job_id": None} for i in range(4)]
    assert printing.places(four) == "4 nodes (n0, n1, n2, n3)"
    assert printing.places([{"host": None, "slurm_job_id": None}]) == "machines that no row names"


def test_a_trace():
    summary = SimpleNamespace(
        tokens=640,
        top_k=3,
        experts=16,
        seen=14,
        dead=2,
        load_cv=0.4567,
        load_max_over_mean=1.2345,
        drops=(0.25, 0.0625),
    )
    values = dict(cells(trace._printed(summary, (1.0, 1.25), True)))
    assert list(values.values()) == ["640", "3", "16", "14", "2", "0.457", "1.234", "25.00%", "6.25%"]
    assert list(values)[-2:] == ["dropped at capacity factor 1", "dropped at capacity factor 1.25"]
    guessed = dict(cells(trace._printed(summary, (1.0, 1.25), False)))["experts"]
    assert guessed.startswith("16 (the highest id + 1")


def test_a_comparison():
    nan = float("nan")
    row = {"bench": "gate", "cell": "T8", "implementation": "cute", "before_us": 10.0, "after_us": 8.0, "ratio": 1.25}
    row |= {"ratio_ci_low": 1.125, "ratio_ci_high": 1.375, "verdict": "faster", "reason": None}
    lost = row | {"after_us": nan, "ratio": nan, "ratio_ci_low": nan, "ratio_ci_high": nan} | {"verdict": "lost"}
    table = compare._printed(pd.DataFrame([row, lost | {"reason": "crashed"}]), "a -> b")
    assert cells(table) == [
        ["gate", "T8", "cute", "10.00", "8.00", "1.250 (1.125 to 1.375)", "faster"],
        ["gate", "T8", "cute", "10.00", "", "", "lost: crashed"],
    ]


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), (" 2.5 % ", 0.025), ("40", 0.4), ("0", 0.0)])
def test_a_share_is_in_percent(text, share):
    assert compare._share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["-3%", "3%%", "x", "", "1e3", "3 % of it"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UserError, match="--fail-if-slower"):
        compare._share(text)


def test_claims():
    claim = SimpleNamespace(id="a1", who="theirs", hardware="H100", figure=1.5, unit="x")
    held = SimpleNamespace(claim=claim, ours=1.23456, cells=4, verdict="reproduced", why="")
    open_ = SimpleNamespace(
        claim=SimpleNamespace(**vars(claim) | {"hardware": ""}),
        ours=float("nan"),
        cells=0,
        verdict="open",
        why="no row",
    )
    assert cells(claims._table([held, open_])) == [
        ["a1", "theirs", "H100", "1.5 x", "1.235 x", "4", "reproduced"],
        ["a1", "theirs", "not said", "1.5 x", "", "", "open: no row"],
    ]


def test_choices():
    """The times of the best of ours and of all; the regret among our own first, that among all in brackets."""
    entry = SimpleNamespace(times={"cute": 20.0, "vllm": 10.0}, label="T8", suspect={"cute": "drift", "vllm": "drift"})
    parts = [SimpleNamespace(name="cute", own=0.25, all=0.5), SimpleNamespace(name="triton", own=0.125, all=0.75)]
    line = SimpleNamespace(entry=entry, choices=parts, best_own="cute", best="vllm", unmeasured=["no row"])
    assert cells(choices._printed([line])) == [
        ["T8", "cute 20 µs", "vllm 10 µs", "cute", "25.0% (50.0%)", "triton", "12.5% (75.0%)", "no row; drift"]
    ]
    assert choices._summary(SimpleNamespace(mean=0.125, worst=0.5, cells=7)) == "mean 12.5%, worst 50.0% over 7 cells"


def test_bars():
    names = ("what", "bar", "stretch", "measured", "cells", "left_out", "verdict", "where")
    assert cells(choices._bars([SimpleNamespace(**{name: name for name in names})])) == [list(names)]


ESTIMATE = {
    **{"ep": 8, "tp": 2, "dp": 4, "mode": "normal", "experts_us": 11.0, "dispatch_us": 12.0, "combine_us": 13.0},
    **{"layer_us": 36.0, "drawn_us": 38.0, "low_us": 37.0, "high_us": 39.0, "planned_us": 37.5, "busiest": 1.25},
    **{"communication": 0.625, "memory_share": 0.5, "fits": True, "source": "stored"},
}


def test_ways_of_many_gpus(capsys):
    """In the order of the columns, the best one marked; what is not validated or not known has no number."""
    question = SimpleNamespace(model="m", sizes=SimpleNamespace(weights="bf16"), gpus=8, tokens=128, skew=0.5)
    best = SimpleNamespace(**ESTIMATE)
    other = SimpleNamespace(**ESTIMATE | {"ep": 4, "planned_us": None, "memory_share": 1.5, "fits": False})
    rows = [{"error_median": 0.125, "error_p90": 0.25}, {"error_median": None, "error_p90": None}]
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "show", shown.append)
        scale._print(question, [best, other], rows, best, {(16, 1): "no slots"})
    first, second = cells(shown[0])
    assert first[:9] == ["8 *", "2", "4", "normal", "11 µs", "12 µs", "13 µs", "36 µs", "38 µs (37 µs to 39 µs)"]
    assert first[9:] == ["37.5 µs", "1.25x", "62%", "12% (25%)", "50%", "stored"]
    assert second[0] == "4" and second[9:] == ["–", "1.25x", "62%", "not validated", "150%, too much", "stored"]
    assert shown[0].title == "m, bf16, 8 GPUs, 128 tokens of each, skew 0.5"
    assert capsys.readouterr().out.splitlines() == [
        "* best: EP 8 x TP 2 x DP 4, 38 µs; a model's estimate, not a measurement",
        "without EP 16, TP 1: no slots",
    ]


def test_the_error_of_a_way_is_weighed_by_the_time_of_its_parts():
    """Of experts that were measured none; without a band of one part it is not known."""
    question = SimpleNamespace(
        **{"model": "m", "sizes": SimpleNamespace(weights="bf16"), "gpus": 8, "tokens": 128, "payload": "fp8"},
        **{"overlap": 0.0, "skew": 0.0, "trace": None, "trials": 8, "seed": 17},
    )
    bands = {("normal", False): (0.1, 0.2), ("experts", False): (0.5, 0.75)}

    def error(mode="normal", measured=False, ep=8):
        one = {
            "mode": mode,
            "dispatch_us": 10.0,
            "combine_us": 30.0,
            "experts_us": 60.0,
            "measured": measured,
            "ep": ep,
        }
        row = scale._row(question, SimpleNamespace(**one, asdict=lambda: {}), bands, "p")
        return row["error_median"], row["error_p90"]

    assert error() == pytest.approx((0.4 * 0.1 + 0.6 * 0.5, 0.4 * 0.2 + 0.6 * 0.75))
    assert error(measured=True) == pytest.approx((0.04, 0.08))
    assert error(mode="none") == (0.5, 0.75) and error(ep=9) == (None, None)


def test_accuracies():
    row = {name: 1 / (3 + i) for i, (name, form) in enumerate(accuracy._COLUMNS.values()) if form}
    row |= {name: name for name, form in accuracy._COLUMNS.values() if not form}
    (shown,) = cells(accuracy._table([row], "title"))
    assert shown == [
        *("weights", "activations", "drawn", "0.2", "0.14", "1.25e-01", "0.1", "0.100000"),
        *("implementation", "8.33e-02", "7.7e-02", "0.1", "status", "reason"),
    ]
    assert cells(accuracy._table([{"weights": "w"}], "title"))[0] == ["w", *[""] * 13]


def test_cells_of_accuracy():
    """Every format with every kind of activations; plain weights have the format of these, quantised activations are rows in bf16."""
    sizes = {"tokens": 4, "hidden": 128, "intermediate": 64, "experts": 4, "top_k": 2, "seed": 3}
    found = accuracy._cells(["plain", "int4_g32"], ["fp16", "fp8_row"], sizes)
    assert [(one.weights, one.dtype, one.packed) for one in found] == [
        ("fp16", "fp16", "fp16"),
        ("bf16", "bf16", "fp8_row"),
        ("int4_g32", "fp16", "fp16"),
        ("int4_g32", "bf16", "fp8_row"),
    ]
    assert {(one.tokens, one.hidden, one.intermediate, one.experts, one.top_k) for one in found} == {(4, 128, 64, 4, 2)}


def test_profiles(tmp_path):
    """The first ten operators, device before CPU; an implementation that failed has its error."""
    known = [
        {"operator": f"op{i}" + "x" * 90, "kind": "kernel", "self_device_us": 10.25 + i, "self_cpu_us": 50.5 + i}
        | {"calls": 3 + i}
        for i in range(12)
    ]
    result = {
        "implementations": {
            "cute": {"self_cpu_us": 70.6, "self_device_us": 30.4, "operators": known},
            "torch": {"error": "no memory"},
        },
        "differences": [{"first": "cute", "second": "torch", "max_diff": 0.012345}],
    }
    own, failed, differences = profile._tables(result)
    assert own.title == "cute: one call, self CPU 71 us, self device 30 us" and len(cells(own)) == 10
    assert cells(own)[1] == [("op1" + "x" * 90)[:80], "kernel", "11.2", "51.5", "4"]
    assert (failed.title, cells(failed)) == ("torch", [["no memory"]])
    assert cells(differences) == [["cute", "torch", "0.0123"]]
    assert len(list(profile._tables(result | {"differences": []}))) == 2
    profile._write(result, tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0] == "implementation,operator,kind,self_device_us,self_cpu_us,calls" and len(lines) == 13
    assert lines[12] == f"cute,op11{'x' * 90},kernel,21.25,61.5,14"
    assert profile._ok([{"implementation": "a", "status": "ok"}, {"implementation": "b", "status": "hung"}]) == ["a"]


def test_implementations_that_are_named_are_profiled_and_no_others(monkeypatch, tmp_path):
    names, asked = ["torch", "triton", "cute"], []
    table = pa.table({"platform": ["cpu"] * 3, "implementation": names, "status": ["ok"] * 3})
    monkeypatch.setattr(profile.records, "read", lambda path: table)
    monkeypatch.setattr(profile.records, "spec_of", lambda table: "spec")
    monkeypatch.setattr(profile.platforms, "verify", lambda platform: None)
    monkeypatch.setattr(profile.Job, "from_spec", lambda spec: SimpleNamespace(implementations=tuple(names)))
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    monkeypatch.setattr(profile, "profiled", lambda job, rows, out: asked.append(profile._ok(rows)))
    for only in ("cute, torch", None):
        profile.profile(tmp_path / "cell.parquet", tmp_path / "out", only)
    assert asked == [["torch", "cute"], names]


def test_bits_of_weights_have_their_scales():
    """Of 128 elements of 4 bits with a scale of 16, 4.125; a zero point of 4 bits adds its share."""
    found = dict(cells(listed._weights()))
    assert (found["int4_g128"], found["int8_g128"], found["int2_g128"]) == ("4.125", "8.125", "2.125")


def test_the_seconds_of_a_cell_are_those_of_its_longest_row():
    """Each of a bench counts once; a row that was not measured takes none."""
    rows = [
        {"bench": bench, "cell": cell, "measure_seconds": seconds}
        for bench, cell, seconds in (("gate", "a", 2.0), ("gate", "a", 5.0), ("gate", "a", 3.0), ("pack", "a", 7.0))
    ]
    assert status._seconds([*rows, {"bench": "pack", "cell": "b", "measure_seconds": None}]) == [5.0, 7.0, 0.0]


def test_the_schedule_of_a_run_by_hand():
    assert train.schedule(250) == {"steps": 250, "eval_every": 250, "warmup": 25}
    run = train.by_hand("softk", "mlp", 5, 40, ["dim=96", "capacity_factor=none"])
    assert (run.router, run.network, run.seed, run.steps, run.dim, run.capacity_factor) == (
        *("softk", "mlp", 5, 40, 96),
        None,
    )


def test_what_a_watch_says_of_a_row(monkeypatch):
    watched = object.__new__(watch._Watch)
    watched._last = {"cute": {"implementation": "cute"}}
    seen = []
    rivals = SimpleNamespace(said=lambda row, rows, last: seen.append(last) or ["2.00x torch"])
    monkeypatch.setattr(watched, "_rivals", rivals, raising=False)
    row = {"implementation": "cute", "status": "ok", "median_us": 12.34567, "ci_low_us": 11.5, "ci_high_us": 13.25}
    assert list(watched._parts(row | {"share_of_roofline": 0.456}, {})) == [
        "right, 12.35 us [11.5, 13.25]",
        "46% of the limit",
        "2.00x torch",
    ]
    bare = list(watched._parts(row | {"ci_low_us": None, "share_of_roofline": None}, {}))
    assert bare == ["right, 12.35 us", "2.00x torch"]
    assert list(watched._parts({"status": "incorrect", "reason": "row 3"}, {})) == ["incorrect: row 3"]
    assert seen == [{"implementation": "cute"}] * 2
    watched._rounds, watched._fastest = 3, {"cute": {"median_us": 12.34567}, "b": {"median_us": 7.0}}
    assert watched.closing() == "3 rounds; fastest: cute 12.35 us, b 7 us"
    watched._rounds, watched._fastest = 1, {}
    assert watched.closing() == "1 round; fastest: none was right"


def test_what_is_the_same_takes_no_place_among_changes(monkeypatch, capsys):
    """Of the rows that changed as many as are asked for; all rows are counted, and repeated ones said."""
    verdicts = ["faster", "same", "slower", "same", "lost", "undecided"]
    rows = pd.DataFrame(
        {
            "bench": "gate",
            "cell": "c",
            "implementation": [f"i{number}" for number in range(6)],
            "before_us": 1.0,
            "after_us": 2.0,
            "ratio": 0.5,
            "ratio_ci_low": 0.4,
            "ratio_ci_high": 0.6,
            "verdict": verdicts,
            "reason": None,
        }
    )
    found = SimpleNamespace(marks=["torch"], rows=rows, changed=lambda: rows, repeated=lambda: 1)
    asked, shown = [], []
    monkeypatch.setattr(runs, "compare", lambda *given: asked.append(given) or found)
    monkeypatch.setattr(compare, "_table", lambda name: f"table of {name}")
    monkeypatch.setattr(compare, "show", lambda table: shown.append([row[2] for row in cells(table)]))
    for most in (3, 20, 0):
        compare.compare("a", "b", most=most)
    said = capsys.readouterr().out
    assert shown == [["i0", "i2", "i4"], ["i0", "i2", "i4", "i5"], []]
    assert asked == [("table of a", "table of b", False)] * 3 and "differs besides the code: torch" in said
    assert "6 rows: 2 same, 1 faster, 1 slower, 1 lost, 1 undecided" in said and "1 row was not measured again" in said
