"""Figures with 95 % intervals, made of rows: ratios of two times, shares of a ceiling, and means over cells. Pure functions; no torch.

The logarithm of a geometric mean is linear in the logarithms of its terms, so independent errors add as squares, without a
linearisation or resampling. A bootstrap over cells would answer another question: the cells are named, not drawn. Half-widths are added
and not standard errors, which is the same for normal errors and wider for the t-intervals of few blocks. What a second process
would do (where buffers lie) is not in an interval; the noise floor of twins is its size.

A worker knows one baseline per bench. In a cell with quantised weights, where that cannot run, ratios are made here, against an implementation
that dequantises; the column `baseline` names it.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from moe_routing_bench.comparison.verdicts import replaced
from moe_routing_bench.intervals import paired_ratio, turns_of, unpaired_ratio
from moe_routing_kernels.formats.weights import WEIGHTS

_DRIFT = "ceilings drifted"  # how a worker's reason begins
_Row = Mapping[Hashable, Any] | Mapping[str, Any]  # as pandas and pyarrow give them


@dataclass(frozen=True)
class Estimate:
    """A positive figure and the ends of its interval, which are NaN where there are too few blocks for one."""

    value: float
    low: float
    high: float


def between(base: _Row, row: _Row) -> tuple[float, float | None, float | None, float | None]:
    """The time of `base` over that of `row`, both ends of its interval and p, from the medians of the blocks that rows of one cell keep.

    Paired within rounds as a worker pairs them; or, where blocks of a row were set aside from unknown rounds, unpaired.
    """
    blocks, turns = (base["block_medians_us"], row["block_medians_us"]), (turns_of(base), turns_of(row))
    return paired_ratio(*blocks, turns[0]) if is_paired(base, row) else unpaired_ratio(*blocks, turns)


def is_paired(base: _Row, row: _Row) -> bool:
    """Whether the blocks of two rows of one cell are of the same rounds."""
    same = turns_of(base) == turns_of(row) and len(base["block_medians_us"]) == len(row["block_medians_us"])
    return same and not (base["set_aside"] or row["set_aside"])


def speed(base: _Row, row: _Row) -> Estimate:
    """The time of `base` over that of `row`: paired where they are of one cell, which took turns, otherwise not; 1 for one row.

    Rows that hold no blocks, or that lack an interval for a reason, have none.
    """
    if base is row:
        return Estimate(1.0, 1.0, 1.0)
    if base["block_medians_us"] is None or row["block_medians_us"] is None:
        return Estimate(base["median_us"] / row["median_us"], math.nan, math.nan)
    same = base["cell_hash"] == row["cell_hash"]
    blocks, turns = (base["block_medians_us"], row["block_medians_us"]), (turns_of(base), turns_of(row))
    value, low, high, _ = between(base, row) if same else unpaired_ratio(*blocks, turns)
    lacking = any(isinstance(one.get("no_interval"), str) for one in (base, row))
    return Estimate(value, math.nan, math.nan) if lacking or low is None or high is None else Estimate(value, low, high)


def share(row: _Row, column: str) -> Estimate:
    """A column that is proportional to one over the time, with the interval of the time; that of the ceiling is not known."""
    value = float(row[column])
    return Estimate(value, value * row["median_us"] / row["ci_high_us"], value * row["median_us"] / row["ci_low_us"])


def multiple(row: _Row, column: str) -> Estimate:
    """A column that is proportional to the time, such as that over another time, with the interval of the time."""
    value = float(row[column])
    return Estimate(value, value * row["ci_low_us"] / row["median_us"], value * row["ci_high_us"] / row["median_us"])


def drifted_alone(row: _Row) -> bool:
    """Whether a row is suspect, and for nothing but a drift of the ceilings: its time may be off by as much, a ratio within its cell not."""
    return row["suspect"] is True and all(one.startswith(_DRIFT) for one in str(row["suspect_reason"]).split("; "))


def widened(one: Estimate, shares: Sequence[float]) -> Estimate:
    """The figure with what else may have changed it, each by such a share, in its interval: independent errors, of the logarithm."""
    more = math.hypot(*(math.log1p(share) for share in shares))
    below = math.hypot(math.log(one.value / one.low), more)
    above = math.hypot(math.log(one.high / one.value), more)
    return Estimate(one.value, one.value * math.exp(-below), one.value * math.exp(above))


def gmean(parts: Sequence[Estimate]) -> Estimate:
    """The geometric mean of independent figures. ValueError for none."""
    logs = [math.log(one.value) for one in parts]
    middle = sum(logs) / _count(parts)
    below = math.hypot(*(log - math.log(one.low) for log, one in zip(logs, parts, strict=True))) / len(parts)
    above = math.hypot(*(math.log(one.high) - log for log, one in zip(logs, parts, strict=True))) / len(parts)
    return Estimate(math.exp(middle), math.exp(middle - below), math.exp(middle + above))


def mean(parts: Sequence[Estimate]) -> Estimate:
    """The arithmetic mean of independent figures. ValueError for none."""
    middle = sum(one.value for one in parts) / _count(parts)
    below = math.hypot(*(one.value - one.low for one in parts)) / len(parts)
    above = math.hypot(*(one.high - one.value for one in parts)) / len(parts)
    return Estimate(middle, middle - below, middle + above)


def _count(parts: Sequence[Estimate]) -> int:
    if not parts:
        raise ValueError("the mean of no figures")
    return len(parts)


INSTEAD = ("dequant", "dequant_loop")  # the first of these that is ok: the latter takes quantised rows, too
_TOLD = ("speedup", "speedup_ci_low", "speedup_ci_high", "speedup_p", "baseline")
_BLOCKS = ("block_medians_us", "block_turns", "turns")
_READ = ("cell_hash", "gpu_uuid", "implementation", "weights", "status", "set_aside", *_BLOCKS, *_TOLD)


def against_dequantised(rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """The rows of one cell; where its weights are quantised and it has no baseline, with one of `INSTEAD` as theirs."""
    ran = {row["implementation"]: row for row in rows if row["status"] == "ok"}
    base = next((ran[name] for name in INSTEAD if name in ran), None)
    known = any(row.get("baseline") for row in rows)
    if base is None or known or base["weights"] not in WEIGHTS:
        return [dict(row) for row in rows]
    return [dict(row) | (_ratio(base, row) if row["status"] == "ok" else {}) for row in rows]


def _ratio(base: _Row, row: _Row) -> dict[str, Any]:
    """The time of `base` over that of `row`, its interval and p, and the name of `base`."""
    return dict(zip(_TOLD, (*between(base, row), base["implementation"]), strict=True))


def with_baselines(table: pa.Table) -> pa.Table:
    """The rows of a run, `against_dequantised` cell by cell; their order and other columns stay as they are."""
    rows = sorted(enumerate(table.select(list(_READ)).to_pylist()), key=lambda one: _cell(one[1]))
    told: dict[int, dict[str, Any]] = {}
    for _, cell in groupby(rows, key=lambda one: _cell(one[1])):
        numbers, found = zip(*cell, strict=True)
        told |= dict(zip(numbers, against_dequantised(found), strict=True))
    return replaced(table, {name: [told[i][name] for i in range(len(table))] for name in _TOLD})


def _cell(row: _Row) -> tuple[str, str]:
    return row["cell_hash"], row["gpu_uuid"] or ""
