"""The rows of a report as data of its page: ids for links, samples, the command that measures each again, and every field, by column.

A column knows what its values share, and all of it is compressed. `templates/unpack.js` and `templates/rows.js` read what this writes.
"""

import base64
import gzip
import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES, PRESET
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.report.row_fields import COLUMNS, KEYS, Column, fields
from moe_routing_bench.store.platforms import CPU

_EXACT = 2**53  # from here on JavaScript's numbers skip integers
DIGITS = 5  # of a number


def compressed(value: object) -> str:
    """JSON, compressed by gzip, in base64; equal values give equal text."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """A column in few bytes: one value of `all` rows, one of `each`, or `of` the distinct values one `at` each row."""
    texts = [repr(value) for value in values]  # 1, True and 1.0 are three
    distinct = dict(zip(texts, values, strict=True))
    if len(distinct) == 1:
        return {"all": values[0]}
    places = {text: place for place, text in enumerate(distinct)}
    at = [places[text] for text in texts]
    if sum(map(len, texts)) <= sum(map(len, distinct)) + sum(len(str(place)) for place in at):
        return {"each": list(values)}
    return {"of": list(distinct.values()), "at": at}


def differences(values: Sequence[float | None], name: str, base: Sequence[float | None]) -> dict[str, Any]:
    """A column of numbers `near` another, called `name`, whose values are `base`: `by` how many units of the other's last digit they differ.

    None where either is missing. A number below a tenth of the other has fewer digits than five.
    """
    return {"near": name, "by": [_units(one, other) for one, other in zip(values, base, strict=True)]}


def _units(value: float | None, base: float | None) -> int | None:
    """How many units of the last digit of `base`, which has five, lie between both."""
    if value is None or base is None:
        return None
    last = int(f"{base:e}".partition("e")[2]) + 1 - DIGITS
    return round(value * 10.0**-last) - round(base * 10.0**-last)


def unpacked(name: str, columns: Mapping[str, Mapping[str, Any]], rows: int) -> list[Any]:
    """The values of a packed column, one for each of so many rows."""
    held = columns[name]
    if "all" in held:
        return [held["all"]] * rows
    if "each" in held:
        return list(held["each"])
    if "of" in held:
        return [held["of"][place] for place in held["at"]]
    return [_apart(by, base) for by, base in zip(held["by"], unpacked(held["near"], columns, rows), strict=True)]


def _apart(by: int | None, base: float | None) -> float | None:
    """The number that differs from `base` by so many units of its last digit."""
    if by is None or base is None:
        return None
    last = int(f"{base:e}".partition("e")[2]) + 1 - DIGITS
    return float(f"{(round(base * 10.0**-last) + by) * 10.0**last:.{DIGITS}g}")


def plain(value: Any) -> Any:
    """A JSON value; missing or infinite is null, numbers have five digits, a map of stages is an object."""
    if isinstance(value, list | np.ndarray):
        return {name: plain(one) for name, one in value}
    if value is None or value is pd.NA:
        return None
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, float):
        return None if not math.isfinite(item) else int(item) if item.is_integer() else float(f"{item:.{DIGITS}g}")
    return str(item) if isinstance(item, int) and abs(item) >= _EXACT else item


_DIGITS = 10  # of an id: among 10,000 rows two are equal once in 20,000 reports
_TIMES = "ci_low_us ci_high_us min_us p5_us q1_us q3_us p95_us max_us warm_median_us wall_median_us twin_median_us"
_NEAR = dict.fromkeys(_TIMES.split(), "median_us") | {
    f"{ratio}_ci_{end}": ratio for ratio in ("speedup", "best_speedup", "twin_speedup") for end in ("low", "high")
}  # columns as their differences from another, which have fewer digits
_CLOCKS = ("started_at", "ended_at")  # to the second
MOST = 120  # of a row; of more every second, third or later one is drawn
LEAST, ALTOGETHER = 30, 600_000  # of many rows fewer, so that their page is no larger than one is allowed to be
SCALE = 10_000  # offsets are in hundredths of a percent of the median
_Texts = Mapping[str, str]


def page_data(frame: pd.DataFrame, presets: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What the page's scripts read of these rows, fit for JSON.

    `columns` of the table, `fields` of a row's details, `aliases` that a filter takes for fields, and of each row `ids`,
    `commands`, `samples` and `values`; commands and values are packed: see `packed` and `differences`. `presets`: see `again`.
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
    """Every column packed: those of times of day to the second, and as differences from another column where both are known."""
    clocks = {name: [one and one[:19] + one[19:].lstrip(".0123456789") for one in values[name]] for name in _CLOCKS}
    return {name: _column(name, held, values) for name, held in {**values, **clocks}.items()}


def _column(name: str, held: list[Any], values: Mapping[str, list[Any]]) -> dict[str, Any]:
    other = _NEAR.get(name)
    alone = packed(held)
    if (
        other is None
        or "all" in alone
        or any(b is None for a, b in zip(held, values[other], strict=True) if a is not None)
    ):
        return alone
    return differences(held, other, values[other])


def row_id(row: Mapping[str, Any]) -> str:
    """A short name of the row's cell and implementation, the same in every run that measures them."""
    text = json.dumps([row["bench"], row["cell"], row["implementation"]])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def samples(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples of each row that count and those set aside, in order, as offsets from its median in 1 / SCALE of it.

    `every`: which one in how many is kept; null for a row without samples.
    """
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


def again(
    row: Mapping[str, Any], plugins: _Texts = MappingProxyType({}), presets: _Texts = MappingProxyType({})
) -> str:
    """A line for a shell: the row's cell, with its implementation and those that it was compared with.

    `plugins` are the references of implementations of other packages, by name: their modules are named, too. `presets` are the files of
    models that are not in the project's, by name. Left out is what `measure` takes anyway: defaults, and what a model preset sets. Of the settings of a measurement a row holds the threads alone, which count on a CPU.
    """
    names = list(dict.fromkeys(_compared(row)))
    modules = sorted({plugins[name].partition(":")[0] for name in names if name in plugins})
    named = [word for module in modules for word in ("--plugin", module)]
    if row["model"] in presets:
        named += ["--models", presets[row["model"]]]
    command = ["moe-routing-bench", "measure", row["bench"], "--implementations", ",".join(names), *named]
    return shlex.join([*command, *_options(row)])


def _compared(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["implementation"]
    for name, ratio in (("baseline", "speedup"), ("best_other", "best_speedup")):
        if not pd.isna(row[name]) and not pd.isna(row[ratio]):
            yield row[name]


def _options(row: Mapping[str, Any]) -> Iterator[str]:
    """Option and value of every axis that has a value of its own; axes that the bench does not read are null."""
    known = {name: axis.kind(row[name]) for name, axis in AXES.items() if not pd.isna(row[name])}
    for name, value in known.items():
        of_model = "model" in known and name in PRESET
        if not of_model and value != (AXES[name].default if not AXES[name].follows else known.get(AXES[name].follows)):
            yield from (AXES[name].option, str(value))
    threads = row["cpu_threads"]
    if row["platform"] == CPU and not pd.isna(threads) and threads != Settings.cpu_threads:
        yield from ("--cpu-threads", str(int(threads)))
