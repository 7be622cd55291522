"""What rows say of each bar of routing: on the bar, beside it, within noise, of other cells, without an interval, on several cards."""

import math

import pytest
from rows import frame, one

from moe_routing_bench.comparison.ratios import Estimate
from moe_routing_bench.report import reached, routing_bars
from moe_routing_bench.report.bars import PERCENT, PLATFORM, WITHIN, Bar, Figure, Level
from moe_routing_bench.report.parts import BarLine

LARGE = {"tokens": 16384, "hidden": 2048, "experts": 128, "top_k": 8}
BLOCKS = (1.0, 1.001, 0.999, 1.0)
BY_NAME = {bar.what: bar for bar in routing_bars.BARS}


DRIFTED = {"suspect": True, "suspect_reason": "ceilings drifted 3% during the cell", "calibration_drift": 0.03}


def row(bench: str, implementation: str = "cute", us: float = 100.0, **values: object) -> dict[str, object]:
    """A row of the platform that the bars are for, of the cell that its values name, with an interval of 1 % on either side."""
    key = "-".join(f"{name}{value}" for name, value in values.items() if not name.startswith(("share", "gpu", "stage")))
    known = {
        "platform": PLATFORM,
        "cell": f"{bench}-{key}",
        "cell_hash": f"{bench}-{key}",
        "set_aside": 0,
        "code_fingerprint": bench[0] * 16,
    }
    times = {
        "median_us": us,
        "ci_low_us": us * 0.99,
        "ci_high_us": us * 1.01,
        "block_medians_us": [us * i for i in BLOCKS],
    }
    return one(bench, implementation, **known | times | values)


def lines(what: str, *rows: dict[str, object], absent: bool = False) -> list[BarLine]:
    return reached.lines([BY_NAME[what]], {"h200": frame(*rows)}, absent)


def line(what: str, *rows: dict[str, object]) -> BarLine:
    (found,) = lines(what, *rows)
    return found


def test_bars_have_names_of_their_own_and_are_of_one_platform() -> None:
    assert len(BY_NAME) == len(routing_bars.BARS) == 17
    assert not any(lines(what, row("gate", platform="cpu", **LARGE)) for what in BY_NAME)
    assert {line.verdict for what in BY_NAME for line in lines(what, absent=True)} == {"not measured"}


@pytest.mark.parametrize(("bench", "bar"), [("pack", 0.95), ("combine", 0.96)])
def test_shares_of_the_stream(bench: str, bar: float) -> None:
    """Of large shapes, by k; whatever the assignments were drawn from, but in the default format and layout."""
    what, large = (
        f"{bench}, T ≥ 16384, H ≥ 2048: cute's share of the stream of its mix",
        {"tokens": 16384, "hidden": 2048},
    )
    rows = [
        row(bench, **large, top_k=8, share_of_stream=0.97, sampler="exact"),
        row(
            bench,
            tokens=32768,
            hidden=4096,
            top_k=8,
            share_of_stream=0.99,
            share_of_short_stream=0.99,
            sampler="trace",
            trace="a",
        ),
        row(bench, **large, top_k=2, experts=8, share_of_stream=bar * 1.02, share_of_short_stream=0.985),
        row(bench, **large, top_k=2, experts=16, share_of_stream=bar, share_of_short_stream=0.995),
        row(bench, tokens=16383, hidden=2048, top_k=2, share_of_stream=0.1),
        row(bench, tokens=16384, hidden=2047, top_k=2, share_of_stream=0.1),
        row(bench, **large, top_k=4),
        row(bench, "triton", **large, top_k=2, experts=8, share_of_stream=0.1),
        row(bench, **large, top_k=2, share_of_stream=0.1, capacity_factor=1.25),
        row(bench, **large, top_k=2, share_of_stream=0.1, dtype="bf16", packed="fp8_row"),
        row(bench, **large, top_k=2, share_of_stream=0.1, layout="block64"),
    ]
    if bench == "combine":  # it reads neither a format nor a layout
        rows = rows[:-2]
    else:
        rows[0] |= {"dtype": "bf16", "packed": "bf16"}  # as if it were left out
    found = line(what, *rows)
    least, most = f"{bar:.2%}".replace("%", " %"), f"{bar * 1.02:.2%}".replace("%", " %")
    assert found.measured.startswith(f"k=2: {least} [") and f"] to {most} [" in found.measured
    assert (
        "] (of a stream as short: 98.50 to 99.50 %); k=8: 97.00 % [96.04, 97.98] to 99.00 % [98.02, 100.00]"
        in found.measured
    )
    assert found.measured.endswith("100.00]"), "not every cell of k=8 has a short stream, and none misses"
    assert (found.bar, found.cells, found.left_out) == (f"each ≥ {bar:.0%}".replace("%", " %"), "4 of 4", "–")
    assert found.verdict == "reached, within noise", "one is on the bar"
    missed = line(what, *rows[:3], rows[3] | {"share_of_stream": bar * 0.98})
    assert missed.verdict == "missed" and missed.measured.endswith("; 1 of 4 miss the bar of each")
    assert line(what, *rows[:3], rows[3] | {"share_of_stream": bar * 0.995}).verdict == "missed, within noise"
    assert line(what, *rows[:3]).verdict == "reached" and lines(what, *rows[4:]) == []
    drifted = line(what, *rows[:3], rows[3] | DRIFTED | {"share_of_stream": bar * 1.02})
    assert (drifted.verdict, drifted.cells, drifted.left_out) == ("reached, within noise", "4 of 4", "–")
    doubted = line(what, *rows[:3], rows[3] | {"suspect": True, "suspect_reason": "another process"})
    assert (doubted.verdict, doubted.cells, doubted.left_out) == ("open", "3 of 4", "suspect cells: 1")
    assert f"; suspect: k=2: {least} [" in doubted.measured
    many = [rows[2] | {"cell": f"{i}", "cell_hash": f"{i}", "experts": i} for i in range(100, 110)]
    doubted = line(what, *many, rows[3] | {"suspect": True, "suspect_reason": "another process"})
    assert doubted.cells == "10 of 11" and f"; suspect: k=2: {least} [" in doubted.measured, "however many there are"


@pytest.mark.parametrize("bench", ["pack", "combine"])
def test_small_copies(bench: str) -> None:
    """16 to 64 MB, both ends included."""
    what = f"{bench}, 16 to 64 MB: cute's share of a copy"
    rows = [
        row(bench, tokens=1, compulsory_bytes=16e6, share_of_copy=0.82, share_of_short_stream=0.9),
        row(bench, tokens=2, compulsory_bytes=64e6, share_of_copy=0.95),
        row(bench, tokens=3, compulsory_bytes=64e6 + 1, share_of_copy=0.1),
        row(bench, tokens=4, compulsory_bytes=16e6 - 1, share_of_copy=0.1),
    ]
    found = line(what, *rows)
    assert (
        found.measured
        == "T1: 82.00 % [81.19, 82.83] (cute, of a stream as short: 90.00 %); T2: 95.00 % [94.06, 95.96] (cute)"
    )
    assert (found.bar, found.verdict, found.cells) == ("each ≥ 80 %", "reached", "2 of 2")
    assert line(what, rows[0] | {"share_of_copy": 0.79}).verdict == "missed" and lines(what, *rows[2:]) == []


def pairs(bench: str, rival: str, *times: tuple[float, float]) -> list[dict[str, object]]:
    """Cells of so many tokens in which the rival takes the first time and cute the second."""
    found = []
    for tokens, (theirs, ours) in enumerate(times, 1):
        found += [row(bench, rival, theirs, tokens=tokens), row(bench, "cute", ours, tokens=tokens)]
    return found


@pytest.mark.parametrize("bench", ["gate", "permute", "pack", "combine"])
def test_against_triton(bench: str) -> None:
    """In the geometric mean over the cells that both ran on one card; a drift of the ceilings is in no ratio."""
    what = f"{bench}: speed of cute over triton"
    apart = [row(bench, "triton", 1.0, tokens=9), row(bench, "cute", 9.0, tokens=9, gpu_uuid="GPU-2")]
    alone = row(bench, "cute", 9.0, tokens=10, top_k=99)  # a cell that triton did not run
    drifted = [one | DRIFTED for one in pairs(bench, "triton", (20, 10), (6, 10))]
    found = line(what, *drifted, *apart, alone, row(bench, "torch", 0.1, tokens=1))
    assert found.measured == (
        "1.095x [1.095, 1.095] in the geometric mean of cells that differ in tokens; worst: T2: 0.600x [0.600, 0.600] (cute, triton); "
        "best: T1: 2.000x [2.000, 2.000] (cute, triton)"
    )
    assert (found.bar, found.cells, found.verdict) == ("≥ 1x in the geometric mean", "2 of 2", "reached")
    equal = line(what, *pairs(bench, "triton", (5, 5)))  # a mean of one cell is not one of cells that differ
    assert (
        equal.measured == "1.000x [1.000, 1.000] in the geometric mean; worst: T1: 1.000x [1.000, 1.000] (cute, triton)"
    )
    assert equal.verdict == "reached"
    assert line(what, *pairs(bench, "triton", (4.9, 5))).verdict == "missed"
    near = pairs(bench, "triton", (5.01, 5))
    near[0]["block_medians_us"] = [4.8, 5.2, 5.0, 5.02]
    assert line(what, *near).verdict == "reached, within noise"
    assert line(what, *apart).verdict == "not comparable" and line(what, *apart).cells == "0 of 1"
    assert lines(what, apart[0]) == [] and lines(what, alone) == []


def test_against_quack() -> None:
    """Nowhere slower; equal is not slower. What other implementations could not run takes no part."""
    what = "gate: speed of cute over QuACK"
    found = line(what, *pairs("gate", "quack", (20, 10), (5, 5)), row("gate", "vllm", tokens=1, status="unsupported"))
    assert (found.bar, found.verdict, found.left_out) == (
        "each ≥ 1x",
        "reached",
        "–",
    ) and "T2: 1.000x" in found.measured
    lost = line(what, *pairs("gate", "quack", (20, 10)), row("gate", "quack", tokens=7, status="unsupported"))
    assert (lost.left_out, lost.verdict) == ("rows without a time: 1", "reached")
    found = line(what, *pairs("gate", "quack", *[(20, 10)] * 5, (4, 5), (3, 5)))
    assert found.verdict == "missed" and found.measured.endswith("; 2 of 7 miss the bar of each")
    assert (
        "1.477x [" in found.measured and "worst: T7: 0.600x" in found.measured and "best: T1: 2.000x" in found.measured
    )
    assert lines(what, *pairs("pack", "quack", (20, 10))) == []


@pytest.mark.parametrize(
    ("bench", "values", "what", "most"),
    [
        ("gate", {"tokens": 16384, "dtype": "fp32"}, "gate, T=16384, E=128, k=8, fp32: time of cute", 8),
        ("permute", {"tokens": 16384}, "permute, 131,072 assignments, E=128: time of cute", 12),
    ],
)
def test_times_of_one_cell(bench: str, values: dict[str, object], what: str, most: float) -> None:
    """On the bar is met. Another size, format or number of experts is another cell."""
    at = {**values, "experts": 128, "top_k": 8}
    found = line(what, row(bench, "cute", most, **at), row(bench, "triton", 1.0, **at))
    assert found.measured == f"T=16384: {most:.2f} µs [{most * 0.99:.2f}, {most * 1.01:.2f}] (cute)"
    assert (found.bar, found.verdict, found.cells) == (f"≤ {most} µs", "reached, within noise", "1 of 1")
    verdicts = {us: line(what, row(bench, "cute", us, **at)).verdict for us in (most * 0.98, most * 1.005, most * 1.02)}
    assert list(verdicts.values()) == ["reached", "missed, within noise", "missed"]
    others = [{"tokens": 8192}, {"experts": 64}, {"top_k": 4}, *([{"dtype": "bf16"}] if bench == "gate" else [])]
    assert all(lines(what, row(bench, **at | other)) == [] for other in others)
    assert lines(what, row(bench, **at) | {"status": "crashed"}) == []


def test_gate_and_permute_together() -> None:
    """As stages of routing, of up to 512 tokens; each counts. No interval is stored of a stage, so none is claimed."""
    what = "gate and permute, E=128, k=8, T ≤ 512: time of both as stages of routing"
    plain, stages = {"experts": 128, "top_k": 8}, [("router", 3.0), ("permute", 5.0), ("pack", 90.0)]
    rows = [
        row("routing", tokens=512, stage_us=stages, **plain),
        row("routing", tokens=128, stage_us=[("router", 2.5), *stages[1:]], **plain),
        row("routing", tokens=513, stage_us=[("router", 9.0), ("permute", 9.0)], **plain),
        row("routing", tokens=256, **plain),
        row("routing", tokens=256, stage_us=[("router", 9.0), ("permute", 9.0)], **plain | {"experts": 64}),
        row("routing", "triton", tokens=512, stage_us=[("router", 9.0), ("permute", 9.0)], **plain),
    ]
    found = line(what, *rows)
    assert found.measured == "T512 E128 k8: 8.00 µs [no interval] (cute); T128 E128 k8: 7.50 µs [no interval] (cute)"
    assert (found.bar, found.cells, found.verdict) == ("each ≤ 8 µs", "2 of 2", "reached, no interval")
    late = rows[1] | {"stage_us": [("router", 3.01), ("permute", 5.0)]}
    assert line(what, rows[0], late).verdict == "missed, no interval" and lines(what, *rows[2:]) == []


@pytest.mark.parametrize(("tokens", "most"), [(64, 20), (512, 28)])
def test_small_routings_are_bound_by_their_time(tokens: int, most: float) -> None:
    what, at = f"routing, T={tokens}, H=2048, E=128, k=8: time of cute", LARGE | {"tokens": tokens}
    ours, torch = row("routing", "cute", most * 0.98, **at), row("routing", "torch", most * 0.98 * 3.456, **at)
    found = line(what, ours, torch)
    assert found.measured.startswith(f"T={tokens}: {most * 0.98:.2f} µs [") and found.measured.endswith(
        "] (cute, 3.46x torch)"
    )
    assert (found.bar, found.verdict) == (f"≤ {most} µs", "reached")
    assert line(what, ours).measured.endswith("] (cute)"), "torch need not have run"
    assert line(what, row("routing", "cute", most * 1.02, **at)).verdict == "missed"
    assert all(
        lines(what, row("routing", **at | other)) == []
        for other in ({"hidden": 4096}, {"experts": 64}, {"top_k": 2}, {"skew": 0.7})
    )


OVER, TORCH = (
    f"routing, T=16384, H=2048, E=128, k=8: {what}"
    for what in ("time of cute over the sum of its floors", "speed of cute over torch")
)


def floors(routing: float = 55.0) -> list[dict[str, object]]:
    """Routing in so many us over floors of 18, 20, 5 and 7."""
    at = {"tokens": 16384, "top_k": 8}
    return [
        row("routing", "cute", routing, **LARGE),
        row("pack", "cute", 20.0, hidden=2048, experts=7, **at, share_of_stream=0.9, share_of_copy=0.1),
        row("combine", "cute", 20.0, hidden=2048, **at, share_of_stream=1.0, share_of_copy=0.1),
        row("gate", "cute", 7.0, experts=128, dtype="fp32", **at, share_of_copy=5 / 7, share_of_stream=0.1),
        row("permute", "cute", 9.0, experts=128, **at, share_of_copy=7 / 9, share_of_stream=0.1),
    ]


def test_the_large_routing_against_its_floors() -> None:
    """The interval is that of routing: a floor is a time by a share, whose scatter is not known."""
    found = line(OVER, *floors(), row("pack", "triton", 1.0, tokens=16384, top_k=8, hidden=2048, share_of_stream=0.1))
    assert found.measured == "T=16384: 1.100x [1.089, 1.111] (of 50 µs)"
    assert (found.bar, found.verdict, found.cells) == ("≤ 1.12x", "reached", "1 of 1")
    verdicts = [line(OVER, *floors(us)).verdict for us in (55.9, 56.2, 57)]
    assert verdicts == ["reached, within noise", "missed, within noise", "missed"]
    for i in range(5):
        rows = floors()
        rows[i]["gpu_uuid"] = "GPU-2"
        apart = line(OVER, *rows)
        assert apart.measured == "not comparable: measured on different cards or by different code"
        assert (apart.verdict, apart.cells) == ("not comparable", "0 of 1")
        rows[i] |= {"gpu_uuid": "GPU-1", "suspect": True, "suspect_reason": "another process"}
        assert line(OVER, *rows).cells == "0 of 1"
        del rows[i]
        assert lines(OVER, *rows) == []
    rows = floors()
    rows[1]["share_of_stream"] = None
    assert lines(OVER, *rows) == []
    assert line(OVER, *(one | {"gpu_uuid": None} for one in floors())).verdict == "reached", "rows of one host"


def test_versions_of_one_stage_are_not_pooled() -> None:
    """Each has a line, with the code of every bench; the order of the rows does not matter."""
    pack = floors()[1] | {"code_fingerprint": "x" * 16, "share_of_stream": 1.0}
    first, second = lines(OVER, pack, *floors())
    assert [one.measured.partition(" [")[0] for one in (first, second)] == ["T=16384: 1.100x", "T=16384: 1.058x"]
    assert first.where == "h200, GPU-1, code rrrrrrrr, pppppppp, cccccccc, gggggggg, pppppppp"
    assert second.where == "h200, GPU-1, code rrrrrrrr, xxxxxxxx, cccccccc, gggggggg, pppppppp"


def test_the_large_routing_against_torch() -> None:
    found = line(TORCH, row("routing", "cute", 56.0, **LARGE), row("routing", "torch", 56 * 4.1, **LARGE))
    assert found.measured == "T=16384: 4.100x [4.100, 4.100] (cute, torch; 56.0 µs)"
    assert (found.bar, found.verdict) == ("≥ 4x", "reached")
    assert (
        line(TORCH, row("routing", "cute", 56.0, **LARGE), row("routing", "torch", 56 * 3.9, **LARGE)).verdict
        == "missed"
    )
    assert lines(TORCH, row("routing", "cute", 56.0, **LARGE)) == []


def test_skewed_against_balanced() -> None:
    """Within a tenth, faster or slower, with the interval on the same side."""
    what = "routing, T=16384, H=2048, E=128, k=8: time of cute with skewed loads over balanced, less 1"

    def found(first: float, second: float, **values: object) -> BarLine:
        even, *skewed = (
            row("routing", "cute", us, **LARGE | {"skew": skew})
            for skew, us in ((0.0, 100.0), (1.7, first), (3.7, second))
        )
        return line(what, even, *(one | values for one in skewed))

    one = found(109.0, 91.0)
    assert one.measured.startswith("skew 1.7: 9.0 % [8.") and "; skew 3.7: -9.0 % [-9." in one.measured
    assert (one.bar, one.cells, one.verdict) == ("each within 10 %", "2 of 2", "reached")
    verdicts = [found(*times).verdict for times in ((111, 91), (109, 89), (110.05, 100), (90.05, 100), (110.05, 89.95))]
    assert verdicts == ["missed", "missed", "missed, within noise", "reached, within noise", "missed, within noise"]
    assert found(109.0, 91.0, gpu_uuid="GPU-2").verdict == "not comparable"
    even, skewed = row("routing", **LARGE, skew=0.0), row("routing", **LARGE, skew=3.7)
    assert line(what, even, skewed).verdict == "open" and lines(what, even) == [] == lines(what, skewed)
    assert lines(what, even, row("routing", **LARGE, skew=2.0)) == []


def test_an_interval_around_the_ideal_is_the_best_that_it_can_be() -> None:
    assert [WITHIN.off(value) for value in (1.0, 1.25, 0.75)] == [0, 0.25, 0.25]
    wide = Estimate(1.2, 0.7, 1.25)
    assert (WITHIN.best(wide), WITHIN.worst(wide)) == (1.0, 0.7)
    bar = Bar("a", "gate", lambda rows: Figure(wide, rows), Level(each=1.1), cells={"b": {"tokens": 1}}, side=WITHIN)
    (found,) = reached.lines([bar], {"": frame(row("gate", tokens=1))})
    assert (found.verdict, found.bar) == ("missed, within noise", "within 1.1x")


def test_a_second_figure_is_named_as_the_bar_names_it() -> None:
    bar = Bar(
        "a",
        "gate",
        lambda rows: Figure(Estimate(0.5, 0.4, math.nan), rows, second=0.25),
        Level(each=0.1),
        cells={"b": {"tokens": 1}},
        unit=PERCENT,
        second="at rest",
    )
    (found,) = reached.lines([bar], {"": frame(row("gate", tokens=1))})
    assert found.measured == "b: 50.0 % [no interval] (at rest: 25.0 %)"
