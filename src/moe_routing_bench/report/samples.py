"""Every row's samples in few bytes, for the strip plot that a row opens to."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

MOST = 120  # of a row; of more every second, third or later one is drawn
SCALE = 10_000  # offsets are in hundredths of a percent of the median


def samples(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each row the samples that count and those set aside, in order, as offsets from its median in 1 / SCALE of it.

    `every`: which one in how many is kept; null for a row without samples.
    """
    return {"scale": SCALE, "rows": [_row(row) for row in rows]}


def _row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    kept, aside = (_list(row[name]) for name in ("samples_us", "set_aside_samples_us"))
    if pd.isna(row["median_us"]) or not row["median_us"] or not len(kept):
        return None
    every, every_aside = (max(1, -(-len(one) // MOST)) for one in (kept, aside))
    found = {"every": every, "at": _offsets(kept[::every], row["median_us"])}
    return found | ({"aside": _offsets(aside[::every_aside], row["median_us"])} if len(aside) else {})


def _list(value: Any) -> np.ndarray:
    """A list of times; a missing one is empty."""
    return np.asarray(value if isinstance(value, list | np.ndarray) else [], dtype=float)


def _offsets(times: np.ndarray, median: float) -> list[int]:
    return np.rint((times / median - 1) * SCALE).astype(int).tolist()
