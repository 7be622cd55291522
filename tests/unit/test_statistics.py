"""Summaries of samples: how often the intervals cover the truth, what is paired, and the smallest sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing_bench.measure import statistics

TIMES = st.floats(0.5, 1e6, allow_nan=False)


@pytest.mark.parametrize("blocks", [3, 5, 9, 10, 20])  # t-intervals, then bootstraps
def test_intervals_cover_the_median_about_95_times_of_100(blocks):
    rng = np.random.default_rng(blocks)
    trials = 300
    hits = 0
    for seed in range(trials):
        low, high = statistics.interval(100 * np.exp(rng.normal(0, 0.02, blocks)), seed)
        hits += low <= 100 <= high
    # small samples fall a little short (91 to 95 % over many trials); three standard errors of `trials` on top
    assert 0.91 - 0.05 <= hits / trials <= 0.95 + 0.04


def test_intervals_narrow_with_the_root_of_the_blocks():
    rng = np.random.default_rng(0)
    few, many = (np.mean([statistics.half_width(rng.normal(100, 1, n)) for _ in range(20)]) for n in (16, 256))
    assert few / many == pytest.approx(4, rel=0.25)


def test_the_interval_is_a_function_of_values_and_seed():
    values = np.random.default_rng(0).normal(100, 1, 30)
    assert statistics.interval(values, 1) == statistics.interval(values, 1)
    assert statistics.interval(values, 1) != statistics.interval(values, 2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], (7, 7)),
        ([7.0] * 5, (7, 7)),
        ([7.0] * 50, (7, 7)),
        ([9.0, 11.0], (10 - 12.706, 10 + 12.706)),  # t(0.975, 1) times a standard error of 1
        ([9.0, 10.0, 11.0], (10 - 4.303 / 3**0.5, 10 + 4.303 / 3**0.5)),
    ],
)
def test_intervals_of_few_values(values, expected):
    assert statistics.interval(values, 0) == pytest.approx(expected, abs=1e-2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(TIMES, min_size=1, max_size=4), min_size=1, max_size=12))
def test_a_summary_keeps_every_sample_in_order(blocks):
    found = statistics.summarize(blocks, 0)
    flat = [value for block in blocks for value in block]
    assert found["samples_us"] == flat and (found["samples"], found["blocks"]) == (len(flat), len(blocks))
    order = ("min_us", "p5_us", "q1_us", "median_us", "q3_us", "p95_us", "max_us")
    numbers = [found[name] for name in order]
    assert numbers == sorted(numbers) and numbers[0] == min(flat) and numbers[-1] == max(flat)
    assert found["ci_low_us"] <= found["median_us"] <= found["ci_high_us"]
    assert found["block_medians_us"] == [float(np.median(block)) for block in blocks]


def test_one_outlier_moves_neither_the_median_nor_its_deviation():
    found = statistics.summarize([[10, 10, 11], [9, 10, 10], [10, 5000, 10]], 0)
    assert (found["median_us"], found["mad_us"], found["max_us"]) == (10, 0, 5000)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_a_known_ratio_is_found_through_a_drift_that_both_share(ratio):
    rng = np.random.default_rng(1)
    drift = np.linspace(100, 150, 40) * np.exp(rng.normal(0, 0.1, 40))
    covered, widths = 0, []
    for seed in range(100):
        baseline, other = ratio * drift * np.exp(rng.normal(0, 0.01, 40)), drift * np.exp(rng.normal(0, 0.01, 40))
        middle, low, high = statistics.paired_ratio(baseline, other, seed)
        assert low <= middle <= high
        covered += low <= ratio <= high
        widths.append((high - low) / ratio)
    assert 85 <= covered <= 100
    assert np.mean(widths) < 0.015, "pairing takes the drift of 50 % out"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ratios_of_few_blocks(size):
    middle, low, high = statistics.paired_ratio([20.0] * size, [10.0] * size, 0)
    assert (middle, low, high) == pytest.approx((2, 2, 2))


def test_a_ratio_and_its_inverse_agree():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(90, 110, 20), rng.uniform(40, 60, 20)
    there, back = statistics.paired_ratio(a, b, 0), statistics.paired_ratio(b, a, 0)
    assert there[0] == pytest.approx(1 / back[0]) and there[1] == pytest.approx(1 / back[2], rel=0.02)


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
