"""Intervals of rows anew from the blocks that they keep: rows of cells that older code measured get those of today. Pure functions; no torch."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from moe_routing_bench.comparison.ratios import between
from moe_routing_bench.comparison.verdicts import replaced
from moe_routing_bench.intervals import time_interval, turns_of

_RATIOS = {"speedup": "baseline", "best_speedup": "best_other"}  # each over the row of that name in the same cell
_ENDS = ("_ci_low", "_ci_high", "_p")
_WRITTEN = ("ci_low_us", "ci_high_us", *(f"{ratio}{end}" for ratio in _RATIOS for end in _ENDS))
_READ = (
    *(
        "cell_hash",
        "gpu_uuid",
        "implementation",
        "status",
        "set_aside",
        "median_us",
        "turns",
        "block_turns",
        "block_medians_us",
    ),
    *_RATIOS.values(),
    *_RATIOS,
    *_WRITTEN,
)
_Row = Mapping[str, Any]


def with_intervals(table: pa.Table) -> pa.Table:
    """The rows of a run with the intervals and p of their times and ratios from their block medians; medians and ratios stay.

    The ratio of twins keeps its own, because rows do not hold the blocks of a second entry; so do ratios of rows with blocks set aside,
    whose rounds are not known.
    """
    rows = table.select(list(_READ)).to_pylist()
    cells = {(row["cell_hash"], row["gpu_uuid"], row["implementation"]): row for row in rows if _timed(row)}
    columns = {name: [row[name] for row in rows] for name in _WRITTEN}
    for i, row in enumerate(rows):
        if not _timed(row):
            continue
        low, high = time_interval(row["block_medians_us"], turns_of(row)) or (None, None)
        columns["ci_low_us"][i] = None if low is None else min(low, row["median_us"])
        columns["ci_high_us"][i] = None if high is None else max(high, row["median_us"])
        for ratio, other in _RATIOS.items():
            base = cells.get((row["cell_hash"], row["gpu_uuid"], row[other]))
            if base is not None and row[ratio] is not None and not (row["set_aside"] or base["set_aside"]):
                ends = _around(row[ratio], *between(base, row)[1:])
                for end, value in zip(_ENDS, ends, strict=True):
                    columns[f"{ratio}{end}"][i] = value
    return replaced(table, columns)


def _timed(row: _Row) -> bool:
    return row["status"] == "ok" and bool(row["block_medians_us"])


def _around(
    ratio: float, low: float | None, high: float | None, p: float | None
) -> tuple[float | None, float | None, float | None]:
    """An interval that reaches to the ratio of the row, which blocks that are not kept may have moved."""
    return (None, None, p) if low is None or high is None else (min(low, ratio), max(high, ratio), p)
