"""Summaries of samples taken in blocks, of loads and of values per seed. Pure numpy. `intervals` has those of times."""

from collections.abc import Iterable, Sequence

import numpy as np

from moe_routing_bench import intervals, student


def summarize(blocks: Sequence[Sequence[float]], turns: Sequence[int] | None = None) -> dict[str, object]:
    """Row fields of one implementation's samples in microseconds, grouped in blocks, and these in long turns, if there are any; no interval
    for too few blocks or turns."""
    samples = np.concatenate([np.asarray(b) for b in blocks])
    medians = [float(np.median(b)) for b in blocks]
    ends = intervals.time_interval(medians, turns)
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
        "block_turns": None if turns is None else list(turns),
    }


def gmean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers, NaN of none: that of scipy, whose module of statistics takes a second to import."""
    logs = np.log(np.asarray([*values], float))
    return float(np.exp(np.mean(logs))) if len(logs) else float("nan")


def load_statistics(loads: Sequence[int]) -> dict[str, object]:
    """Balance of realised tokens per expert (before capacity): CV is population standard deviation over mean. No load at all is even."""
    values = np.sort(loads)
    mean, n = values.mean() or 1.0, len(values)
    gini = float((2 * np.arange(1, n + 1) - n - 1) @ values / (n * n * mean))
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
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return student.half_width(len(values) - 1, intervals.CONFIDENCE) * error


def holm(values: Sequence[float]) -> list[float]:
    """P-values after Holm's correction (1979), in the order given.

    The i-th smallest of m is multiplied by m - i + 1; then none is below a smaller one, and none is above 1.
    """
    order = np.argsort(values, kind="stable")
    scaled = np.maximum.accumulate(np.array(values)[order] * np.arange(len(values), 0, -1)) if len(values) else []
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(scaled, 1)
    return corrected.tolist()
