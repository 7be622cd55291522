"""Summaries of samples taken in blocks. Pure numpy and scipy; nothing is ever deleted.

Confidence intervals are on block medians: samples within a block share clock, heat and neighbours, blocks do not.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000


def interval(block_values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % confidence interval of the median of block values: bootstrap, a t-interval under 10 blocks, seeded."""
    values = np.asarray(block_values, float)
    if len(values) < 2 or np.ptp(values) == 0:
        return float(values.min()), float(values.max())
    if len(values) < 10:
        spread = stats.t.interval(CONFIDENCE, len(values) - 1, loc=np.median(values), scale=stats.sem(values))
        return float(spread[0]), float(spread[1])
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def half_width(block_values: Sequence[float], seed: int = 0) -> float:
    """Half the width of the interval over the median."""
    low, high = interval(block_values, seed)
    return (high - low) / 2 / float(np.median(block_values))


def summarize(blocks: Sequence[Sequence[float]], seed: int) -> dict[str, object]:
    """Row fields of one implementation's samples in microseconds, grouped in blocks."""
    samples = np.concatenate([np.asarray(b, float) for b in blocks])
    medians = [float(np.median(b)) for b in blocks]
    low, high = interval(medians, seed)
    median = float(np.median(samples))
    p5, q1, q3, p95 = np.quantile(samples, [0.05, 0.25, 0.75, 0.95])
    return {
        "median_us": median, "ci_low_us": min(low, median), "ci_high_us": max(high, median), "min_us": float(samples.min()),
        "p5_us": float(p5), "q1_us": float(q1), "q3_us": float(q3), "p95_us": float(p95), "max_us": float(samples.max()),
        "mad_us": float(np.median(np.abs(samples - median))), "samples": len(samples), "blocks": len(blocks),
        "samples_us": samples.tolist(), "block_medians_us": medians,
    }  # fmt: skip


def paired_ratio(baseline: Sequence[float], other: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Speed-up of `other` over `baseline` and its 95 % interval, from block medians paired within the round."""
    logs = np.log(np.asarray(baseline, float) / np.asarray(other, float))
    low, high = interval(logs.tolist(), seed)
    middle = float(np.median(logs))
    return float(np.exp(middle)), float(np.exp(min(low, middle))), float(np.exp(max(high, middle)))


def load_statistics(loads: Sequence[int]) -> dict[str, object]:
    """Balance of realised tokens per expert (before capacity): CV is population standard deviation over mean."""
    values = np.sort(np.asarray(loads, float))
    mean, n = values.mean(), len(values)
    gini = float((2 * np.arange(1, n + 1) - n - 1) @ values / (n * values.sum()))
    return {
        "expert_load": [int(v) for v in loads], "load_cv": float(values.std() / mean), "load_max_over_mean": float(values[-1] / mean),
        "load_gini": gini, "active_experts": int((values > 0).sum()), "dead_experts": int((values == 0).sum()),
    }  # fmt: skip
