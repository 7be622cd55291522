"""Numbers of a row that contradict each other: no measurement gives them, so a process was tampered with, or a file."""

import itertools
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

_ORDER = ("min_us", "p5_us", "q1_us", "median_us", "q3_us", "p95_us", "max_us")
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)  # of the samples, in that order
_INTERVALS = ("", "speedup", "best_speedup", "twin_speedup")
_RATES = {"gb_per_s": ("compulsory_bytes", 1e3), "tflops": ("flops", 1e6), "tokens_per_s": ("tokens", 1e-6)}
_CLOCKS_DIFFER = timedelta(hours=1)  # between machines, at most
_CLOSE, _NEAR = 1e-6, 1e-12  # relative and absolute, of numbers that are computed in two ways
_EXACT = 2**53  # whole numbers up to this are equal as floats only where they are equal
# Columns of a table that `contradiction` looks at; it looks at samples where a row has them.
COLUMNS = (
    *_ORDER,
    *("ci_low_us", "ci_high_us", "read_bytes", "write_bytes", "compulsory_bytes", "flops", "started_at", "ended_at"),
    *_RATES,
    *(f"{name}{end}" for name in _INTERVALS[1:] for end in ("", "_ci_low", "_ci_high", "_p")),
)


def contradiction(row: Mapping[str, Any]) -> str:
    """What in a row cannot be, in words; empty where all may be. A column that is absent or null contradicts nothing."""
    if not _in_order(row.get("started_at"), row.get("ended_at")):
        return f"it began at {row['started_at']} and ended at {row['ended_at']}"
    return _of_times(row) or _of_samples(row) or _of_intervals(row) or _of_rates(row)


def _in_order(first: Any, last: Any) -> bool:
    if not isinstance(first, str) or not isinstance(last, str):
        return True
    try:
        return datetime.fromisoformat(first) <= datetime.fromisoformat(last)
    except (TypeError, ValueError):  # no dates, or only one with a time zone
        return False


def has_ended(first: Any, last: Any) -> bool:
    """Whether these are the dates of a measurement that has ended, by the clocks of two machines."""
    try:
        return datetime.fromisoformat(first) <= datetime.fromisoformat(last) <= datetime.now(UTC) + _CLOCKS_DIFFER
    except (TypeError, ValueError):  # none, no date, or no time zone
        return False


def _of_times(row: Mapping[str, Any]) -> str:
    known = [(name, row[name]) for name in _ORDER if row.get(name) is not None]
    for name, value in known:
        if not (math.isfinite(value) and value >= 0):
            return f"{name} is {value!r}"
    for (name, value), (after, more) in itertools.pairwise(known):
        if value > more * (1 + _CLOSE):
            return f"{name} {value:.6g} is above {after} {more:.6g}"
    return ""


def _of_samples(row: Mapping[str, Any]) -> str:
    """Where quantiles, or how many samples there are, are not those of the samples."""
    samples = row.get("samples_us")
    if samples is None or not len(samples):
        return ""
    if row.get("samples") not in (None, len(samples)):
        return f"there are {len(samples)} samples, not {row['samples']}"
    for name, found in zip(_ORDER, np.quantile(np.asarray(samples, float), _QUANTILES), strict=True):
        if row.get(name) is not None and not _close(row[name], float(found)):
            return f"{name} is {row[name]:.6g}, that of the samples {found:.6g}"
    medians = row.get("block_medians_us")
    if medians is not None and row.get("blocks") not in (None, len(medians)):
        return f"there are medians of {len(medians)} blocks, not of {row['blocks']}"
    if medians is not None and len(medians) and not min(samples) <= min(medians) <= max(medians) <= max(samples):
        return "a block's median is outside of the samples"
    return ""


def _of_intervals(row: Mapping[str, Any]) -> str:
    for name in _INTERVALS:
        value, low, high = (row.get(f"{name}{end}" if name else f"{end}_us") for end in _ends(name))
        if value is None or low is None or high is None:
            continue
        if not low <= value * (1 + _CLOSE) or not value <= high * (1 + _CLOSE):
            return f"{name or 'median'} {value:.6g} is not within {low:.6g} to {high:.6g}"
        if not 0 <= (row.get(f"{name}_p") or 0) <= 1:
            return f"{name}_p is {row[f'{name}_p']!r}"
    return ""


def _ends(name: str) -> tuple[str, str, str]:
    return ("", "_ci_low", "_ci_high") if name else ("median", "ci_low", "ci_high")


def _of_rates(row: Mapping[str, Any]) -> str:
    """Where a rate is not its amount over the time, or the bytes are not those that are read and written."""
    parts = row.get("read_bytes"), row.get("write_bytes")
    if None not in (*parts, row.get("compulsory_bytes")) and sum(parts) != row["compulsory_bytes"]:  # type: ignore[arg-type]
        return f"compulsory_bytes {row['compulsory_bytes']} are not {parts[0]} and {parts[1]}"
    for name, (amount, scale) in _RATES.items():
        if row.get(name) is None or row.get(amount) is None or not row.get("median_us"):
            continue
        rate = row[amount] / row["median_us"] / scale
        if not _close(row[name], rate):
            return f"{name} is {row[name]:.6g}, {amount} over median_us {rate:.6g}"
    return ""


def _close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_CLOSE, abs_tol=_NEAR)


def is_free(table: pa.Table) -> bool:
    """Whether `contradiction` finds nothing in the numbers `COLUMNS` of any row; False also where only a look at each row can tell.

    It compares all rows at once, in a fiftieth of the time, and leaves dates to the caller.
    """
    names = {*COLUMNS, *(amount for amount, _ in _RATES.values())} - {"started_at", "ended_at"}
    lists = {name: table[name].to_pylist() for name in names}  # `to_numpy` imports pandas
    known = {name: np.array([value is not None for value in column], bool) for name, column in lists.items()}
    numbers = {name: [0 if value is None else value for value in column] for name, column in lists.items()}
    if any(isinstance(value, int) and abs(value) > _EXACT for column in numbers.values() for value in column):
        return False
    values = {name: np.array(column, float) for name, column in numbers.items()}
    with np.errstate(all="ignore"):
        checks = (_times_are, _intervals_are, _rates_are)
        return all(check(values, known) for check in checks)


_Columns = Mapping[str, np.ndarray]


def _times_are(values: _Columns, known: _Columns) -> bool:
    """All rows of `_of_times`: a time is compared with the last one before it that the row has."""
    last, fine = np.full(len(values["median_us"]), -np.inf), True
    for name in _ORDER:
        value, has = values[name], known[name]
        fine &= bool((np.isfinite(value) & (value >= 0) & ~(last > value * (1 + _CLOSE)))[has].all())
        last = np.where(has, value, last)
    return fine


def _intervals_are(values: _Columns, known: _Columns) -> bool:
    """All rows of `_of_intervals`."""
    fine = True
    for name in _INTERVALS:
        columns = [f"{name}{end}" if name else f"{end}_us" for end in _ends(name)]
        has = np.logical_and.reduce([known[column] for column in columns])
        value, low, high = (values[column][has] for column in columns)
        fine &= bool((low <= value * (1 + _CLOSE)).all() and (value <= high * (1 + _CLOSE)).all())
        if name:
            p = values[f"{name}_p"][has]  # 0 where there is none
            fine &= bool(((p >= 0) & (p <= 1)).all())
    return fine


def _rates_are(values: _Columns, known: _Columns) -> bool:
    """All rows of `_of_rates`."""
    parts = ("read_bytes", "write_bytes", "compulsory_bytes")
    has = np.logical_and.reduce([known[name] for name in parts])
    read, written, total = (values[name][has] for name in parts)
    fine = bool((read + written == total).all())
    for name, (amount, scale) in _RATES.items():
        has = known[name] & known[amount] & (values["median_us"] != 0)
        value, rate = values[name][has], values[amount][has] / values["median_us"][has] / scale
        largest = np.maximum(np.abs(value), np.abs(rate))
        near = np.abs(value - rate) <= np.maximum(_CLOSE * largest, _NEAR)
        fine &= bool((near & np.isfinite(largest)).all())
    return fine
