"""The rows of a report as data of its page: ids for links, the command that measures each again, and every field, by column."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.report.columns import COLUMNS, KEYS, Column
from moe_routing_bench.report.command import again
from moe_routing_bench.report.details import fields
from moe_routing_bench.report.packing import beside, packed, plain
from moe_routing_bench.report.samples import samples

_DIGITS = 10  # of an id: among 10,000 rows two are equal once in 20,000 reports
_TIMES = "ci_low_us ci_high_us min_us p5_us q1_us q3_us p95_us max_us warm_median_us wall_median_us twin_median_us"
_NEAR = dict.fromkeys(_TIMES.split(), "median_us") | {
    f"{ratio}_ci_{end}": ratio for ratio in ("speedup", "best_speedup", "twin_speedup") for end in ("low", "high")
}  # columns as their differences from another, which have fewer digits
_CLOCKS = ("started_at", "ended_at")  # to the second


def page_data(frame: pd.DataFrame, presets: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What the page's scripts read of these rows, fit for JSON.

    `columns` of the table, `fields` of a row's details, `aliases` that a filter takes for fields, and of each row `ids`,
    `commands`, `samples` and `values`; commands and values are packed: see `packed` and `beside`. `presets`: see `again`.
    """
    shown = fields()
    records = frame.to_dict("records")
    others = {one["implementation"]: one["plugin"] for one in records if isinstance(one["plugin"], str)}
    return {
        "columns": [_shown(one) for one in COLUMNS],
        "keys": KEYS,
        "fields": shown,
        "aliases": {axis.prefix: axis.name for axis in AXES.values() if axis.prefix and axis.prefix.isalpha()},
        "ids": [row_id(record) for record in records],
        "samples": samples(records),
        "commands": packed([_command(record, others, presets) for record in records]),
        "values": _columns({one["name"]: _plain(frame[one["name"]]) for one in shown}),
    }


def _command(record: Mapping[str, Any], plugins: Mapping[str, str], presets: Mapping[str, str]) -> str:
    """The command that measures a row again; what is said instead of a row of another benchmark."""
    return again(record, plugins, presets) if record["bench"] in BENCHES else "a row of another benchmark"


def _shown(column: Column) -> dict[str, Any]:
    """A column of the table: its fields, what it means, and how it is shown."""
    return {
        "name": column.name,
        "fields": column.fields,
        "stem": column.stem,
        "printed": column.printed,
        "meaning": column.meaning,
    }


def _plain(column: pd.Series) -> list[Any]:
    """A JSON value for each row; most columns have few distinct ones."""
    if column.dtype == object and column.map(pd.api.types.is_list_like).any():
        return [plain(one) for one in column]
    places, distinct = pd.factorize(column)
    found = [*map(plain, distinct), None]  # -1 is the place of a missing one
    return [found[place] for place in places]


def _columns(values: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """Every column packed: those of times of day to the second, and near another what is measured beside it wherever that is."""
    clocks = {name: [one and one[:19] + one[19:].lstrip(".0123456789") for one in values[name]] for name in _CLOCKS}
    return {name: _column(name, held, values) for name, held in {**values, **clocks}.items()}


def _column(name: str, held: list[Any], values: Mapping[str, list[Any]]) -> dict[str, Any]:
    other = _NEAR.get(name)
    alone = packed(held)
    if other is None or "all" in alone or any(b is None for a, b in zip(held, values[other], strict=True) if a is not None):  # fmt: skip
        return alone
    return beside(held, other, values[other])


def row_id(row: Mapping[str, Any]) -> str:
    """A short name of the row's cell and implementation, the same in every run that measures them."""
    text = json.dumps([row["bench"], row["cell"], row["implementation"]])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
