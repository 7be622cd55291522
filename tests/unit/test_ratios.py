"""Ratios and means with intervals, worked out by hand."""

import math

import numpy as np
import pytest

from moe_routing_bench import intervals
from moe_routing_bench.comparison import ratios
from moe_routing_bench.comparison.ratios import Estimate

SLOW, FAST = [20.0, 22.0, 19.0, 21.0], [10.0, 11.0, 9.6, 10.4]


def row(blocks: list[float], cell: str = "c", set_aside: int = 0) -> dict[str, object]:
    return {"cell_hash": cell, "set_aside": set_aside, "block_medians_us": blocks}


def test_rows_of_one_cell_are_paired_and_of_two_not() -> None:
    same, other = ratios.speed(row(SLOW), row(FAST)), ratios.speed(row(SLOW), row(FAST, "d"))
    assert (same.value, same.low, same.high) == intervals.paired_ratio(SLOW, FAST)[:3]
    assert (other.value, other.low, other.high) == intervals.unpaired_ratio(SLOW, FAST)[:3]
    assert other.high - other.low > 3 * (same.high - same.low), "what both blocks of a round share cancels"


def test_rows_with_blocks_set_aside_are_not_paired() -> None:
    found = ratios.speed(row(SLOW, set_aside=2), row(FAST))
    assert (found.value, found.low, found.high) == intervals.unpaired_ratio(SLOW, FAST)[:3]
    assert ratios.between(row(SLOW[:3]), row(FAST)) == intervals.unpaired_ratio(SLOW[:3], FAST)


def test_a_row_is_as_fast_as_itself() -> None:
    one = row(FAST)
    assert ratios.speed(one, one) == Estimate(1, 1, 1)


def test_too_few_blocks_have_no_interval() -> None:
    found = ratios.speed(row(SLOW[:2]), row(FAST[:2]))
    assert found.value == pytest.approx(2) and math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(ratios.gmean([found, Estimate(1, 0.9, 1.1)]).low)
    without = row(FAST) | {"block_medians_us": None, "median_us": 2.0}
    for base, other, value in (
        (row(SLOW) | {"median_us": 5.0}, without, 2.5),
        (without, row(SLOW) | {"median_us": 5.0}, 0.4),
    ):
        found = ratios.speed(base, other)
        assert found.value == value and math.isnan(found.low) and math.isnan(found.high)


def test_a_share_has_the_interval_of_its_time() -> None:
    """A longer time is a smaller share."""
    one = {"share_of_copy": 0.8, "median_us": 10.0, "ci_low_us": 8.0, "ci_high_us": 12.5}
    found = ratios.share(one, "share_of_copy")
    assert (found.value, found.low, found.high) == (0.8, pytest.approx(0.64), pytest.approx(1.0))
    over = ratios.multiple(one | {"over_dense": 1 / 0.8}, "over_dense")
    assert over.value == 1 / 0.8 and over.low == pytest.approx(1.0) and over.high == pytest.approx(1 / 0.64)


def test_errors_of_a_geometric_mean_add_as_squares() -> None:
    """By hand: logarithms of 3 and 4 percent around 2 and 8, both over 2."""
    parts = [Estimate(2, 2 * math.exp(-0.03), 2 * math.exp(0.03)), Estimate(8, 8 * math.exp(-0.04), 8 * math.exp(0.04))]
    found = ratios.gmean(parts)
    assert found.value == pytest.approx(4)
    assert (found.low, found.high) == (pytest.approx(4 * math.exp(-0.025)), pytest.approx(4 * math.exp(0.025)))
    uneven = ratios.gmean([Estimate(2, 2 * math.exp(-0.03), 2), Estimate(8, 8 * math.exp(-0.04), 8 * math.exp(0.09))])
    assert (uneven.low, uneven.high) == (pytest.approx(4 * math.exp(-0.025)), pytest.approx(4 * math.exp(0.045)))


def test_errors_of_a_mean_add_as_squares() -> None:
    found = ratios.mean([Estimate(1.0, 0.97, 1.0), Estimate(1.2, 1.16, 1.29)])
    assert (found.value, found.low) == (pytest.approx(1.1), pytest.approx(1.1 - 0.025))
    assert found.high == pytest.approx(1.1 + 0.045)


def test_the_mean_of_nothing_is_refused() -> None:
    for mean in (ratios.gmean, ratios.mean):
        with pytest.raises(ValueError, match="no figures"):
            mean([])


def test_the_interval_of_a_mean_covers_as_it_says() -> None:
    """Of 400 runs with 6 cells of 20 rounds each, whose true ratios differ, 95 % hold the true mean; more as half-widths of t add.
    What both blocks of a round share, 5 %, is not in it."""
    rng, true = np.random.default_rng(5), [0.9, 1.0, 1.1, 1.2, 1.4, 2.0]
    middle, held, widths = math.exp(np.log(true).mean()), 0, []
    for _ in range(400):
        cells = []
        for ratio in true:
            shared, noise = rng.normal(0, 0.05, 20), rng.normal(0, 0.01, (2, 20))
            base, own = ratio * np.exp(shared + noise[0]), np.exp(shared + noise[1])
            cells.append(ratios.speed(row(base.tolist()), row(own.tolist())))
        found = ratios.gmean(cells)
        held += found.low <= middle <= found.high
        widths.append(found.high / found.low - 1)
    assert held / 400 >= 0.93 and np.median(widths) < 0.01


def test_a_figure_is_widened_by_independent_errors() -> None:
    """3 % and 4 % are 5 %, of the logarithm, as are those of the interval."""
    point = ratios.widened(Estimate(2.0, 2.0, 2.0), [math.expm1(0.03), math.expm1(0.04)])
    assert (point.low, point.high) == pytest.approx((2 * math.exp(-0.05), 2 * math.exp(0.05)))
    wide = ratios.widened(Estimate(2.0, 2 * math.exp(-0.12), 2 * math.exp(0.03)), [math.expm1(0.03), math.expm1(0.04)])
    assert (wide.low, wide.high) == pytest.approx((2 * math.exp(-0.13), 2 * math.exp(math.hypot(0.03, 0.05))))


def test_blocks_set_aside_of_either_row_leave_no_pairs() -> None:
    assert ratios.between(row(SLOW), row(FAST, set_aside=1)) == intervals.unpaired_ratio(SLOW, FAST)
