"""Intervals of rows anew from the blocks that they keep: rows of cells that older code measured get those of today. Pure functions; no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from moe_routing_bench.comparison import slow_noise
from moe_routing_bench.comparison.ratios import between, is_paired
from moe_routing_bench.comparison.verdicts import replaced
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.intervals import (
    LEAST_BLOCKS,
    Ratio,
    half_width,
    paired_ratios,
    telling,
    time_interval,
    time_intervals,
    turn_medians,
    turns_of,
)

_RATIOS = {"speedup": "baseline", "best_speedup": "best_other"}  # each over the row of that name in the same cell
_ENDS = ("_ci_low", "_ci_high", "_p")
_WRITTEN = (
    "ci_low_us",
    "ci_high_us",
    "converged",
    "no_interval",
    *(f"{ratio}{end}" for ratio in _RATIOS for end in _ENDS),
)
_READ = (
    *(
        "bench",
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

    Where the rows of a bench with turns of one kind show that neighbours are correlated, intervals know of it (`slow_noise`). A row has not
    converged whose interval becomes wider than it was, and wider than is asked for by default. A row that is too short for such noise has no
    interval and no p. `no_interval` says why an interval is missing.

    The ratio of twins keeps its own, because rows do not hold the blocks of a second entry; so do ratios of rows with blocks set aside,
    whose rounds are not known.
    """
    rows = table.select(list(_READ)).to_pylist()
    cells = {(row["cell_hash"], row["gpu_uuid"], row["implementation"]): row for row in rows if _timed(row)}
    columns = {name: [row[name] for row in rows] for name in _WRITTEN}
    timed = [i for i, row in enumerate(rows) if _timed(row)]
    series = {i: _series(rows[i]) for i in timed}
    noise = _noise(rows, series)
    usual = _usual({i: rows[i] for i in timed})
    for i in timed:
        row, known = rows[i], noise[_kind(rows[i])]
        hidden = known is not None and slow_noise.hides(known, len(series[i]))
        slow = known and not hidden and _slow(row, series[i], known)
        ends = None if hidden else telling(slow[:2], row["median_us"]) if slow else usual[i]
        low, high = ends or (None, None)
        columns["ci_low_us"][i] = None if low is None else min(low, row["median_us"])
        columns["ci_high_us"][i] = None if high is None else max(high, row["median_us"])
        columns["no_interval"][i] = None if low is not None else _why("time", len(series[i]), row, hidden)
        if known and row["converged"]:
            columns["converged"][i] = not _wider(row, low, high)
    for ratio, other in _RATIOS.items():
        bases = {i: cells.get((rows[i]["cell_hash"], rows[i]["gpu_uuid"], rows[i][other])) for i in timed}
        bases = {
            i: base
            for i, base in bases.items()
            if base is not None and rows[i][ratio] is not None and not (rows[i]["set_aside"] or base["set_aside"])
        }
        series = {i: _series(base, rows[i]) for i, base in bases.items() if is_paired(base, rows[i])}
        noise = _noise(rows, series)
        ratios = _ratios({i: (base, rows[i]) for i, base in bases.items()})
        for i in bases:
            known = noise[_kind(rows[i])] if i in series else None
            hidden = known is not None and slow_noise.hides(known, len(series[i]))
            slow = known and not hidden and _slow(rows[i], series[i], known)
            found = (None, None, None) if hidden else slow or ratios[i][1:]
            for end, value in zip(_ENDS, _around(rows[i][ratio], *found), strict=True):
                columns[f"{ratio}{end}"][i] = value
            if found[0] is None:
                count = min(len(series.get(i, ())) or len(row["block_medians_us"]) for row in (bases[i], rows[i]))
                reasons = (columns["no_interval"][i], _why(ratio, count, rows[i], hidden))
                columns["no_interval"][i] = "; ".join(filter(None, reasons))
    return replaced(table, columns)


def _usual(rows: Mapping[int, _Row]) -> dict[int, tuple[float, float] | None]:
    """`time_interval` of rows by number: those of short turns all at once."""
    short = [i for i, row in rows.items() if turns_of(row) is None]
    found = dict(zip(short, time_intervals([rows[i]["block_medians_us"] for i in short]), strict=True))
    others = {i: row for i, row in rows.items() if i not in found}
    return found | {i: time_interval(row["block_medians_us"], turns_of(row)) for i, row in others.items()}


def _ratios(pairs: Mapping[int, tuple[_Row, _Row]]) -> dict[int, Ratio]:
    """`between` of pairs of rows by number: those of short turns all at once."""
    short = [i for i, pair in pairs.items() if is_paired(*pair) and turns_of(pair[0]) is None]
    blocks = [tuple(row["block_medians_us"] for row in pairs[i]) for i in short]
    found = dict(zip(short, paired_ratios(blocks), strict=True))
    return found | {i: between(*pair) for i, pair in pairs.items() if i not in found}


def _kind(row: _Row) -> tuple[str, str]:
    """Rows whose noise is taken to be of one kind."""
    return row["bench"], "long" if turns_of(row) else "short"


def _series(row: _Row, other: _Row | None = None) -> np.ndarray:
    """Logarithms of the times of blocks, or turns, of a row, or of their ratios to another row of the same rounds."""
    times, turns = np.log(row["block_medians_us"]), turns_of(row)
    logs = times if other is None else times - np.log(other["block_medians_us"])
    return logs if turns is None else turn_medians(logs, turns)


def _noise(rows: Sequence[_Row], series: Mapping[int, np.ndarray]) -> dict[tuple[str, str], slow_noise.Shares | None]:
    """What the series of the rows of each kind say of their noise; None where it is independent."""
    kinds: dict[tuple[str, str], dict[object, list[np.ndarray]]] = {}
    for i, values in series.items():
        kinds.setdefault(_kind(rows[i]), {}).setdefault((rows[i]["cell_hash"], rows[i]["gpu_uuid"]), []).append(values)
    return {kind: slow_noise.shares(cells) for kind, cells in kinds.items()}


def _slow(row: _Row, series: np.ndarray, known: slow_noise.Shares) -> tuple[float, float, float] | None:
    """Both ends of the interval that knows the noise, and p; None for long turns, too few to tell a slow state from a drift."""
    found = None if turns_of(row) else slow_noise.interval(series, known)
    return found and (float(np.exp(found[0])), float(np.exp(found[1])), found[2])


def _why(name: str, count: int, row: _Row, hidden: bool) -> str:
    """Why a quantity with so many values has no interval."""
    values = f"{count} {'turns' if turns_of(row) else 'blocks'}"
    if hidden:
        return f"{name}: {values} do not show how slowly the run's noise changes; {Settings.min_blocks} do"
    few = count < 2 or len(row["block_medians_us"]) < LEAST_BLOCKS
    return f"{name}: {values} are too few" if few else f"{name}: {values} differ too much to tell"


def _wider(row: _Row, low: float | None, high: float | None) -> bool:
    """Whether an interval is wider than that of the row, and than is asked for by default, or missing."""
    known = half_width((row["ci_low_us"], row["ci_high_us"]), row["median_us"])
    return half_width((low, high), row["median_us"]) > max(known, Settings.target_half_width)


def _timed(row: _Row) -> bool:
    return row["status"] == "ok" and bool(row["block_medians_us"])


def _around(
    ratio: float, low: float | None, high: float | None, p: float | None
) -> tuple[float | None, float | None, float | None]:
    """An interval that reaches to the ratio of the row, which blocks that are not kept may have moved."""
    return (None, None, p) if low is None or high is None else (min(low, ratio), max(high, ratio), p)
