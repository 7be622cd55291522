"""What rows say of each bar, on a few rows whose numbers are on the bar and just beside it."""

import importlib

import pytest
from rows import frame, one

from moe_routing_bench.report import targets
from moe_routing_bench.report.targets import APART, PLATFORM

LARGE = {"tokens": 16384, "hidden": 2048, "experts": 128, "top_k": 8}


def row(bench: str, implementation: str = "cute", **values: object) -> dict[str, object]:
    """A row of the platform that the bars are for."""
    return one(bench, implementation, platform=PLATFORM) | values


@pytest.fixture(autouse=True)
def made_anew() -> None:
    """The lines are made when the module is imported: as part of the test, so that it is known what they are made of."""
    importlib.reload(targets)


def lines(*rows: dict[str, object]) -> list[targets.Target]:
    return targets.targets(frame(*rows))


PLACES = (
    "stream of pack", "stream of combine", "small", "triton gate", "triton permute", "triton pack", "triton combine", "gate", "quack", "permute",
    "both", "large", "floors", "64", "512", "skew",
)  # fmt: skip


def line(place: str, *rows: dict[str, object]) -> targets.Target | None:
    """One line, worked out by itself: all of them take a while."""
    with pytest.MonkeyPatch.context() as only:
        only.setattr(targets, "_LINES", (targets._LINES[PLACES.index(place)],))
        found = lines(*rows)
    return found[0] if found else None


@pytest.mark.parametrize(("bench", "bar", "text"), [("pack", 0.95, "95%"), ("combine", 0.96, "96%")])
def test_shares_of_the_stream(bench, bar, text) -> None:
    """Of large shapes, by k; whatever the assignments were drawn from, but in the default format and layout."""
    large = {"tokens": 16384, "hidden": 2048}
    rows = [
        row(bench, **large, top_k=8, share_of_stream=0.97, sampler="exact"),
        row(bench, tokens=32768, hidden=4096, top_k=8, share_of_stream=0.98, share_of_short_stream=0.99, sampler="trace", trace="a"),
        row(bench, **large, top_k=2, share_of_stream=bar, share_of_short_stream=0.985),
        row(bench, tokens=16383, hidden=2048, top_k=2, share_of_stream=0.1),
        row(bench, tokens=16384, hidden=2047, top_k=2, share_of_stream=0.1),
        row(bench, **large, top_k=4),
        row(bench, "triton", **large, top_k=2, share_of_stream=0.1),
        row(bench, **large, top_k=2, share_of_stream=0.1, capacity_factor=1.25),
        row(bench, **large, top_k=2, share_of_stream=0.1, dtype="bf16", packed="fp8_row"),
        row(bench, **large, top_k=2, share_of_stream=0.1, layout="block64"),
    ]  # fmt: skip
    what, asked = f"{bench}, T ≥ 16384, H ≥ 2048", f"≥ {text} of the stream of its mix"
    seen = f"k=2: {bar:.1%} (of a stream as short: 98.5%); k=8: 97.0% to 98.0%"
    if bench == "combine":  # it reads neither a format nor a layout
        rows = rows[:-2]
    else:
        rows[0] |= {"dtype": "bf16", "packed": "bf16"}  # as if it were left out
    assert line(f"stream of {bench}", *rows) == targets.Target(what, asked, seen, 3, True)
    assert line(f"stream of {bench}", *rows[:2], rows[2] | {"share_of_stream": bar - 0.001}).met is False
    assert line(f"stream of {bench}", *rows[3:]) is None


def test_small_copies() -> None:
    """16 to 64 MB, both ends included."""
    rows = [
        row("pack", compulsory_bytes=16e6, share_of_copy=0.8, share_of_short_stream=0.9),
        row("combine", compulsory_bytes=64e6, share_of_copy=0.95),
        row("combine", compulsory_bytes=32e6, share_of_copy=0.85, trace="a"),
        row("combine", compulsory_bytes=64e6 + 1, share_of_copy=0.1),
        row("pack", compulsory_bytes=16e6 - 1, share_of_copy=0.1),
    ]
    seen = "combine 85.0% to 95.0%; pack 80.0% (of a stream as short: 90.0%)"
    assert line("small", *rows) == targets.Target("pack and combine, 16 to 64 MB", "≥ 80 % of a copy", seen, 3, True)
    assert line("small", rows[1], rows[0] | {"share_of_copy": 0.79}).met is False and line("small", *rows[3:]) is None


def pairs(bench: str, rival: str, *times: tuple[float, float]) -> list[dict[str, object]]:
    """Cells of so many tokens in which the rival takes the first time and cute the second."""
    rows = []
    for tokens, (theirs, ours) in enumerate(times):
        same = {"cell": f"{bench}{tokens}", "tokens": tokens}
        rows += [row(bench, rival, median_us=theirs, **same), row(bench, median_us=ours, **same)]
    return rows


@pytest.mark.parametrize("bench", ["gate", "permute", "pack", "combine"])
def test_against_triton(bench) -> None:
    """In the geometric mean over the cells that both ran on one card."""
    apart = [row(bench, "triton", median_us=1.0, cell="x", tokens=9), row(bench, median_us=9.0, cell="x", tokens=9, gpu_uuid="GPU-2")]  # fmt: skip
    ours = row(bench, median_us=9.0, cell="y", tokens=0, top_k=99)  # a cell that triton did not run
    rows = [
        *pairs(bench, "triton", (20, 10), (6, 10)),
        *apart,
        ours,
        row(bench, "torch", median_us=0.1, cell="x", tokens=9),
    ]
    seen = "1.095x in the geometric mean of cells that differ in tokens, 0.60x to 2.00x"
    assert line(f"triton {bench}", *rows) == targets.Target(
        f"{bench}: speed of cute over triton", "≥ 1x, geometric mean", seen, 2, True
    )
    assert (
        line(f"triton {bench}", *pairs(bench, "triton", (5, 5))).met is True
        and line(f"triton {bench}", *pairs(bench, "triton", (4.9, 5))).met is False
    )
    assert line(f"triton {bench}", *apart) is None and line(f"triton {bench}", apart[0]) is None


def test_against_quack() -> None:
    """Nowhere slower; equal is not slower."""
    seen = "1.41x in the geometric mean of cells that differ in tokens, slower in 0, 1.00x to 2.00x"
    found = line("quack", *pairs("gate", "quack", (20, 10), (5, 5)))
    assert found == targets.Target("gate: speed of cute over QuACK", "≥ 1x wherever QuACK runs", seen, 2, True)
    found = line("quack", *pairs("gate", "quack", (20, 10), (4, 5), (3, 5)))
    assert found.met is False and "slower in 2, 0.60x to 2.00x" in found.measured
    assert line("quack", *pairs("pack", "quack", (20, 10))) is None


@pytest.mark.parametrize(
    ("bench", "values", "what", "most"),
    [
        ("gate", {"tokens": 16384, "dtype": "fp32"}, "gate, T=16384, E=128, k=8, fp32", 8),
        ("permute", {"tokens": 16384}, "permute, 131,072 assignments, E=128", 12),
    ],
)
def test_times_of_one_cell(bench, values, what, most) -> None:
    """On the bar is met. Another size, format or number of experts is another cell."""
    one = row(bench, **values, experts=128, top_k=8, median_us=most)
    assert line(bench, one) == targets.Target(what, f"≤ {most} µs", f"{most}.00 µs", 1, True)
    assert line(bench, one | {"median_us": most + 0.001}) == targets.Target(
        what, f"≤ {most} µs", f"{most}.00 µs", 1, False
    )
    others = [{"tokens": 8192}, {"experts": 64}, {"top_k": 4}, *([{"dtype": "bf16"}] if bench == "gate" else [])]
    assert all(line(bench, one | other) is None for other in others)
    assert line(bench, one | {"status": "crashed"}) is None and line(bench, one | {"platform": "cpu"}) is None


def test_gate_and_permute_together() -> None:
    """As stages of routing, of up to 512 tokens; the longest counts."""
    stages = [("router", 3.0), ("permute", 5.0), ("pack", 90.0)]
    plain = {"experts": 128, "top_k": 8, "median_us": 50.0, "speedup": 3.0}
    rows = [
        row("routing", tokens=512, stage_us=stages, **plain),
        row("routing", tokens=128, stage_us=dict(stages) | {"router": 2.5}, **plain),
        row("routing", tokens=513, stage_us=[("router", 9.0), ("permute", 9.0)], **plain),
        row("routing", tokens=256, **plain),
        row("routing", tokens=256, stage_us=[("router", 9.0), ("permute", 9.0)], **plain | {"experts": 64}),
    ]
    seen = "T=512: 8.00 µs; T=128: 7.50 µs"
    assert line("both", *rows) == targets.Target(
        "gate and permute, E=128, k=8, T ≤ 512", "≤ 8 µs together", seen, 2, True
    )
    late = rows[1] | {"stage_us": [("router", 3.01), ("permute", 5.0)]}
    assert line("both", rows[0], late).met is False and line("both", *rows[2:]) is None


@pytest.mark.parametrize(("tokens", "most"), [(64, 20), (512, 28)])
def test_small_routings_are_bound_by_their_time(tokens, most) -> None:
    one = row("routing", **LARGE | {"tokens": tokens}, median_us=most, speedup=3.456)
    what, bar = f"routing, T={tokens}, H=2048, E=128, k=8", f"≤ {most} µs"
    assert line(str(tokens), one) == targets.Target(what, bar, f"{most}.0 µs, 3.46x torch", 1, True)
    assert line(str(tokens), one | {"median_us": most + 0.01}).met is False
    assert all(
        line(str(tokens), one | other) is None
        for other in ({"hidden": 4096}, {"experts": 64}, {"top_k": 2}, {"skew": 0.7})
    )


def floors(**change: float) -> list[dict[str, object]]:
    """Routing in 56 us over floors of 18, 20, 5 and 7."""
    times = {"routing": 56.0, "pack": 20.0, "combine": 20.0, "gate": 7.0, "permute": 9.0} | change
    return [
        row("routing", **LARGE, median_us=times["routing"], speedup=4.0),
        row("pack", tokens=16384, hidden=2048, top_k=8, experts=7, median_us=times["pack"], share_of_stream=0.9, share_of_copy=0.1),
        row("combine", tokens=16384, hidden=2048, top_k=8, median_us=times["combine"], share_of_stream=1.0, share_of_copy=0.1),
        row("gate", tokens=16384, experts=128, top_k=8, dtype="fp32", median_us=times["gate"], share_of_copy=5 / 7, share_of_stream=0.1),
        row("permute", tokens=16384, experts=128, top_k=8, median_us=times["permute"], share_of_copy=7 / 9, share_of_stream=0.1),
    ]  # fmt: skip


def test_the_large_routing_against_torch_and_its_floors() -> None:
    found = {one.what: one for one in lines(*floors())}
    assert list(found) == [
        "pack, T ≥ 16384, H ≥ 2048", "combine, T ≥ 16384, H ≥ 2048", "gate, T=16384, E=128, k=8, fp32",
        "permute, 131,072 assignments, E=128", "routing, T=16384, H=2048, E=128, k=8", "routing, T=16384, over the sum of its floors",
    ]  # fmt: skip
    what, over = "routing, T=16384, H=2048, E=128, k=8", "routing, T=16384, over the sum of its floors"
    assert found[what] == targets.Target(what, "≥ 4x torch", "56.0 µs, 4.00x torch", 1, True)
    assert found[over] == targets.Target(over, "≤ 1.12x", "1.120x of 50 µs", 1, True)
    assert line("floors", *floors(routing=56.1)) == targets.Target(over, "≤ 1.12x", "1.122x of 50 µs", 1, False)
    assert line("large", row("routing", **LARGE, median_us=56.0, speedup=3.99)).met is False
    for i in range(5):
        rows = floors()
        rows[i]["gpu_uuid"] = "GPU-2"
        assert line("floors", *rows) == targets.Target(over, "≤ 1.12x", APART, 1, None)
        del rows[i]
        assert line("floors", *rows) is None
    assert line("floors", *(one | {"gpu_uuid": None} for one in floors())).met, "rows of one host"


def test_skewed_against_balanced() -> None:
    """Within a tenth, faster or slower."""
    even = row("routing", **LARGE, skew=0.0, median_us=100.0, speedup=5.0)
    skewed = [row("routing", **LARGE, skew=skew, median_us=us, speedup=5.0) for skew, us in ((1.7, 109.0), (3.7, 91.0))]
    what = "routing, T=16384, skewed over balanced"

    def found(*rows) -> targets.Target | None:
        return line("skew", *rows)

    assert found(even, *skewed) == targets.Target(what, "within 10 %", "skew 1.7: 1.090x; skew 3.7: 0.910x", 2, True)
    assert found(even, skewed[1]) == targets.Target(what, "within 10 %", "skew 3.7: 0.910x", 1, True)
    assert found(even, skewed[0] | {"median_us": 111.0}, skewed[1]).met is False
    assert found(even, skewed[0], skewed[1] | {"median_us": 89.0}).met is False
    assert found(even) is None and found(*skewed) is None and found(even, skewed[0] | {"skew": 2.0}) is None
    assert found(even | {"gpu_uuid": "GPU-2"}, *skewed) == targets.Target(what, "within 10 %", APART, 2, None)
    assert found(even, skewed[0] | {"gpu_uuid": "GPU-2"}, skewed[1]) == targets.Target(
        what, "within 10 %", APART, 2, None
    )
