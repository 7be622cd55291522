"""The rows of a report as data of its page: ids for links, the command that measures each again, and every field, by column."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.config.axes import AXES
from moe_routing_bench.report.columns import COLUMNS
from moe_routing_bench.report.command import again
from moe_routing_bench.report.details import fields
from moe_routing_bench.report.samples import samples

_DIGITS = 10  # of an id: among 10,000 rows two are equal once in 20,000 reports
_EXACT = 2**53  # from here on JavaScript's numbers skip integers


def page_data(frame: pd.DataFrame, presets: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What the page's scripts read of these rows, fit for JSON.

    `columns` of the table, `fields` of a row's details, `aliases` that a filter takes for fields, and of each row `ids`,
    `commands`, `samples` and `values`; commands and values are packed: see `packed`. `presets`: see `again`.
    """
    shown = fields()
    records = frame.to_dict("records")
    others = {one["implementation"]: one["plugin"] for one in records if isinstance(one["plugin"], str)}
    return {
        "columns": [{"name": one.name, "fields": one.fields, "stem": one.stem} for one in COLUMNS],
        "fields": shown,
        "aliases": {axis.prefix: axis.name for axis in AXES.values() if axis.prefix and axis.prefix.isalpha()},
        "ids": [row_id(record) for record in records],
        "samples": samples(records),
        "commands": packed([again(record, others, presets) for record in records]),
        "values": {one["name"]: packed([plain(record[one["name"]]) for record in records]) for one in shown},
    }


def row_id(row: Mapping[str, Any]) -> str:
    """A short name of the row's cell and implementation, the same in every run that measures them."""
    text = json.dumps([row["bench"], row["cell"], row["implementation"]])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """A column in few bytes: one value of `all` rows, one of `each`, or `of` the distinct values one `at` each row."""
    distinct = {json.dumps(value): value for value in values}
    if len(distinct) == 1:
        return {"all": values[0]}
    places = {text: place for place, text in enumerate(distinct)}
    by_place = {"of": list(distinct.values()), "at": [places[json.dumps(value)] for value in values]}
    each = {"each": list(values)}
    return min(each, by_place, key=lambda form: len(json.dumps(form)))


def plain(value: Any) -> Any:
    """A JSON value; missing or infinite is null, numbers have five digits, a map of stages is an object."""
    if isinstance(value, list | np.ndarray):
        return {name: plain(one) for name, one in value}
    if value is None or value is pd.NA:
        return None
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, float):
        return None if not math.isfinite(item) else int(item) if item.is_integer() else float(f"{item:.5g}")
    return str(item) if isinstance(item, int) and abs(item) >= _EXACT else item
