"""Summaries of samples taken in blocks, ratios of paired and of unpaired samples, and intervals over seeds. Pure numpy and scipy.

Confidence intervals are on block medians: samples within a block share clock, heat and neighbours. Blocks that follow each
other still do to some extent, so intervals are widened by the correlation that the blocks show. No sample is deleted.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEAST_BLOCKS = 3  # fewer have no interval: nothing is known of their spread
_MOST_CORRELATION = 0.8
_MEDIAN = float(np.sqrt(np.pi / 2))  # standard error of a median over that of a mean, for normal values
_LEAST_FREEDOM = 3.0


def interval(block_values: Sequence[float]) -> tuple[float, float] | None:
    """95 % confidence interval of the median of values (n,) in the order in which they were taken; None under 3 values.

    A t-interval with as many values as would tell as much if they were independent: n (1 - r) / (1 + r) for a correlation r of
    neighbours, estimated and freed of its bias, (1 + 3 r) / n (Kendall 1954, Biometrika 41). A negative r counts as 0. Coverage
    in simulation is 93 to 98 % for 10 to 40 values and r from 0 to 0.5 (tests/unit/test_statistics.py).
    """
    values = np.asarray(block_values)
    if len(values) < LEAST_BLOCKS:
        return None
    return _ends(*_student(values))


def probability(values: Sequence[float]) -> float | None:
    """p of the hypothesis that the median of values (n,) is 0, two-sided, from the t-value of `interval`; None under 3 values."""
    if len(values) < LEAST_BLOCKS:
        return None
    return _p(*_student(np.asarray(values)))


def _ends(middle: float, error: float, freedom: float) -> tuple[float, float]:
    """The 95 % interval of a value with this standard error."""
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return middle - half, middle + half


def _p(middle: float, error: float, freedom: float) -> float:
    """Two-sided p of the value's being 0; without an error it is certain."""
    return float(2 * stats.t.sf(abs(middle) / error, freedom)) if error else float(middle == 0)


def _ratio(middle: float, error: float, freedom: float) -> tuple[float, float, float, float]:
    """The ratio whose logarithm is known so far, both ends of its interval, and p of its being 1."""
    low, high = _ends(middle, error, freedom)
    return float(np.exp(middle)), float(np.exp(low)), float(np.exp(high)), _p(middle, error, freedom)


def _student(values: np.ndarray) -> tuple[float, float, float]:
    """Median of values (n,), its standard error, and the degrees of freedom."""
    n, middle, deviations = len(values), float(np.median(values)), values - values.mean()
    squares = float(deviations @ deviations)
    if squares == 0:
        return middle, 0.0, _LEAST_FREEDOM  # any: there is no error
    r = float(deviations[:-1] @ deviations[1:]) / squares
    r = min(max(r + (1 + 3 * r) / n, 0.0), _MOST_CORRELATION)
    worth = n * (1 - r) / (1 + r)
    return middle, _MEDIAN * float(np.sqrt(squares / (n - 1) / worth)), max(worth - 1, _LEAST_FREEDOM)


def time_interval(block_medians: Sequence[float]) -> tuple[float, float] | None:
    """`interval` of times, which are positive: that of their logarithms."""
    found = interval(np.log(block_medians).tolist())
    return None if found is None else (float(np.exp(found[0])), float(np.exp(found[1])))


def half_width(block_medians: Sequence[float]) -> float:
    """Half the width of the interval of times over their median; infinite where there is none."""
    found = time_interval(block_medians)
    return float("inf") if found is None else (found[1] - found[0]) / 2 / float(np.median(block_medians))


def summarize(blocks: Sequence[Sequence[float]]) -> dict[str, object]:
    """Row fields of one implementation's samples in microseconds, grouped in blocks; no interval under 3 blocks."""
    samples = np.concatenate([np.asarray(b) for b in blocks])
    medians = [float(np.median(b)) for b in blocks]
    ends = time_interval(medians)
    median = float(np.median(samples))
    p5, q1, q3, p95 = np.quantile(samples, [0.05, 0.25, 0.75, 0.95])
    return {
        "median_us": median,
        "ci_low_us": ends and min(ends[0], median),
        "ci_high_us": ends and max(ends[1], median),
        "min_us": float(samples.min()),
        "p5_us": float(p5),
        "q1_us": float(q1),
        "q3_us": float(q3),
        "p95_us": float(p95),
        "max_us": float(samples.max()),
        "mad_us": float(np.median(np.abs(samples - median))),
        "samples": len(samples),
        "blocks": len(blocks),
        "samples_us": samples.tolist(),
        "block_medians_us": medians,
    }


def paired_ratio(
    baseline: Sequence[float], other: Sequence[float]
) -> tuple[float, float | None, float | None, float | None]:
    """Speed-up of `other` over `baseline`, both ends of its 95 % interval, and p of its being 1, from block medians paired
    within the round.

    Interval and p are None under 3 pairs.
    """
    logs = np.log(np.asarray(baseline) / np.asarray(other))
    if len(logs) < LEAST_BLOCKS:
        return float(np.exp(np.median(logs))), None, None, None
    return _ratio(*_student(logs))


def unpaired_ratio(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float | None, float | None, float | None]:
    """Median of `before` over that of `after`, both ends of the 95 % interval, and p of its being 1, from block medians of two
    runs: a Welch interval of the logarithms.

    Interval and p are None where either has under 3 blocks.
    """
    sides = [np.log(one) for one in (before, after)]
    ratio = float(np.median(sides[0]) - np.median(sides[1]))
    if min(len(one) for one in sides) < LEAST_BLOCKS:
        return float(np.exp(ratio)), None, None, None
    (_, a, free_a), (_, b, free_b) = (_student(one) for one in sides)
    error = float(np.hypot(a, b))
    freedom = error**4 / (a**4 / free_a + b**4 / free_b) if error else _LEAST_FREEDOM
    return _ratio(ratio, error, freedom)


def load_statistics(loads: Sequence[int]) -> dict[str, object]:
    """Balance of realised tokens per expert (before capacity): CV is population standard deviation over mean."""
    values = np.sort(loads)
    mean, n = values.mean(), len(values)
    gini = float((2 * np.arange(1, n + 1) - n - 1) @ values / (n * values.sum()))
    return {
        "expert_load": [int(v) for v in loads],
        "load_cv": float(values.std() / mean),
        "load_max_over_mean": float(values[-1] / mean),
        "load_gini": gini,
        "active_experts": int((values > 0).sum()),
        "dead_experts": int((values == 0).sum()),
    }


def mean_half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of the mean by Student's t; nan for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))


def holm(values: Sequence[float]) -> list[float]:
    """P-values after Holm's correction (1979), in the order given.

    The i-th smallest of m is multiplied by m - i + 1; then none is below a smaller one, and none is above 1.
    """
    order = np.argsort(values, kind="stable")
    scaled = np.maximum.accumulate(np.array(values)[order] * np.arange(len(values), 0, -1)) if len(values) else []
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(scaled, 1)
    return corrected.tolist()
