"""Bandwidth and roofline as data: which marks each makes of rows whose numbers are known, and where it has none."""

import pytest
from rows import frame, one

from moe_routing_bench.figures import ceilings

TIMED = {
    "median_us": 10.0,
    "ci_low_us": 8.0,
    "ci_high_us": 12.5,
    "copy_gb_per_s": 4000.0,
    "peak_tflops": 800.0,
    "tokens": 64,
    "compulsory_bytes": 10_000_000,
}
MOVES = TIMED | {"flops": 0, "gb_per_s": 1000.0, "share_of_copy": 0.25}
MULTIPLIES = TIMED | {"flops": 4_000_000_000, "tflops": 400.0}


def test_bandwidth():
    """Bytes over time with the interval of the time, in a panel per bench that only moves data, under the copy; logarithmic far below it."""
    found = ceilings.bandwidth(
        frame(one("pack", "cute", **MOVES), one("gate", "torch", **MOVES), one("experts", "cute", **MULTIPLIES))
    )
    marks = found.marks
    assert list(marks["panel"]) == ["gate", "pack"] and list(marks["series"]) == ["torch", "cute"]
    assert (marks["x"].iloc[0], marks["y"].iloc[0], found.reference, found.y.kind) == (10, 1000, 4000, "linear")
    assert (marks["low"].iloc[0], marks["high"].iloc[0]) == pytest.approx((800, 1250))
    assert marks["says"].iloc[0] == "T64, 25% of the copy"
    near, far = one("pack", "cute", **MOVES), one("gate", "cute", **MOVES | {"gb_per_s": 50.0})
    assert ceilings.bandwidth(frame(near, far)).scales("gate")[1].kind == "log"
    assert ceilings.bandwidth(frame(near, far)).scales("pack")[1].kind == "linear", (
        "a panel near the copy is not squeezed by another"
    )
    few = [far, *(one("gate", "cute", **MOVES) for _ in range(4))]
    assert ceilings.bandwidth(frame(*few)).scales("gate")[1].kind == "linear", "one point in five"
    assert (
        ceilings.bandwidth(
            frame(one("pack", "cute", **MOVES | {"copy_gb_per_s": None, "share_of_copy": None}))
        ).reference
        is None
    )
    nothing = ceilings.bandwidth(frame(one("experts", "cute", **MULTIPLIES)))
    assert nothing.marks.empty and nothing.reason


def test_roofline():
    """A point per row with FLOPs, none joined to another, under a roof from below the least intensity over the ridge to above the most."""
    found = ceilings.roofline(
        frame(
            one("experts", "cute", cell="a", **MULTIPLIES),
            one("experts", "torch", cell="a", **MULTIPLIES),
            one("pack", "cute", **MOVES),
        )
    )
    roof = found.marks[found.marks["series"] == ceilings.ROOF]
    points = found.marks[found.marks["series"] != ceilings.ROOF]
    assert list(roof["x"]) == [200, 800] and list(roof["y"]) == [800, 800]
    assert (
        list(points["x"]) == [400, 400]
        and list(points["y"]) == [400, 400]
        and points.groupby(["series", "join"]).size().max() == 1
    )
    assert (points["low"].iloc[0], points["high"].iloc[0]) == pytest.approx((320, 500))
    assert list(found.colors) == ["torch", "cute", ceilings.ROOF]


@pytest.mark.parametrize(("missing", "count"), [("copy_gb_per_s", 1), ("peak_tflops", 1), ("tflops", 0), ("flops", 0)])
def test_without_a_ceiling_there_is_no_roof(missing, count):
    """And without FLOPs, no point."""
    found = ceilings.roofline(frame(one("experts", "cute", **MULTIPLIES | {missing: None})))
    assert list(found.marks["series"]) == ["cute"] * count and bool(found.reason) == (not count)


def test_the_copy_is_the_median_one_and_a_quarter_of_points_decides_the_axis():
    """Of three copies the middle; one point in four far below it makes the axis logarithmic."""
    three = [one("pack", "cute", **MOVES | {"copy_gb_per_s": copy}) for copy in (1000.0, 2000.0, 9000.0)]
    assert ceilings.bandwidth(frame(*three)).reference == 2000
    limits = [(1000.0, 100.0), (4000.0, 800.0), (10000.0, 900.0)]
    rows = [MULTIPLIES | {"copy_gb_per_s": copy, "peak_tflops": peak} for copy, peak in limits]
    marks = ceilings.roofline(
        frame(*(one("experts", "cute", cell=str(copy), **row) for copy, row in enumerate(rows)))
    ).marks
    roof = marks[marks["series"] == ceilings.ROOF]
    assert list(roof["x"]) == [200, 800] and list(roof["y"]) == [800, 800], "and of three peaks the middle"
    for far, kind in ((1, "linear"), (2, "log")):
        speeds = [50.0] * far + [1000.0] * (4 - far)
        found = ceilings.bandwidth(frame(*(one("gate", "cute", **MOVES | {"gb_per_s": speed}) for speed in speeds)))
        assert found.scales("gate")[1].kind == kind
