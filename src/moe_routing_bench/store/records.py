"""The whole row schema with the meaning of its columns, and how rows are read, verified and joined. One row per (cell, implementation).

A cell's file also stores the spec that it was measured for, so that a stale file is noticed even when Snakemake has lost its
own records.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa
import yaml

from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.bench import find
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.grid.cell import Job, spec_hash
from moe_routing_bench.store.parquet import outvoted, read_table
from moe_routing_bench.store.rows import IDENTITY, LATER, MEASURED, SCHEMA_VERSION, SPEC, STATUSES
from moe_routing_kernels.errors import UserError, bad

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
_CLOCKS_DIFFER = timedelta(hours=1)  # between machines, at most


def read(path: Path) -> pa.Table:
    """Read rows of this schema version, with a null column for every axis that no row of the file has, for what was added since, and for what is
    `WITHDRAWN`.

    Raises `UserError` for a missing, unreadable or older file.
    """
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).rsplit(": ", 1)[-1][:60]
        hint = f"run `snakemake` to measure it again ({reason})" if path.exists() else "run `snakemake` first"
        raise bad("measurements", str(path), "a readable Parquet file", hint) from error
    again = "delete the file and run `snakemake` again"
    versions = set(table["schema_version"].to_pylist()) if "schema_version" in table.column_names else {None}
    if others := versions - {SCHEMA_VERSION}:
        raise bad("schema_version", min(others, key=str), f"{SCHEMA_VERSION} in {path}", again)
    # An axis is absent that was added after these rows were measured, or that no bench of theirs reads.
    for name in (*AXIS_COLUMNS, *LATER):
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), COLUMNS[name]))
    types = dict(zip(table.column_names, table.schema.types, strict=True))
    if wrong := sorted(name for name in types | COLUMNS if types.get(name) != COLUMNS.get(name)):
        names = ", ".join(wrong[:5])
        raise bad(
            f"columns of {path}", f"{len(wrong)} absent, unknown or of another type: {names}", "the schema", again
        )
    if not len(table):
        raise bad("measurements", f"no rows in {path}", "at least one", again)
    for name in WITHDRAWN:
        table = table.set_column(table.column_names.index(name), name, _true(table, name))
    return table.select(list(COLUMNS))


def _true(table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    """A column, null in the rows in which it is withdrawn."""
    nulls = pa.nulls(len(table), COLUMNS[name])
    if WITHDRAWN.get(name, name) not in table.column_names:
        return nulls
    if name not in WITHDRAWN:
        return table[name]
    known = zip(table[name].to_pylist(), table[WITHDRAWN[name]].to_pylist(), strict=True)
    return pa.array([value if other is not None else None for value, other in known], COLUMNS[name])


def frame(table: pa.Table) -> "pd.DataFrame":
    """The rows for pandas, with texts as Python's: where Arrow holds them, each of the many columns is filtered by itself, which takes twice as long.

    They are made all at once: pandas takes several times as long to convert one column after the other."""
    import numpy as np
    import pandas as pd

    names = [field.name for field in table.schema if pa.types.is_string(field.type)]
    texts = np.empty((len(table), len(names)), object)
    for i, name in enumerate(names):
        texts[:, i] = [np.nan if text is None else text for text in table[name].to_pylist()]
    others = table.drop_columns(names).to_pandas()
    return pd.concat([pd.DataFrame(texts, columns=names, dtype=object), others], axis=1)[table.column_names]


def read_some(source: Path | BinaryIO, columns: Sequence[str], name: str = "") -> pa.Table:
    """These columns of rows of any schema version, null where the rows have no such column; `name` stands for the source in messages.

    Raises `UserError` for what is no file of measurements.
    """
    name = name or str(source)
    try:
        table = read_table(source)
    except (OSError, pa.ArrowException) as error:
        raise bad("measurements", name, "a readable Parquet file of rows") from error
    if absent := [
        column for column in ("bench", "implementation", "status", "median_us") if column not in table.column_names
    ]:
        raise bad(f"columns of {name}", f"no {absent[0]}", "rows of this benchmark")
    arrays = [_true(table, column) for column in columns]
    return pa.table(arrays, names=list(columns))


def spec_of(table: pa.Table) -> str | None:
    """The spec that a cell's file was measured for."""
    return (table.schema.metadata or {}).get(SPEC, b"").decode(errors="replace") or None


def of_platform(table: pa.Table, platform: str, name: str) -> pa.Table:
    """The rows, if all were measured on the platform whose folder of results is `platform`; else raises `UserError`."""
    device = platform.partition(".")[0]
    if others := set(table["platform"].to_pylist()) - {device}:
        raise bad(f"platform of the rows of {name}", min(others, key=str), device, "they were measured elsewhere")
    return table


def collect(files: Mapping[Path, Job], platform: str) -> pa.Table:
    """All rows of the jobs' files, each checked against the spec it should have been measured for, and the folder that it is in.

    Raises `UserError` naming every file that is unreadable, edited, stale or incomplete, or that other code measured than the
    rest of its bench; nothing is skipped.
    """
    if missing := [path for path in files if not path.exists()]:
        problem = f"{len(missing)} of {len(files)} missing, such as {missing[0]}"
        raise bad("cell files", problem, "one of every cell", "run `snakemake`, which measures what is missing")
    tables, problems, codes, others = [], [], {}, {}
    for path, job in files.items():
        try:
            table = read(path)
        except UserError as error:
            problems.append(str(error))
            continue
        if (spec := spec_of(table)) != job.spec:
            problems.append(f"{path} was measured for spec {spec_hash(spec or '')}, the config asks for {job.hash}")
        elif sorted(table["implementation"].to_pylist()) != sorted(job.implementations):
            problems.append(
                f"{path} holds {table['implementation'].to_pylist()}, asked were {list(job.implementations)}"
            )
        elif false := _false(table, job, platform.partition(".")[0]):
            problems.append(f"{path} has {false}")
        codes.setdefault(job.cell.bench, {})[path] = set(table["code_fingerprint"].to_pylist())
        of_others = others.setdefault(plugins.references(job), (job, {}))[1]
        of_others[path] = set(table["plugin_fingerprint"].to_pylist())
        tables.append(table)
    for what, problem, today in (
        *((bench, fingerprints, find(bench).code_fingerprint) for bench, fingerprints in codes.items()),
        *(
            (", ".join(names), fingerprints, functools.partial(plugins.fingerprint, job))
            for names, (job, fingerprints) in others.items()
        ),
    ):
        versions, again = outvoted(problem, 5, today)
        if again:
            problems.append(f"{what} was measured by {versions} versions of the code: {again}")
    if problems:
        raise bad(
            "cell files",
            f"{len(problems)} that do not fit: " + "; ".join(problems[:5]) + "; …" * (len(problems) > 5),
            "files of this config",
            "measure them again: snakemake --forcerun measure, or delete them and run snakemake",
        )
    joined = pa.concat_tables(t.replace_schema_metadata(None) for t in tables)
    return joined.cast(described(joined.schema))


def _false(table: pa.Table, job: Job, device: str) -> str:
    """What cannot be in a row of a job, in words; empty where all may be."""
    cell, now = job.cell, datetime.now(UTC) + _CLOCKS_DIFFER
    known = dict(cell.values) | {"bench": cell.bench, "cell": cell.key, "cell_hash": job.hash, "platform": device}
    for row in table.select([*known, "status", "median_us", "started_at", "ended_at"]).to_pylist():
        for name, value in known.items():
            if row[name] != value:
                return f"{name} {row[name]!r} in place of {value!r}"
        if row["status"] not in STATUSES or (row["status"] == "ok") > ((row["median_us"] or 0) > 0):
            return f"status {row['status']!r} with a median_us of {row['median_us']}"
        try:
            first, last = (datetime.fromisoformat(row[name]) for name in ("started_at", "ended_at"))
            possible = first <= last <= now
        except (TypeError, ValueError):  # none, no date, or no time zone
            possible = False
        if not possible:
            return f"dates from {row['started_at']} to {row['ended_at']}"
    return ""


def orphans(folder: Path, wanted: Iterable[Path]) -> list[Path]:
    """Cell files below `folder` that no job of the config asks for, sorted."""
    return sorted(set(folder.glob("cells/*/*.parquet")) - set(wanted))
