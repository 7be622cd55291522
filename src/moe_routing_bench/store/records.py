"""The whole row schema with the meaning of its columns, and how rows are read, verified and joined. One row per (cell, implementation).

A cell's file also stores the spec that it was measured for, so that a stale file is noticed even when Snakemake has lost its
own records.
"""

import functools
import json
import os
import shlex
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa
import yaml

from moe_routing_bench.config.axes import AXES
from moe_routing_bench.store import parquet
from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.store.rows import IDENTITY, LATER, MEASURED, NULLS, SCHEMA_VERSION, SPEC
from moe_routing_kernels.errors import bad

_FILE = Path(__file__).with_name("columns.yaml")  # of all columns that are no axes


@dataclass(frozen=True)
class About:
    """The unit of a column (empty for texts and flags) and what it holds."""

    unit: str
    meaning: str

    @property
    def text(self) -> str:
        """Both in one line."""
        if self.unit in ("", "share", "ratio", "count"):
            return self.meaning
        what, missing, why = self.meaning.partition("; none:")
        return f"{what}, in {self.unit}{missing}{why}"


@functools.cache
def about() -> Mapping[str, About]:
    """All columns by name: the axes in the order of their table, then the others."""
    meanings = {axis.name: About(axis.unit, axis.summary) for axis in AXES.values()}
    return meanings | {name: About(*entry) for name, entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}


def described(schema: pa.Schema) -> pa.Schema:
    """The schema with `description` and `unit` in the metadata of each field. KeyError for a column without a description."""
    known = about()
    return pa.schema(
        [f.with_metadata({"description": known[f.name].meaning, "unit": known[f.name].unit}) for f in schema],
        schema.metadata,
    )


if TYPE_CHECKING:
    import pandas as pd

_KINDS = {int: pa.int64(), float: pa.float64(), str: pa.string()}
AXIS_COLUMNS: dict[str, pa.DataType] = {axis.name: _KINDS[axis.kind] for axis in AXES.values()}
COLUMNS: dict[str, pa.DataType] = IDENTITY | AXIS_COLUMNS | MEASURED
SCHEMA = pa.schema(list(COLUMNS.items()))
# What rows hold and is not true of them, unless they have the other column too: null wherever rows are read.
WITHDRAWN = {"peak_memory_bytes": "workspace_bytes"}
_VALID: deque[tuple[pa.Schema, frozenset[str]]] = deque(maxlen=16)


def read(path: Path, without: Collection[str] = ()) -> pa.Table:
    """Read rows of this schema version, with a null column for every axis that no row of the file has, for what was added since, for what is
    `WITHDRAWN`, and for columns `without` which the caller does.

    Raises `UserError` for a missing, unreadable or older file.
    """
    return completed(verified(path, without))


def verified(path: Path, without: Collection[str] = (), again: str | None = None) -> pa.Table:
    """The rows as the file has them, of which `completed` makes those of `read`; the same errors.

    `again` is the hint for a file to replace, where the caller has its own."""
    again = _again(path) if again is None else again
    try:
        table = read_table(path, without=without)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).rsplit(": ", 1)[-1][:60]
        hint = f"{again} ({reason})".strip() if os.path.exists(path) else "run `snakemake` first"
        raise bad("measurements", str(path), "a readable Parquet file", hint) from error
    if others := parquet.versions(table) - {SCHEMA_VERSION}:
        parquet.check_versions(path, table, SCHEMA_VERSION)
        raise bad("schema_version", min(others, key=str), f"{SCHEMA_VERSION} in {path}", again)
    schema = table.schema
    nulls = _nulls((schema.metadata or {}).get(NULLS, b"[]"))
    # The files of a bench have few schemas: each is looked at once.
    known = any(nulls == names and schema.equals(valid) for valid, names in _VALID)
    if wrong := [] if known else _wrong(schema, {*without, *nulls}):
        names = ", ".join(wrong[:5])
        raise bad(
            f"columns of {path}", f"{len(wrong)} absent, unknown or of another type: {names}", "the schema", again
        )
    if not len(table):
        raise bad("measurements", f"no rows in {path}", "at least one", again)
    if not known and not without:
        _VALID.append((schema.remove_metadata(), nulls))
    return table


@functools.lru_cache(16)
def _nulls(text: bytes) -> frozenset[str]:
    """The columns that a cell's file leaves out because they are null in all of its rows."""
    try:
        names = json.loads(text)
    except ValueError:
        names = []
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return frozenset(names).intersection(MEASURED) if known else frozenset()


def _again(path: Path) -> str:
    """How to replace a file that cannot be used: a command for those of a platform's folder; another file is the user's own."""
    name = shlex.quote(str(path))
    match path.parts[-5:]:
        case ("results", platform, "cells", _, _):
            return f"`moe-routing-bench prune --refused --remove --platform {shlex.quote(platform)}`, then `snakemake`"
        case (*_, "results", platform, "measurements.parquet"):
            collect = f"`moe-routing-bench collect --platform {shlex.quote(platform)}`"
            return f"{collect} writes it from the cells; if it is published, `git restore {name}`"
    return f"`mv {name} {shlex.quote(f'{path}.damaged')}`, then measure again"


def completed(table: pa.Table) -> pa.Table:
    """The rows of one or several files of equal columns with all columns of the schema, in its order."""
    places, types = {name: i for i, name in enumerate(table.column_names)}, list(table.schema)
    columns = [
        _true(table, name)
        if name in WITHDRAWN
        else _as(table.column(places[name]), kind)
        if name in places
        else pa.nulls(len(table), kind)
        for name, kind in COLUMNS.items()
    ]
    fields = [
        types[places[name]].with_type(column.type) if name in places else pa.field(name, column.type)
        for name, column in zip(COLUMNS, columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, table.schema.metadata))


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column of this type, with its names of nested values: files without Arrow's schema have those of Parquet."""
    return column.cast(kind) if pa.types.is_nested(kind) and str(column.type) != str(kind) else column


def _wrong(schema: pa.Schema, without: Collection[str]) -> list[str]:
    """The columns that a schema lacks, or should not have, or has with another type.

    May be absent: what was added since, and an axis that was added later, or that no bench of the rows reads.
    """
    types = dict(zip(schema.names, schema.types, strict=True))
    optional = {name: COLUMNS[name] for name in (*AXIS_COLUMNS, *LATER, *without)}
    wrong = {name for name in types | COLUMNS if types.get(name, optional.get(name)) != COLUMNS.get(name)}
    return sorted(wrong)


def _true(table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    """A column, null in the rows in which it is withdrawn."""
    nulls = pa.nulls(len(table), COLUMNS[name])
    if WITHDRAWN.get(name, name) not in table.column_names:
        return nulls
    if name not in WITHDRAWN:
        return table[name]
    import pyarrow.compute as pc  # takes a twentieth of a second

    return pc.call_function("if_else", [table[WITHDRAWN[name]].is_valid(), table[name], nulls])


def frame(table: pa.Table) -> "pd.DataFrame":
    """The rows for pandas, with texts as Python's: where Arrow holds them, each of the many columns is filtered by itself, which takes twice as long.

    They are made all at once: pandas takes several times as long to convert one column after the other."""
    import numpy as np
    import pandas as pd

    names = [field.name for field in table.schema if pa.types.is_string(field.type)]
    texts = np.empty((len(names), len(table)), object)  # the order in which pandas keeps columns
    for i, name in enumerate(names):  # equal texts are one object, which saves most of the memory of many rows
        coded = table[name].combine_chunks().dictionary_encode()
        distinct = np.array([*coded.dictionary.to_pylist(), np.nan], object)
        texts[i] = distinct[coded.indices.fill_null(len(distinct) - 1).to_numpy(zero_copy_only=False)]
    others = table.drop_columns(names).to_pandas()
    return pd.concat([pd.DataFrame(texts.T, columns=names, dtype=object), others], axis=1)[table.column_names]


def read_some(source: Path | BinaryIO, columns: Sequence[str], name: str = "") -> pa.Table:
    """These columns of rows of any schema version, null where the rows have no such column; `name` stands for the source in messages.

    Raises `UserError` for what is no file of measurements.
    """
    name = name or str(source)
    try:
        table = read_table(source)
    except (OSError, pa.ArrowException) as error:
        raise bad("measurements", name, "a readable Parquet file of rows", str(error)[-80:]) from error
    if absent := [
        column for column in ("bench", "implementation", "status", "median_us") if column not in table.column_names
    ]:
        raise bad(f"columns of {name}", f"no {absent[0]}", "rows of this benchmark")
    return pa.table([_true(table, column) for column in columns], names=list(columns))


def spec_of(table: pa.Table) -> str | None:
    """The spec that a cell's file was measured for."""
    return (table.schema.metadata or {}).get(SPEC, b"").decode(errors="replace") or None


def of_platform(table: pa.Table, platform: str, name: str) -> pa.Table:
    """The rows, if all were measured on the platform whose folder of results is `platform`; else raises `UserError`."""
    device = platform.partition(".")[0]
    if others := set(table["platform"].to_pylist()) - {device}:
        raise bad(f"platform of the rows of {name}", min(others, key=str), device, "they were measured elsewhere")
    return table
