"""Rows of other benchmarks: what is asked of them, so that they draw and compare as our own do.

A row has `REQUIRED`, and every axis that tells it from other rows of its bench (`config.axes`: tokens, hidden, experts, ...). All other
columns of the schema (docs/columns.md) are optional, and columns that the schema lacks are ignored.
"""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures.footer import FOREIGN
from moe_routing_bench.store import records
from moe_routing_bench.store.rows import STATUSES
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad, near

REQUIRED = ("bench", "implementation", "median_us")
_FACTS = {"true": True, "false": False}


def read_csv(path: Path) -> pd.DataFrame:
    """The rows of a CSV file with a header, as `rows` completes them. Raises `UserError` for a file that is no such table."""
    try:
        table = pd.read_csv(guarded.csv_of(path), dtype=str, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise bad(
            "rows", str(path), "a CSV file with a header", getattr(error, "strerror", None) or str(error)
        ) from error
    return rows(table)


def rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a benchmark (see `REQUIRED`; times in µs) as rows of the schema, for figures, `comparison.runs.compare` and reports.

    A row without `status` is ok; one without `cell` gets its axes as the name; `best_other` and `best_speedup`, without an interval and a
    verdict, and with a `baseline` `speedup`, are those of the medians where the table has none. Raises `UserError` for a missing column, a
    value of another kind, and rows that no column of the schema tells apart.
    """
    if missing := [name for name in REQUIRED if name not in table]:
        raise bad("rows", f"no column {missing[0]}", ", ".join(REQUIRED), near(missing[0], list(map(str, table))))
    if table.empty:
        raise bad("rows", "none", "at least one")
    known = {name: _column(name, table[name]) for name in records.COLUMNS if name in table}
    count = len(table)
    known["status"] = [entry or "ok" for entry in known.get("status", [None] * count)]
    _check(known)
    known.setdefault("cell", [None] * count)
    known["cell"] = [entry or _cell(known, i) for i, entry in enumerate(known["cell"])]
    known.setdefault("platform", [FOREIGN] * count)
    known.setdefault("suspect", [False] * count)
    columns = {name: pa.array(known.get(name, [None] * count), kind) for name, kind in records.COLUMNS.items()}
    frame = records.frame(pa.table(columns, records.SCHEMA))
    _check_apart(frame, [str(name) for name in table if name not in records.COLUMNS])
    return _with_ratios(frame)


def _column(name: str, values: pd.Series) -> list[Any]:
    """The values of a column as its type; None where one is missing."""
    kind = records.COLUMNS[name]
    return [None if _missing(entry) else _value(name, kind, entry, i) for i, entry in enumerate(values, 1)]


def _missing(value: Any) -> bool:
    return value is None or (np.isscalar(value) and bool(pd.isna(value)))


def _value(name: str, kind: pa.DataType, value: Any, row: int) -> Any:
    """A value as the type of its column; `row` counts from 1."""
    what = f"{name} of row {row}"
    if pa.types.is_nested(kind):
        return value
    if pa.types.is_string(kind):
        return str(value)
    if pa.types.is_boolean(kind):
        fact = _FACTS.get(str(value).lower())
        return fact if fact is not None else _refuse(what, value, "true or false")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _refuse(what, value, "a number")
    whole = pa.types.is_integer(kind)
    if not np.isfinite(number) or (whole and not number.is_integer()):
        return _refuse(what, value, "a whole number" if whole else "a finite number")
    axis = AXES.get(name)
    if axis and axis.least is not None and number < axis.least:
        return _refuse(what, value, f"at least {axis.least:g}")
    return int(number) if whole else number


def _refuse(what: str, value: Any, allowed: str) -> NoReturn:
    raise bad(what, value, allowed)


def _check(known: dict[str, list[Any]]) -> None:
    """That every row has names, a status, and a time above 0 where it is ok."""
    for name in ("bench", "implementation"):
        for i, entry in enumerate(known[name], 1):
            if not entry or ":" in entry:
                raise bad(f"{name} of row {i}", entry or "nothing", "a name without a colon")
    for i, (status, time) in enumerate(zip(known["status"], known["median_us"], strict=True), 1):
        if status not in STATUSES:
            raise bad(f"status of row {i}", status, ", ".join(STATUSES), near(status, list(STATUSES)))
        if status == "ok" and not (time and time > 0):
            hint = "a row without a time has another status, such as crashed, and may have a reason"
            raise bad(f"median_us of row {i}", "nothing" if time is None else time, "a time above 0 in µs", hint)


def _cell(known: dict[str, list[Any]], i: int) -> str:
    """The axes of a row as the name of its cell."""
    values = ((axis, known[name][i]) for name, axis in AXES.items() if name in known)
    return " ".join(axis.text(value) for axis, value in values if value is not None) or "all"


def _check_apart(frame: pd.DataFrame, ignored: list[str]) -> None:
    """That no two rows are the same implementation in the same cell on the same device."""
    twice = frame.duplicated(["bench", "cell", "implementation", "gpu_uuid", "host", *AXES])
    if twice.any():
        entry = frame[twice].iloc[0]
        names = f"; these columns are no axes: {', '.join(ignored[:5])}" if ignored else ""
        got = f"{entry['bench']}, {entry['implementation']}, {entry['cell']} twice"
        raise bad("rows", got, "one row per cell and implementation", f"name every axis that rows differ in{names}")


def _with_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with ratios of medians to the fastest other of their cell, and to its baseline, where they have none."""
    others, ratios, speedups = [], [], []
    groups = dict(list(frame[frame["status"] == "ok"].groupby(["bench", "cell", frame["gpu_uuid"].fillna("")])))
    for _, row in frame.iterrows():
        cell = groups.get((row["bench"], row["cell"], row["gpu_uuid"] if isinstance(row["gpu_uuid"], str) else ""))
        rest = None if cell is None else cell[cell["implementation"] != row["implementation"]]
        timed = row["status"] == "ok" and rest is not None and len(rest) > 0
        best = rest.loc[rest["median_us"].idxmin()] if timed else None
        others.append(None if best is None else best["implementation"])
        ratios.append(np.nan if best is None else best["median_us"] / row["median_us"])
        base = _times_of(cell, row["baseline"]) if row["status"] == "ok" else []
        speedups.append(base[0] / row["median_us"] if base else np.nan)
    known = {"best_other": others, "best_speedup": ratios, "speedup": speedups}
    filled = {name: frame[name].fillna(pd.Series(values, frame.index)) for name, values in known.items()}
    return frame.assign(**filled)


def _times_of(cell: pd.DataFrame | None, name: Any) -> list[float]:
    """The times of an implementation in a cell."""
    return [] if cell is None else list(cell.loc[cell["implementation"] == name, "median_us"])
