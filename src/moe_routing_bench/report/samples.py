"""Every row's samples in few bytes, for the strip plot that a row opens to."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

MOST = 120  # of a row; of more every second, third or later one is drawn
LEAST, ALTOGETHER = 30, 600_000  # of many rows fewer, so that their page is no larger than one is allowed to be
SCALE = 10_000  # offsets are in hundredths of a percent of the median


def samples(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each row the samples that count and those set aside, in order, as offsets from its median in 1 / SCALE of it.

    `every`: which one in how many is kept; null for a row without samples.
    """
    most = max(LEAST, min(MOST, ALTOGETHER // max(1, len(rows))))
    return {"scale": SCALE, "rows": [_row(row, most) for row in rows]}


def _row(row: Mapping[str, Any], most: int) -> dict[str, Any] | None:
    kept, aside = (_list(row[name]) for name in ("samples_us", "set_aside_samples_us"))
    if pd.isna(row["median_us"]) or not row["median_us"] or not len(kept):
        return None
    every, every_aside = (max(1, -(-len(one) // most)) for one in (kept, aside))
    found = {"every": every, "at": _offsets(kept[::every], row["median_us"])}
    return found | ({"aside": _offsets(aside[::every_aside], row["median_us"])} if len(aside) else {})


def _list(value: Any) -> np.ndarray:
    """A list of times; a missing one is empty."""
    return np.asarray(value if isinstance(value, list | np.ndarray) else [], dtype=float)


def _offsets(times: np.ndarray, median: float) -> list[int]:
    return np.rint((times / median - 1) * SCALE).astype(int).tolist()
