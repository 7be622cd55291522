"""Summaries of samples, and the balance of loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moe_routing_bench import intervals, statistics

TIMES = st.floats(0.5, 1e6, allow_nan=False)


@pytest.mark.parametrize("count", [1, 2, 9, 130, 1000])
def test_the_geometric_mean_is_that_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    assert statistics.gmean(values) == statistics.gmean(values.tolist()) == float(stats.gmean(values))
    assert np.isnan(statistics.gmean([]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(TIMES, min_size=1, max_size=4), min_size=1, max_size=12))
def test_a_summary_keeps_every_sample_in_order(blocks):
    found = statistics.summarize(blocks)
    flat = [value for block in blocks for value in block]
    assert found["samples_us"] == flat and (found["samples"], found["blocks"]) == (len(flat), len(blocks))
    order = ("min_us", "p5_us", "q1_us", "median_us", "q3_us", "p95_us", "max_us")
    numbers = [found[name] for name in order]
    assert numbers == sorted(numbers) and numbers[0] == min(flat) and numbers[-1] == max(flat)
    if len(blocks) < 3 or intervals.time_interval(found["block_medians_us"]) is None:
        assert found["ci_low_us"] is found["ci_high_us"] is None
    else:
        assert found["ci_low_us"] <= found["median_us"] <= found["ci_high_us"]
    assert found["block_medians_us"] == [float(np.median(block)) for block in blocks]


@pytest.mark.parametrize(("odd", "end"), [(None, None), (2.0, 0), (50.0, 1)])
def test_the_interval_of_a_summary_is_that_of_its_blocks(odd: float | None, end: int | None) -> None:
    """And reaches to the median of all samples where one long block draws that out of it."""
    blocks = [[10 + 0.1 * (7 * i % 12)] for i in range(12)] + ([[odd] * 40] if odd else [])
    low, high = intervals.time_interval([block[0] for block in blocks])
    assert low < 10.55 < high and (odd is None or not low <= odd <= high)
    expected = [low, high]
    if end is not None:
        expected[end] = odd
    found = statistics.summarize(blocks)
    assert [found["ci_low_us"], found["ci_high_us"]] == expected


def test_one_outlier_moves_neither_the_median_nor_its_deviation():
    found = statistics.summarize([[10, 10, 11], [9, 10, 10], [10, 5000, 10]])
    assert (found["median_us"], found["mad_us"], found["max_us"]) == (10, 0, 5000)


@pytest.mark.parametrize(
    ("loads", "cv", "top", "gini", "dead"),
    [
        ([5, 5, 5, 5], 0, 1, 0, 0),
        ([8, 0, 0, 0], 3**0.5, 4, 0.75, 3),
        ([3, 1], 0.5, 1.5, 0.25, 0),
        ([7], 0, 1, 0, 0),
    ],
)
def test_balance_of_known_loads(loads, cv, top, gini, dead):
    found = statistics.load_statistics(loads)
    numbers = [found[name] for name in ("load_cv", "load_max_over_mean", "load_gini")]
    assert numbers == pytest.approx([cv, top, gini]) and found["expert_load"] == loads
    assert (found["dead_experts"], found["active_experts"]) == (dead, len(loads) - dead)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any))
def test_gini_is_the_mean_difference_of_pairs(loads):
    pairs = sum(abs(a - b) for a in loads for b in loads) / len(loads) ** 2
    found = statistics.load_statistics(loads)
    assert found["load_gini"] == pytest.approx(pairs / (2 * np.mean(loads)), abs=1e-9)
    assert found["load_cv"] == pytest.approx(np.std(loads) / np.mean(loads), abs=1e-9)


def test_holm_multiplies_by_what_is_left():
    """0.01 of three by 3, 0.02 by 2, 0.9 by 1; a later one is never below an earlier one, and none above 1."""
    assert statistics.holm([0.02, 0.01, 0.9]) == pytest.approx([0.04, 0.03, 0.9])
    assert statistics.holm([0.03, 0.02]) == pytest.approx([0.04, 0.04])
    assert statistics.holm([0.6, 0.5]) == [1, 1] and statistics.holm([]) == []


def test_a_summary_of_known_samples():
    """Of 0, 1, 4, ... 400 in blocks of one: every order statistic, and the middle deviation from the middle."""
    found = statistics.summarize([[float(i * i)] for i in range(21)])
    names = ("min_us", "p5_us", "q1_us", "median_us", "q3_us", "p95_us", "max_us")
    assert [found[name] for name in names] == [0, 1, 25, 100, 225, 361, 400]
    assert found["mad_us"] == 91  # |81 - 100| is 19, |9 - 100| is 91: the eleventh of 21


def test_half_the_interval_of_a_mean():
    """Of 1, 2, 3: 4.303 times 1 over the root of 3."""
    assert statistics.mean_half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert np.isnan(statistics.mean_half_width(np.array([1.0])))
