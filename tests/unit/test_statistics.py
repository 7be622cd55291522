"""Summaries of samples: how often the intervals cover the truth, what is paired, and the smallest sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moe_routing_bench import statistics

TIMES = st.floats(0.5, 1e6, allow_nan=False)


def in_a_row(rng: np.random.Generator, values: int, correlation: float) -> np.ndarray:
    """N(0, 1) values, each correlated with the one before."""
    found = rng.normal(size=values)
    for i in range(1, values):
        found[i] = correlation * found[i - 1] + np.sqrt(1 - correlation**2) * found[i]
    return found


@pytest.mark.parametrize(
    ("blocks", "correlation", "least", "most"),
    [
        (5, 0, 0.95, 1),
        (10, 0, 0.94, 0.99),
        (10, 0.3, 0.93, 0.97),
        (20, 0, 0.94, 0.98),
        (20, 0.3, 0.94, 0.975),
        (20, 0.5, 0.93, 0.965),
        (40, 0.5, 0.94, 0.975),
    ],
)
def test_intervals_cover_the_median_also_of_correlated_blocks(blocks, correlation, least, most):
    """The share of 2,000 trials, as seen over 4,000 others, and three standard errors (1.5 %) on either side."""
    rng = np.random.default_rng(blocks)
    times = [100 * np.exp(0.02 * in_a_row(rng, blocks, correlation)) for _ in range(2000)]
    ends = [statistics.time_interval(one) for one in times]
    assert least - 0.015 <= np.mean([low <= 100 <= high for low, high in ends]) <= most + 0.015


def test_an_interval_that_takes_blocks_as_independent_would_not_cover():
    """What the correction is for: blocks that share a drift cover 80 % instead of 95 % without it."""
    rng = np.random.default_rng(3)
    values = [in_a_row(rng, 20, 0.5) for _ in range(1000)]
    plain = np.mean([abs(np.median(v)) <= 2.093 * np.sqrt(np.pi / 2) * v.std(ddof=1) / 20**0.5 for v in values])
    ours = np.mean([low <= 0 <= high for low, high in map(statistics.interval, values)])
    assert plain < 0.87 < 0.92 < ours


def test_intervals_narrow_with_the_root_of_the_blocks():
    rng = np.random.default_rng(0)
    few, many = (np.mean([statistics.half_width(rng.normal(100, 1, n)) for _ in range(20)]) for n in (16, 256))
    assert few / many == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], None),
        ([9.0, 11.0], None),
        ([7.0] * 5, (7, 7)),
        # r = 0 for a turning point: t(0.975, 3) times the standard error of a median of 3, sqrt(pi / 2) / sqrt(3)
        ([9.0, 11.0, 10.0], (10 - 3.1824 * 1.25331 / 3**0.5, 10 + 3.1824 * 1.25331 / 3**0.5)),
    ],
)
def test_intervals_of_few_values(values, expected):
    assert statistics.interval(values) == (expected and pytest.approx(expected, abs=1e-3))


def test_half_width_is_that_of_the_interval_over_the_median():
    values = [9.0, 11.0, 10.0, 10.5]
    low, high = statistics.time_interval(values)
    assert statistics.half_width(values) == pytest.approx((high - low) / 2 / 10.25)
    assert statistics.half_width([1.0, 2.0]) == np.inf and statistics.half_width([7.0] * 3) == 0


def test_correlated_values_are_worth_less():
    """Worked out by hand for 1 to 12 in order: r = 0.75, of its bias (1 + 3 r) / 12 = 1.021, so 0.8 at most; 12 / 9 values, which
    leave the least number of degrees of freedom; the standard error is sqrt(pi / 2) sqrt(13 / (12 / 9))."""
    low, high = statistics.interval(list(map(float, range(1, 13))))
    half = stats.t.ppf(0.975, 3) * np.sqrt(np.pi / 2) * np.sqrt(13 / (12 / 9))
    assert (low, high) == pytest.approx((6.5 - half, 6.5 + half))
    wave = [
        0.0,
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
    ] * 8  # 32 neighbours are equal and 15 are not: r = 17 / 48 before its bias is taken off
    r = 17 / 48 + (1 + 3 * 17 / 48) / 48
    worth = 48 * (1 - r) / (1 + r)
    low, high = statistics.interval(wave)
    half = stats.t.ppf(0.975, worth - 1) * np.sqrt(np.pi / 2) * np.sqrt(12 / 47 / worth)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))


def test_the_interval_of_two_runs_is_welch_s():
    """Errors add as squares, degrees of freedom as Welch and Satterthwaite have it."""
    before, after = np.exp([9.0, 11.0, 10.0]), np.exp([1.0, 5.0, 3.0, 3.0])
    a = np.sqrt(np.pi / 2) * np.sqrt(1 / 3)  # one half of each squared deviation sum is the variance, and r is 0
    values = np.array([1.0, 5.0, 3.0, 3.0])
    r = max(-4 / 8 + (1 + 3 * -4 / 8) / 4, 0)
    b = np.sqrt(np.pi / 2) * np.sqrt(values.var(ddof=1) / 4)
    error, freedom = np.hypot(a, b), np.hypot(a, b) ** 4 / (a**4 / 3 + b**4 / 3)
    ratio, low, high, p = statistics.unpaired_ratio(before, after)
    assert r == 0 and np.log([ratio, low, high]) == pytest.approx(
        [7, 7 - stats.t.ppf(0.975, freedom) * error, 7 + stats.t.ppf(0.975, freedom) * error]
    )
    assert p == pytest.approx(2 * stats.t.sf(7 / error, freedom))


def test_no_interval_of_a_time_reaches_zero():
    """Three blocks that differ by a factor of a hundred."""
    low, high = statistics.time_interval([1.0, 100.0, 10.0])
    assert 0 < low < 10 < high


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(TIMES, min_size=1, max_size=4), min_size=1, max_size=12))
def test_a_summary_keeps_every_sample_in_order(blocks):
    found = statistics.summarize(blocks)
    flat = [value for block in blocks for value in block]
    assert found["samples_us"] == flat and (found["samples"], found["blocks"]) == (len(flat), len(blocks))
    order = ("min_us", "p5_us", "q1_us", "median_us", "q3_us", "p95_us", "max_us")
    numbers = [found[name] for name in order]
    assert numbers == sorted(numbers) and numbers[0] == min(flat) and numbers[-1] == max(flat)
    if len(blocks) < 3:
        assert found["ci_low_us"] is found["ci_high_us"] is None
    else:
        assert found["ci_low_us"] <= found["median_us"] <= found["ci_high_us"]
    assert found["block_medians_us"] == [float(np.median(block)) for block in blocks]


@pytest.mark.parametrize(("odd", "end"), [(None, None), (2.0, 0), (50.0, 1)])
def test_the_interval_of_a_summary_is_that_of_its_blocks(odd: float | None, end: int | None) -> None:
    """And reaches to the median of all samples where one long block draws that out of it."""
    blocks = [[10 + 0.1 * i] for i in range(12)] + ([[odd] * 40] if odd else [])
    low, high = statistics.time_interval([block[0] for block in blocks])
    assert low < 10.55 < high and (odd is None or not low <= odd <= high)
    expected = [low, high]
    if end is not None:
        expected[end] = odd
    found = statistics.summarize(blocks)
    assert [found["ci_low_us"], found["ci_high_us"]] == expected


def test_one_outlier_moves_neither_the_median_nor_its_deviation():
    found = statistics.summarize([[10, 10, 11], [9, 10, 10], [10, 5000, 10]])
    assert (found["median_us"], found["mad_us"], found["max_us"]) == (10, 0, 5000)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_a_known_ratio_is_found_through_a_drift_that_both_share(ratio):
    rng = np.random.default_rng(1)
    drift = np.linspace(100, 150, 40) * np.exp(rng.normal(0, 0.1, 40))
    covered, widths = 0, []
    for _ in range(100):
        baseline, other = ratio * drift * np.exp(rng.normal(0, 0.01, 40)), drift * np.exp(rng.normal(0, 0.01, 40))
        middle, low, high, p = statistics.paired_ratio(baseline, other)
        assert low <= middle <= high and (p < 0.05) == (not low <= 1 <= high)
        covered += low <= ratio <= high
        widths.append((high - low) / ratio)
    assert 85 <= covered <= 100
    assert np.mean(widths) < 0.015, "pairing takes the drift of 50 % out"


def test_p_is_that_of_the_t_value():
    """Three values with r = 0: median 10, standard error sqrt(pi / 2) / sqrt(3), three degrees of freedom."""
    t = 10 / (1.2533141 / 3**0.5)
    assert statistics.probability([9.0, 11.0, 10.0]) == pytest.approx(2 * stats.t.sf(t, 3), rel=1e-5)
    assert statistics.probability([-9.0, -11.0, -10.0]) == statistics.probability([9.0, 11.0, 10.0])
    assert statistics.probability([1.0, 1.0]) is None
    assert (statistics.probability([2.0] * 5), statistics.probability([0.0] * 5)) == (0.0, 1.0)


def test_ratio_of_two_runs():
    """Medians 20 and 10; the interval covers the truth in 95 % of the cases although no rounds are shared; p agrees with it."""
    assert statistics.unpaired_ratio([20.0] * 3, [10.0] * 4) == pytest.approx((2, 2, 2, 0))
    assert statistics.unpaired_ratio([10.0] * 3, [10.0] * 4) == (1, 1, 1, 1)
    assert statistics.unpaired_ratio([20.0] * 2, [10.0] * 9) == pytest.approx((2, None, None, None))
    rng, covered = np.random.default_rng(2), 0
    for _ in range(600):
        before, after = 20 * np.exp(rng.normal(0, 0.01, 12)), 10 * np.exp(rng.normal(0, 0.03, 20))
        ratio, low, high, p = statistics.unpaired_ratio(before, after)
        assert low < ratio < high and p < 1e-3
        covered += low <= 2 <= high
    assert 0.93 <= covered / 600 <= 0.985
    a, b = np.exp(rng.normal(0, 1, 8)), np.exp(rng.normal(0.1, 1, 8))
    _, low, high, p = statistics.unpaired_ratio(a, b)
    assert (p > 0.05) == (low <= 1 <= high)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ratios_of_few_blocks(size):
    """One pair, or two, are a ratio without an interval: they are counted neither as above 1 nor as below."""
    expected = (2, None, None, None) if size < 3 else (2, 2, 2, 0)
    assert statistics.paired_ratio([20.0] * size, [10.0] * size) == pytest.approx(expected)


def test_a_ratio_and_its_inverse_agree():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(90, 110, 20), rng.uniform(40, 60, 20)
    there, back = statistics.paired_ratio(a, b), statistics.paired_ratio(b, a)
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
