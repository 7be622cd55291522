"""What skew and a capacity factor cost, to the letter, on a few rows whose numbers are known; and where nothing is said."""

import pytest
from rows import frame, one

from moe_routing_bench.report.costs import cost_of_capacity, cost_of_skew


def ran(us, skew, width=1.0, tokens=64, **values):
    """A row of `pack` with an interval of so many microseconds to both sides."""
    known = {
        "median_us": us,
        "ci_low_us": us - width,
        "ci_high_us": us + width,
        "skew": skew,
        "tokens": tokens,
        "experts": 8,
    }
    return one("pack", "cute", **known | values)


def test_cost_of_skew():
    """Median and range of the later over the earlier time; slower and faster only where the intervals are apart."""
    rows = [ran(10.0, 0.0), ran(11.0, 0.5, tokens=64), ran(20.0, 1.5)]
    rows += [
        ran(10.0, 0.0, 2.0, 128),
        ran(7.6, 1.5, 2.0, 128),  # below the other's median, not below its interval
        ran(10.0, 0.0, tokens=256),
        ran(5.0, 1.5, tokens=256),
        ran(10.0, 0.0, 2.0, 512),
        ran(13.0, 1.5, 2.0, 512),
    ]
    assert cost_of_skew(frame(*rows)) == (
        "Cost of skew: median ratio of times at the higher over the lower skew, for the widest range that one card measured, on cells equal otherwise and without a "
        "capacity limit: pack at skew 1.5 over 0 1.03x (0.50x to 2.00x; 4 pairs that differ in tokens: 1 slower and 1 faster with disjoint intervals)."
    )
    silent = "Cost of skew without a capacity limit: not measured."
    assert cost_of_skew(frame(rows[0])) == cost_of_skew(frame()) == silent
    limited = [row | {"capacity_factor": 1.0} for row in rows]
    assert cost_of_skew(frame(*limited)) == silent
    assert cost_of_skew(frame(rows[0], rows[2] | {"dtype": "fp32"})) == silent, "another format is another cell"


@pytest.mark.parametrize(("tight", "loose"), [(1.0, 1.25), (1.25, 2.0)])
def test_cost_of_a_capacity_factor(tight, loose):
    """The lowest factor over no limit, each skew apart."""
    rows = [
        ran(us * scale, skew, capacity_factor=factor)
        for skew, scale in ((0.0, 1.0), (1.5, 2.0))
        for us, factor in ((10.0, None), (8.0, loose), (5.0 if skew else 10.0, tight))
    ]
    assert cost_of_capacity(frame(*rows)) == (
        "Time with a capacity factor: median ratio of times at a factor (the lowest that a card measured beside no limit) over no limit, on cells equal otherwise: "
        f"pack at factor {tight:g} and skew 0 1.00x (1.00x to 1.00x; 1 pair: 0 slower and 0 faster with disjoint intervals), "
        f"at factor {tight:g} and skew 1.5 0.50x (0.50x to 0.50x; 1 pair: 0 slower and 1 faster with disjoint intervals)."
    )
    silent = "Time with a capacity factor against none: not measured."
    assert cost_of_capacity(frame(*rows[1:3])) == cost_of_capacity(frame(rows[0])) == silent, "factors alone"


def test_sets_on_several_cards_are_counted_and_the_lower_of_equal_ranges_is_told():
    """Two sets whose ends are on different cards, one that is whole: 0 to 1 before 0.5 to 1.5, which is as wide."""
    rows = [
        ran(10.0, 0.5, tokens=64),
        ran(30.0, 1.5, tokens=64),
        ran(10.0, 0.0, tokens=128),
        ran(20.0, 1.0, tokens=128),
    ]
    for tokens in (256, 512):
        rows += [ran(10.0, 0.0, tokens=tokens), ran(90.0, 1.0, tokens=tokens, gpu_uuid="GPU-2")]
    found = cost_of_skew(frame(*rows))
    assert "pack at skew 1 over 0 2.00x (2.00x to 2.00x; 1 pair: " in found
    assert found.endswith(", and 2 pairs not comparable: measured on different cards.")
    assert cost_of_skew(frame(*rows[4:])).endswith(": pack 2 pairs not comparable: measured on different cards.")


def test_skews_of_a_capacity_rise():
    rows = [
        ran(us, skew, capacity_factor=factor)
        for skew in (8.0, 1.0, 2.5)
        for us, factor in ((10.0, None), (5.0 + skew, 1.0))
    ]
    found = cost_of_capacity(frame(*rows))
    places = [found.index(f"and skew {skew} ") for skew in ("1", "2.5", "8")]
    assert places == sorted(places) and "skew 2.5 0.75x" in found and "skew 8 1.30x" in found
