"""Statistics over seeds and over blocks of steps: intervals of means, and corrections for several tests."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


def half_width(values: np.ndarray) -> float:
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
