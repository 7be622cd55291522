"""Intervals of times and ratios: how often they cover the truth, by hand for few values, what is paired, and what turns are."""

import csv
import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moe_routing_bench import intervals

DOCS = Path(__file__).parents[2] / "docs"
KNOWN = {line["noise"]: line for line in csv.DictReader((DOCS / "coverage.csv").open())}


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("coverage")


def test_the_table_has_every_noise_and_covers_93_to_97_percent(coverage: ModuleType) -> None:
    """Where the truth moves, as with a drift, more: an interval cannot tell a trend from chance; and of few values with heavy tails. Where rows are
    too short for their noise, few have an interval. Equals: 5 % at most."""
    assert list(KNOWN) == [noise.name for noise in coverage.NOISES]
    for name, line in KNOWN.items():
        assert float(line["false"]) <= 0.05, name
        for given, covers in (("given", "time"), ("ratios given", "ratio")):
            given, share = float(line[given]), float(line[covers] or 1)
            assert given * (1 - share) <= 0.07, name
            assert given < 0.9 or 0.93 <= share <= 0.98 or "drift" in name or "step" in name, name


@pytest.mark.parametrize("name", [name for name in KNOWN if "blocks" in name or "between" in name])
def test_rows_too_short_for_a_slow_state_have_no_interval(name: str) -> None:
    """Those of independent noise have; alone, a row cannot know."""
    line = KNOWN[name]
    slow = "r = 0.9" in name
    assert float(line["given"]) <= 0.1 if slow else "r = 0.5" in name or float(line["given"]) >= 0.98
    assert not slow or float(line["alone"]) < 0.9


@pytest.mark.parametrize("name", ["independent", "r = 0.9 under white noise", "long turns that differ"])
def test_simulated_again_the_table_is_the_same(coverage: ModuleType, name: str) -> None:
    """A few runs, within four standard errors of the difference."""
    (noise,) = (noise for noise in coverage.NOISES if noise.name == name)
    found, known = coverage.simulated(noise, 2, seed=7), KNOWN[name]
    for column in ("time", "ratio"):
        share = float(known[column])
        assert found[column] == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / found["pairs"]) + 0.01), (
            column
        )


def test_blocks_of_one_turn_are_one_value() -> None:
    """Turns that differ by 1 % with blocks that agree within 0.01 %: six turns of 4 blocks are known as six values are."""
    levels = np.array([0.1, -0.2, 0.4, 0.0, -0.5, 0.2])
    values = [level + d for level in levels for d in (-0.001, 0.0, 0.0, 0.001)]
    turns = [number for number in range(6) for _ in range(4)]
    low, high = intervals.interval(values, turns)
    half = stats.t.ppf(0.975, 5) * levels.std(ddof=1) / 6**0.5
    assert (low, high) == pytest.approx((levels.mean() - half, levels.mean() + half))
    by_block = intervals.interval(values)
    assert intervals.interval(values[:20], turns[:20]) != (low, high) and by_block != (low, high)
    assert intervals.interval(values[:4], turns[:4]) is None, "one turn says nothing of turns"


def test_few_turns_that_agree_by_chance_are_no_narrower_than_their_blocks() -> None:
    """Nor three; of four the turns alone decide. And two that do not have Student's t with one degree of freedom."""
    blocks = [1.0, -1.0, 0.5, -0.5, 0.2, -0.2]
    turns = [0] * 6 + [1] * 6
    alike, apart = [*blocks, *blocks], [*blocks, *(value + 9 for value in blocks)]
    assert intervals.interval(alike)[1] > 0
    assert intervals.interval(alike, turns) == pytest.approx(intervals.interval(alike))
    three, four = ([number for number in range(count) for _ in blocks] for count in (3, 4))
    assert intervals.interval(blocks * 3, three) == pytest.approx(intervals.interval(blocks * 3))
    assert intervals.interval(blocks * 4, four) == (0, 0)
    half = stats.t.ppf(0.975, 1) * 9 / 2
    assert intervals.interval(apart, turns) == pytest.approx((4.5 - half, 4.5 + half))


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": "short", "block_medians_us": [1.0] * 4}, None),
        ({"turns": None, "block_medians_us": [1.0] * 4}, None),
        ({"turns": "long", "block_medians_us": [1.0] * 4}, [0, 0, 1, 1]),
        ({"turns": "long", "block_medians_us": [1.0] * 5, "block_turns": float("nan")}, [0, 0, 0, 1, 1]),
        ({"turns": "long", "block_medians_us": [1.0] * 3, "block_turns": np.array([0, 2, 2])}, [0, 2, 2]),
    ],
)
def test_turns_of_a_row(row: dict, turns: list[int] | None) -> None:
    """Rows from before turns were kept had two, of as many blocks each; pandas has a number where there is no list."""
    assert intervals.turns_of(row) == turns and intervals.turns_of(pd.Series(row)) == turns


def test_intervals_narrow_with_the_root_of_the_blocks():
    rng = np.random.default_rng(0)
    widths = [np.median([np.ptp(intervals.interval(rng.normal(100, 1, n))) for _ in range(50)]) for n in (64, 1024)]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], None),
        ([9.0, 11.0], None),
        ([7.0] * 5, (7, 7)),
        # r = 0 for a turning point: t with 2 degrees of freedom times the standard error of a mean of 3
        ([9.0, 11.0, 10.0], (10 - 4.3027 / 3**0.5, 10 + 4.3027 / 3**0.5)),
    ],
)
def test_intervals_of_few_values(values, expected):
    assert intervals.interval(values) == (expected and pytest.approx(expected, abs=1e-3))


def test_an_outlier_counts_as_its_neighbour_and_widens_the_interval_no_further():
    """Two of ten values are trimmed at either end, and stand as the next one inwards in the variance. Winsorised: 3 3 3 4 5 6 7 8 8 8 in
    another order, with a negative correlation; the mean of the middle six is 5.5."""
    values = [5.0, 1.0, 8.0, 3.0, 9.0, 4.0, 1e9, 2.0, 7.0, 6.0]
    half = stats.t.ppf(0.975, 5) * np.sqrt(
        np.square([2.5, 2.5, 2.5, 1.5, 0.5, 0.5, 1.5, 2.5, 2.5, 2.5]).sum() / (6 * 5)
    )
    assert intervals.interval(values) == pytest.approx((5.5 - half, 5.5 + half))


def test_correlated_values_are_worth_less():
    """48 values in waves of three equal ones: the correlation of neighbours is 17 / 48, and without its bias (17 + 1) / 45."""
    wave = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 8
    r = (17 / 48 + 1 / 48) / (1 - 3 / 48)
    worth, kept = (1 - r) / (1 + r), 48 - 2 * 9
    half = stats.t.ppf(0.975, kept * worth**1.75 - 1) * np.sqrt(12 / (kept * (kept - 1)) / worth)
    assert intervals.interval(wave) == pytest.approx((0.5 - half, 0.5 + half))
    r = 0.97  # 1 to 12 in order: 0.95 and its bias are above what is believed; one degree of freedom is left
    half = stats.t.ppf(0.975, 1) * np.sqrt(2 * (3 * 3.5**2 + 2.5**2 + 1.5**2 + 0.5**2) / (8 * 7) * (1 + r) / (1 - r))
    assert intervals.interval(list(map(float, range(1, 13)))) == pytest.approx((6.5 - half, 6.5 + half))


def test_half_width_is_that_of_the_interval_over_the_median():
    assert intervals.half_width((9.0, 11.5), 10.0) == 0.125 and intervals.half_width((7.0, 7.0), 7.0) == 0
    assert intervals.half_width((None, None), 1.0) == np.inf


def test_the_interval_of_two_runs_is_welch_s():
    """Errors add as squares, degrees of freedom as Welch and Satterthwaite have it."""
    before, after = np.exp([9.0, 11.0, 10.0]), np.exp([1.0, 5.0, 3.0, 3.0])  # too few to trim, and r is 0 in both
    a, b = np.sqrt(1 / 3), np.sqrt(8 / 3 / 4)
    error, freedom = np.hypot(a, b), np.hypot(a, b) ** 4 / (a**4 / 2 + b**4 / 3)
    ratio, low, high, p = intervals.unpaired_ratio(before, after)
    assert np.log([ratio, low, high]) == pytest.approx(
        [7, 7 - stats.t.ppf(0.975, freedom) * error, 7 + stats.t.ppf(0.975, freedom) * error]
    )
    assert p == pytest.approx(2 * stats.t.sf(7 / error, freedom))


def test_no_interval_of_a_time_reaches_zero():
    """Blocks that differ by a factor of nine."""
    low, high = intervals.time_interval([3.0, 27.0, 9.0] * 4)
    assert 0 < low < 9 < high


@pytest.mark.parametrize(("blocks", "turns"), [([1.0, 100.0, 10.0], None), ([10.0, 11.0, 20.0, 21.0], [0, 0, 1, 1])])
def test_an_interval_that_says_nothing_of_a_time_is_none(blocks, turns):
    """It would reach from a tenth of the median or less to ten times it or more."""
    assert intervals.interval(np.log(blocks).tolist(), turns) is not None
    assert intervals.time_interval(blocks, turns) is None


@pytest.mark.parametrize(("low", "high", "kept"), [(1.0, 100.0, True), (0.99, 20.0, False), (5.0, 100.1, False)])
def test_an_interval_says_something_within_ten_times_the_median(low, high, kept):
    assert (intervals.telling((low, high), 10.0) is not None) == kept


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_a_known_ratio_is_found_through_a_drift_that_both_share(ratio):
    rng = np.random.default_rng(1)
    drift = np.linspace(100, 150, 40) * np.exp(rng.normal(0, 0.1, 40))
    covered, widths = 0, []
    for _ in range(100):
        baseline, other = ratio * drift * np.exp(rng.normal(0, 0.01, 40)), drift * np.exp(rng.normal(0, 0.01, 40))
        middle, low, high, p = intervals.paired_ratio(baseline, other)
        assert low <= middle <= high and (p < 0.05) == (not low <= 1 <= high)
        covered += low <= ratio <= high
        widths.append((high - low) / ratio)
    assert 85 <= covered <= 100
    assert np.mean(widths) < 0.015, "pairing takes the drift of 50 % out"


def test_ratio_of_two_runs():
    """Medians 20 and 10; the interval covers the truth in 95 % of the cases although no rounds are shared; p agrees with it."""
    assert intervals.unpaired_ratio([20.0] * 3, [10.0] * 4) == pytest.approx((2, 2, 2, 0))
    assert intervals.unpaired_ratio([10.0] * 3, [10.0] * 4) == (1, 1, 1, 1)
    assert intervals.unpaired_ratio([20.0] * 2, [10.0] * 9) == pytest.approx((2, None, None, None))
    assert intervals.unpaired_ratio([10.0, 11.0, 13.0], [10.0] * 4)[0] == pytest.approx(1.1), "a median, not the centre"
    rng, covered = np.random.default_rng(2), 0
    for _ in range(600):
        before, after = 20 * np.exp(rng.normal(0, 0.01, 12)), 10 * np.exp(rng.normal(0, 0.03, 20))
        ratio, low, high, p = intervals.unpaired_ratio(before, after)
        assert low < ratio < high and (p < 0.05) >= (low > 1)
        covered += low <= 2 <= high
    assert 0.93 <= covered / 600 <= 0.985
    a, b = np.exp(rng.normal(0, 1, 8)), np.exp(rng.normal(0.1, 1, 8))
    _, low, high, p = intervals.unpaired_ratio(a, b)
    assert (p > 0.05) == (low <= 1 <= high)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ratios_of_few_blocks(size):
    """One pair, or two, are a ratio without an interval: they are counted neither as above 1 nor as below."""
    expected = (2, None, None, None) if size < 3 else (2, 2, 2, 0)
    assert intervals.paired_ratio([20.0] * size, [10.0] * size) == pytest.approx(expected)


def test_a_ratio_and_its_inverse_agree():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(90, 110, 20), rng.uniform(40, 60, 20)
    there, back = intervals.paired_ratio(a, b), intervals.paired_ratio(b, a)
    assert there[0] == pytest.approx(1 / back[0]) and there[1] == pytest.approx(1 / back[2], rel=0.02)


def test_the_interval_of_a_ratio_reaches_up_to_the_square_of_that_of_a_time() -> None:
    """Ten times the median for a time; for a ratio of two times a hundred times, beyond which it says nothing."""
    for spread, low, high in ((2.4, 10, 100), (8.0, None, None)):
        times = np.exp(spread * np.array([-1.0, 0.3, 0.9, -0.2, 0.0]))
        ratio, *ends, _ = intervals.paired_ratio(times, np.ones(5))
        reach = None if ends[1] is None else max(ends[1] / ratio, ratio / ends[0])
        assert reach is None if low is None else low < reach < high, (spread, ratio, ends)
