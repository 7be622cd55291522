"""The rows of a report as data of its page: ids for links, samples, the command that measures each again, and every field, by column.

A column is made of its distinct values, of which most columns of a hundred thousand rows have few. All of it is compressed.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.answers import command
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.report.packing import Column as Packed
from moe_routing_bench.report.packing import Written, differences, packed, written
from moe_routing_bench.report.row_fields import COLUMNS, KEYS, Column, fields

_DIGITS = 10  # of an id: among 10,000 rows two are equal once in 20,000 reports
_TIMES = "ci_low_us ci_high_us min_us p5_us q1_us q3_us p95_us max_us warm_median_us wall_median_us twin_median_us"
_NEAR = dict.fromkeys(_TIMES.split(), "median_us") | {
    f"{ratio}_ci_{end}": ratio for ratio in ("speedup", "best_speedup", "twin_speedup") for end in ("low", "high")
}  # columns as their differences from another, which have fewer digits
_CLOCKS = ("started_at", "ended_at")  # to the second
MOST = 120  # of a row; of more every second, third or later one is drawn
LEAST, ALTOGETHER = 6, 600_000  # of many rows fewer, so that their page is no larger than one is allowed to be
SCALE = 10_000  # offsets are in hundredths of a percent of the median
_ASKED = (*AXES, "platform", "cpu_threads")  # what decides the options of a command, and what its start
_STARTED = ("bench", "implementation", "baseline", "speedup", "best_other", "best_speedup", "model")
_Texts = Mapping[str, str]


def page_data(frame: pd.DataFrame, presets: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What the page's scripts read of these rows, fit for JSON.

    `columns` of the table, `fields` of a row's details, `aliases` that a filter takes for fields, and of each row `ids`,
    `commands`, `samples` and `values`, which are `Written`; commands and values are packed: see `packed` and `differences`.
    `presets`: see `again`.
    """
    shown = fields()
    return {
        "columns": [_shown(one) for one in COLUMNS],
        "keys": KEYS,
        "fields": shown,
        "aliases": {axis.prefix: axis.name for axis in AXES.values() if axis.prefix and axis.prefix.isalpha()},
        "ids": written([row_id(record) for record in _records(frame, ("bench", "cell", "implementation"))]),
        "samples": written(samples(_records(frame, ("samples_us", "set_aside_samples_us", "median_us")))),
        "commands": written(packed(_commands(frame, presets))),
        "values": _columns({one["name"]: frame[one["name"]] for one in shown}),
    }


def _records(frame: pd.DataFrame, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Some columns of the rows, row by row."""
    columns = [frame[name].tolist() for name in names]
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _commands(frame: pd.DataFrame, presets: _Texts) -> list[str]:
    """The command that measures each row again; what is said instead of a row of another benchmark. The options of a cell are those of all its rows."""
    plugins = {
        name: plugin
        for name, plugin in zip(frame["implementation"], frame["plugin"], strict=True)
        if isinstance(plugin, str)
    }
    there = {name: frame[name].where(frame[name].isna(), 1.0) for name in ("speedup", "best_speedup")}
    starts = _for_equal(
        frame[list(_STARTED)].assign(**there), _STARTED, lambda row: shlex.join(command.started(row, plugins, presets))
    )
    options = _for_equal(frame, _ASKED, lambda row: shlex.join(command.options(row)))
    return [
        f"{start} {option}".rstrip() if bench in BENCHES else "a row of another benchmark"
        for bench, start, option in zip(frame["bench"], starts, options, strict=True)
    ]


def _for_equal(frame: pd.DataFrame, names: Sequence[str], text: Callable[[dict[str, Any]], str]) -> list[str]:
    """A text of each row, made once for rows that are equal in these columns."""
    places = frame.groupby(list(names), dropna=False, sort=False).ngroup().to_numpy()
    _, first = np.unique(places, return_index=True)
    rows = frame[list(names)].iloc[first].astype(object)
    texts = [text(row) for row in _records(rows.where(rows.notna(), None), names)]
    return [texts[place] for place in places.tolist()]


def _shown(column: Column) -> dict[str, Any]:
    """A column of the table: its fields, what it means, and how it is shown."""
    return {
        "name": column.name,
        "fields": column.fields,
        "stem": column.stem,
        "printed": column.printed,
        "meaning": column.meaning,
    }


def _columns(values: Mapping[str, pd.Series]) -> dict[str, Written]:
    """Every column packed and written: those of times of day to the second, and as differences from another column where both are known."""
    bases = {name: Packed(values[name]) for name in dict.fromkeys(_NEAR.values())}
    return {
        name: written(
            _column(name, bases.get(name) or Packed(column.map(_to_the_second) if name in _CLOCKS else column), bases)
        )
        for name, column in values.items()
    }


def _to_the_second(time: Any) -> Any:
    return time and time[:19] + time[19:].lstrip(".0123456789") if isinstance(time, str) else time


def _column(name: str, column: Packed, bases: Mapping[str, Packed]) -> dict[str, Any]:
    base = bases.get(_NEAR.get(name, ""))
    if base is None or len(column.distinct) == 1 or (base.missing & ~column.missing).any():
        return column.packed()
    return differences(column, _NEAR[name], base)


def row_id(row: Mapping[Any, Any]) -> str:
    """A short name of the row's cell and implementation, the same in every run that measures them."""
    text = f"[{', '.join(_quoted(row[name]) for name in ('bench', 'cell', 'implementation'))}]"
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _quoted(value: Any) -> str:
    """A value as JSON: that of a text takes a fifth of the time of any value."""
    return encode_basestring_ascii(value) if type(value) is str else json.dumps(value)


def samples(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples of each row that count and those set aside, in order, as offsets from its median in 1 / SCALE of it.

    `every`: which one in how many is kept; null for a row without samples.
    """
    rows = list(rows)
    most = max(LEAST, min(MOST, ALTOGETHER // max(1, len(rows))))
    return {"scale": SCALE, "rows": [_samples_of(row, most) for row in rows]}


def _samples_of(row: Mapping[str, Any], most: int) -> dict[str, Any] | None:
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
