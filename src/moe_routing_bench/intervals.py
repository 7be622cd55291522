"""Confidence intervals of times and of ratios of times, from the medians of blocks of samples. Pure numpy.

Blocks are not independent, in two ways, and each has its interval:

- *Short turns*, a block each: neighbours share clock and heat. A t-interval of the 20 % trimmed mean (Tukey and McLaughlin 1963, Sankhya
  A 25; Yuen 1974, Biometrika 61), with as many values as would tell as much if they were independent.
- *Long turns*, several blocks in a row: a turn has a state of its own, so only turns count, however many blocks they have. A t-interval
  of the medians of turns (Ibragimov and Mueller 2010, J. Bus. Econ. Stat. 28), which holds for turns of unequal spread.

A row shows little of a slow state under the noise of blocks: `comparison.slow_noise` knows that of all rows of a run. `docs/coverage.py`
simulates all; docs/method.md has the result. No block is deleted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_routing_bench import student

CONFIDENCE = 0.95
LEAST_BLOCKS = 3  # fewer have no interval: nothing is known of their spread
# An interval of a time that reaches further than so many times the median, or below as small a part, says nothing; that of a ratio of two
# times where it reaches further than the square.
MOST_TIMES = 10.0
FEW_TURNS = 3  # their spread is known so badly that it can look tiny by chance
_TRIMMED = 0.2  # of the blocks, at either end
_MOST_CORRELATION = 0.97
_LEAST_FREEDOM = 1.0
_LOSS = 1.75  # of freedom by correlation, which is known badly: chosen by simulation

Ratio = tuple[float, float | None, float | None, float | None]


class _Estimate(NamedTuple):
    """A location: the median of the values, the centre of its interval, the centre's standard error, and the degrees of freedom."""

    median: float
    centre: float
    error: float
    freedom: float

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval about the centre."""
        return student.half_width(self.freedom, CONFIDENCE) * self.error

    @property
    def ends(self) -> tuple[float, float]:
        """The 95 % interval, which reaches to the median."""
        low, high = _ends(self.median, self.centre, self.half)
        return float(low), float(high)

    @property
    def p(self) -> float:
        """Two-sided p of the location's being 0; without an error it is certain."""
        return student.two_sided(self.centre / self.error, self.freedom) if self.error else float(self.centre == 0)

    @property
    def ratio(self) -> Ratio:
        """The ratio whose logarithm this is, both ends of its interval, and p of its being 1; the ratio alone where the interval says nothing."""
        low, high = self.ends
        if _silent(self.median, low, high):
            return float(np.exp(self.median)), None, None, None
        return float(np.exp(self.median)), float(np.exp(low)), float(np.exp(high)), self.p


def _ends(median: Any, centre: Any, half: Any) -> tuple[Any, Any]:
    """Both ends of intervals that reach to the median; numbers, or arrays of them."""
    return np.minimum(centre - half, median), np.maximum(centre + half, median)


def _silent(median: Any, low: Any, high: Any) -> Any:
    """Whether the interval of the logarithm of a ratio reaches too far to say anything of it; numbers, or arrays of them."""
    return np.maximum(median - low, high - median) > 2 * math.log(MOST_TIMES)


def turns_of(row: Mapping[Any, Any]) -> list[int] | None:
    """The turn of each block that a row keeps; None for short turns, where each block is one.

    Rows from before `block_turns` had two long turns of as many blocks each.
    """
    if row.get("turns") != "long":
        return None
    known = row.get("block_turns")
    if isinstance(known, Sequence | np.ndarray):  # pandas has a number where there is none
        return [int(turn) for turn in known]
    count = len(row["block_medians_us"])
    return [int(2 * i >= count) for i in range(count)]


def turn_medians(values: np.ndarray, turns: Sequence[int] | np.ndarray) -> np.ndarray:
    """The median of the values (n,) of each turn."""
    return np.array([np.median(values[np.asarray(turns) == number]) for number in np.unique(turns)])


def interval(values: Sequence[float], turns: Sequence[int] | None = None) -> tuple[float, float] | None:
    """95 % confidence interval of the location of values (n,), in the order in which they were taken, in these turns; None where there are
    too few: under 3 values, or one turn."""
    found = _estimate(values, turns)
    return found and found.ends


def time_interval(block_medians: Sequence[float], turns: Sequence[int] | None = None) -> tuple[float, float] | None:
    """`interval` of times, which are positive: that of their logarithms. None also where it says nothing."""
    found = interval(np.log(block_medians).tolist(), turns)
    return found and telling((float(np.exp(found[0])), float(np.exp(found[1]))), float(np.median(block_medians)))


def time_intervals(block_medians: Sequence[Sequence[float]]) -> list[tuple[float, float] | None]:
    """`time_interval` of each row of short turns: the same numbers, of many rows in a fraction of the time."""
    return _each(block_medians, np.log, _time_intervals, time_interval)


def paired_ratios(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Ratio]:
    """`paired_ratio` of each pair of rows of short turns: the same numbers, of many pairs in a fraction of the time."""
    return _each(pairs, lambda both: np.log(both[:, 0] / both[:, 1]), _ratios, lambda pair: paired_ratio(*pair))


def _each(rows: Sequence[Any], logs_of: Any, of_many: Any, of_one: Any) -> list[Any]:
    """What `of_many` makes of all rows of equal length (m, ..., n) and of their logarithms (m, n); `of_one` of those that are too short, or
    have a value without a logarithm."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for place, row in enumerate(rows):
        shapes.setdefault(np.shape(row), []).append(place)
    found: list[Any] = [None] * len(rows)
    for shape, places in shapes.items():
        values = np.array([rows[place] for place in places], float)
        fine = ((values > 0) & np.isfinite(values)).reshape(len(places), -1)
        usual = np.logical_and.reduce(fine, axis=1) & (shape[-1] >= LEAST_BLOCKS)
        told = iter(of_many(values[usual], logs_of(values[usual])) if usual.any() else ())
        for i, place in enumerate(places):
            found[place] = next(told) if usual[i] else of_one(rows[place])
    return found


def _time_intervals(block_medians: np.ndarray, logs: np.ndarray) -> Iterator[tuple[float, float] | None]:
    median, centre, error, freedom = _of_many(logs)
    ends = _ends(median, centre, student.half_width_each(freedom, CONFIDENCE) * error)
    return map(
        telling, zip(*(np.exp(end).tolist() for end in ends), strict=True), np.median(block_medians, axis=1).tolist()
    )


def _ratios(_: np.ndarray, logs: np.ndarray) -> Iterator[Ratio]:
    """`_Estimate.ratio` of each."""
    median, centre, error, freedom = _of_many(logs)
    low, high = _ends(median, centre, student.half_width_each(freedom, CONFIDENCE) * error)
    p = (centre == 0).astype(float)
    some = error > 0
    p[some] = student.two_sided_each(centre[some] / error[some], freedom[some])
    with np.errstate(over="ignore"):
        columns = (np.exp(median), np.exp(low), np.exp(high), p, _silent(median, low, high))
    for ratio, *interval, silent in zip(*(column.tolist() for column in columns), strict=True):
        yield (ratio, None, None, None) if silent else (ratio, *interval)


def _of_many(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Blocks in a row, of each row of values (m, n): the trimmed mean, its variance from the Winsorised values, inflated by
    (1 + r) / (1 - r) for a correlation r of neighbours; as median, centre, error and freedom (m,).

    The estimate of r is freed of its bias, -(1 + 3 r) / n (Kendall 1954, Biometrika 41), and clipped to 0 to 0.97. Freedom
    falls faster than the number of independent values, n (1 - r) / (1 + r).
    """
    n = values.shape[1]
    deviations, middle = winsorised(values)
    kept, squares = middle.shape[1], np.vecdot(deviations, deviations)
    median = (middle[:, (kept - 1) // 2] + middle[:, kept // 2]) / 2
    centre = np.add.reduce(middle, axis=1) / kept
    flat = (squares == 0) | (middle[:, 0] == middle[:, -1])  # no error, for which any freedom does
    squares = np.where(flat, 1.0, squares)
    r = np.vecdot(deviations[:, :-1], deviations[:, 1:]) / squares
    r = np.minimum(np.maximum((r + 1 / n) / max(1 - 3 / n, 0.5), 0.0), _MOST_CORRELATION)
    worth = (1 - r) / (1 + r)
    error = np.where(flat, 0.0, np.sqrt(squares / (kept * (kept - 1)) / worth))
    powers = np.array([one**_LOSS for one in worth.tolist()])  # numpy's differ in the last bit
    freedom = np.where(flat, _LEAST_FREEDOM, np.maximum(kept * powers - 1, _LEAST_FREEDOM))
    return median, centre, error, freedom


def telling(ends: tuple[float, float], median: float) -> tuple[float, float] | None:
    """An interval of a time with this median; None where it reaches so far that it says nothing of the time."""
    low, high = ends
    return ends if low * MOST_TIMES >= median and high <= MOST_TIMES * median else None


def half_width(ends: tuple[float | None, float | None], median: float) -> float:
    """Half the width of an interval over the median; infinite where there is none."""
    low, high = ends
    return float("inf") if low is None or high is None else (high - low) / 2 / median


def paired_ratio(baseline: Sequence[float], other: Sequence[float], turns: Sequence[int] | None = None) -> Ratio:
    """Speed-up of `other` over `baseline`, both ends of its 95 % interval, and p of its being 1, from block medians paired
    within rounds, or within long turns.

    Interval and p are None where there are too few pairs or turns, or where they say nothing.
    """
    logs = np.log(np.asarray(baseline) / np.asarray(other))
    found = _estimate(logs, turns)
    return found.ratio if found else (float(np.exp(np.median(logs))), None, None, None)


def unpaired_ratio(
    before: Sequence[float],
    after: Sequence[float],
    turns: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
) -> Ratio:
    """Median of `before` over that of `after`, both ends of the 95 % interval, and p of its being 1, from block medians that share no
    rounds, each with its turns: a Welch interval of the logarithms.

    Interval and p are None where either has too few, or where they say nothing.
    """
    logs = [np.log(side) for side in (before, after)]
    a, b = (_estimate(side, turn) for side, turn in zip(logs, turns, strict=True))
    if a is None or b is None:
        return float(np.exp(float(np.median(logs[0]) - np.median(logs[1])))), None, None, None
    error = float(np.hypot(a.error, b.error))
    freedom = error**4 / (a.error**4 / a.freedom + b.error**4 / b.freedom) if error else _LEAST_FREEDOM
    return _Estimate(a.median - b.median, a.centre - b.centre, error, freedom).ratio


def _estimate(values: Sequence[float] | np.ndarray, turns: Sequence[int] | None) -> _Estimate | None:
    """The location of values (n,), or None where nothing is known of its error."""
    values = np.asarray(values, float)
    if len(values) < LEAST_BLOCKS:
        return None
    return _of_blocks(values) if turns is None else _of_turns(values, np.asarray(turns))


def _of_blocks(values: np.ndarray) -> _Estimate:
    """Blocks in a row, values (n,)."""
    return _Estimate(*(float(each[0]) for each in _of_many(values[None])))


def winsorised(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values (..., n) in their order, the outer 20 % at either end replaced by the next one inwards, less their mean; and the others, sorted."""
    n = values.shape[-1]
    trimmed = int(_TRIMMED * n)
    middle = np.sort(values)[..., trimmed : n - trimmed]
    deviations = np.minimum(np.maximum(values, middle[..., :1]), middle[..., -1:])
    return deviations - np.add.reduce(deviations, axis=-1, keepdims=True) / n, middle


def _of_turns(values: np.ndarray, turns: np.ndarray) -> _Estimate | None:
    """Blocks in long turns: the mean of the turns' medians. The interval of few turns is no narrower than that of the blocks within them."""
    numbers = np.unique(turns)
    if len(numbers) < 2:
        return None
    medians = turn_medians(values, turns)
    median, count = float(np.median(values)), len(medians)
    found = _Estimate(median, float(medians.mean()), float(medians.std(ddof=1) / np.sqrt(count)), count - 1.0)
    if count > FEW_TURNS:
        return found
    within = _of_blocks(values - medians[np.searchsorted(numbers, turns)])
    return found._replace(error=within.error, freedom=within.freedom) if within.half > found.half else found
