"""Noise that only many rows show: when it is seen, and what intervals make of it."""

import numpy as np
import pytest
from scipy import stats

from moe_routing_bench.comparison import slow_noise
from moe_routing_bench.intervals import interval

N = 20


def chained(generator: np.random.Generator, rows: int, r: float) -> np.ndarray:
    values = generator.normal(size=(rows, N))
    for i in range(1, N):
        values[:, i] = r * values[:, i - 1] + np.sqrt(1 - r * r) * values[:, i]
    return values


def of(count: int, rows: np.ndarray) -> dict[object, list[np.ndarray]]:
    """The first so many values of rows."""
    return by_cell(rows[:, :count])


def by_cell(rows: np.ndarray) -> dict[object, list[np.ndarray]]:
    return {i: [row] for i, row in enumerate(rows)}


@pytest.mark.parametrize("tails", [np.inf, 2])
def test_independent_noise_changes_nothing(tails: float) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        rows = generator.standard_t(tails, (60, N)) if np.isfinite(tails) else generator.normal(size=(60, N))
        assert slow_noise.shares(by_cell(rows)) is None


def test_a_slow_state_under_white_noise_is_seen_in_many_rows() -> None:
    """Intervals of rows alone cover the truth in three of four cases; a run of 200 rows has 95 %."""
    generator = np.random.default_rng(1)
    rows = chained(generator, 400, 0.9) + generator.normal(size=(400, N))
    known = slow_noise.shares(by_cell(rows))
    assert (
        known and sum(known) == pytest.approx(1) and slow_noise.hides(known, N - 1) and not slow_noise.hides(known, N)
    )
    found = np.array([slow_noise.interval(row, known) for row in rows])
    alone = np.array([interval(row.tolist()) for row in rows])
    covers = [((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).mean() for ends in (alone, found)]
    assert covers[0] < 0.82 and 0.92 <= covers[1] <= 0.99
    assert ((found[:, 2] >= 0.05) <= (found[:, 0] <= 0)).all(), "p and interval agree, but for the median"
    assert slow_noise.shares(by_cell(rows[: slow_noise.LEAST_ROWS - 1])) is None


def test_rows_of_a_cell_count_as_one() -> None:
    """Ten copies of rows that say too little by themselves say no more."""
    generator = np.random.default_rng(2)
    rows = 0.5 * chained(generator, 20, 0.9) + generator.normal(size=(20, N))
    assert slow_noise.shares({i: [row] * 10 for i, row in enumerate(rows)}) is None
    assert slow_noise.shares(by_cell(np.repeat(rows, 10, axis=0))) is not None


def test_the_interval_of_a_known_correlation() -> None:
    """Where all rows have one correlation, the error of the mean is that of an autoregressive series; a drift leaves the noise about it."""
    n = 12
    models = slow_noise._models(n)
    distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    covariance = 0.9**distance
    of_mean, of_spread = covariance.mean(), (np.trace(covariance) - n * covariance.mean()) / (n - 1)
    place = 1 + slow_noise._CORRELATIONS.index(0.9) * len(slow_noise._SHARES) + slow_noise._SHARES.index(1.0)
    assert models.inflation[place] == pytest.approx(n * of_mean / of_spread)
    values = np.random.default_rng(3).normal(size=n)
    for model, freedom in ((0, 7), (place, models.freedom[place])):
        low, high, _ = slow_noise.interval(values, tuple(float(i == model) for i in range(len(models.inflation))))
        middle = np.sort(values)[2:-2]
        deviations = np.clip(values, middle[0], middle[-1])
        error = np.sqrt(((deviations - deviations.mean()) ** 2).sum() / (8 * 7) * models.inflation[model])
        assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, max(min(freedom, 7), 1)) * error, rel=1e-4)
    drift = tuple(float(i == len(models.inflation) - 1) for i in range(len(models.inflation)))
    low, high, _ = slow_noise.interval(np.arange(12.0), drift)
    assert high - low < 0.6 * np.ptp(interval(np.arange(12.0).tolist()))


@pytest.mark.parametrize("count", [3, 6, 10])
def test_few_values_of_a_slow_state_are_known_to_hide_it(count: int) -> None:
    """And as few of independent noise are not."""
    generator = np.random.default_rng(6)
    for _ in range(5):
        known = slow_noise.shares(of(count, chained(generator, 200, 0.9)))
        assert known and slow_noise.hides(known, count)
        assert slow_noise.shares(of(count, generator.standard_t(2, (200, N)))) is None


def test_a_drift_hides_from_three_values_alone() -> None:
    """More show that it is one."""
    drift = np.zeros(len(slow_noise._models(6).inflation))
    drift[-1], drift[1 + slow_noise._CORRELATIONS.index(0.9) * len(slow_noise._SHARES)] = 0.7, 0.3
    assert slow_noise.hides(tuple(drift), 3) and not slow_noise.hides(tuple(drift), 4)


def test_few_or_equal_values_have_no_interval() -> None:
    known = (1.0,) * len(slow_noise._models(4).inflation)
    assert slow_noise.interval(np.arange(2.0), known) is None and slow_noise.interval(np.ones(9), known) is None
