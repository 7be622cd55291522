"""The files of cells: all of a grid joined, each checked against the job that it should have been measured for, or what they say of themselves."""

import functools
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.bench import find
from moe_routing_bench.grid.cell import Job, spec_hash
from moe_routing_bench.store import contradictions
from moe_routing_bench.store.parquet import KEEP, Newer, outvoted, sealed_metadata, some
from moe_routing_bench.store.records import AXIS_COLUMNS, completed, described, read, spec_of, verified
from moe_routing_bench.store.rows import SCHEMA_VERSION, SPEC, STATUSES, SUMMARISED, SUMMARY
from moe_routing_kernels.errors import UserError, bad

_CLOCKS_DIFFER = timedelta(hours=1)  # between machines, at most
_CHECKED = ["bench", "cell", "cell_hash", "platform", "implementation", "code_fingerprint", "plugin_fingerprint"]
_CHECKED = list(dict.fromkeys([*_CHECKED, "status", *contradictions.COLUMNS, *AXIS_COLUMNS]))
_THREADS = 4  # that read files: Arrow decodes columns outside Python's lock
_AT_ONCE = 200  # files, then joined: a column of few rows takes several times the memory of its values


def summary(path: Path) -> tuple[str | None, list[dict[str, Any]]]:
    """The spec that a cell's file was measured for, and the columns `SUMMARISED` of its rows.

    A file that is as it was written says so in its metadata, which takes a hundredth of the time that decoding it takes. Any other is
    read whole, and verified; raises `UserError` for an unreadable file.
    """
    spec, text = sealed_metadata(path, SPEC, SUMMARY)
    if spec is not None and text is not None:
        rows: list[dict[str, Any]] = [dict(zip(SUMMARISED, values, strict=True)) for values in json.loads(text)]
        if all(row["schema_version"] == SCHEMA_VERSION for row in rows):
            return spec.decode(), rows
    table = read(path)
    return spec_of(table), table.select(list(SUMMARISED)).to_pylist()


def collect(files: Mapping[Path, Job], platform: str) -> pa.Table:
    """All rows of the jobs' files, each checked against the spec it should have been measured for, and the folder that it is in.

    Raises `UserError` naming every file that is unreadable, edited, stale or incomplete, or that other code measured than the
    rest of its bench; nothing is skipped.
    """
    if missing := [path for path in files if not path.exists()]:
        problem = f"{len(missing)} of {len(files)} missing, such as {missing[0]}"
        raise bad("cell files", problem, "one of every cell", "run `snakemake`, which measures what is missing")
    tables, problems, wrong, later = _verified(files, platform)
    if problems:
        prune = f"`moe-routing-bench prune --refused --remove --platform {shlex.quote(platform)}`, then the same command again"
        raise bad(
            "cell files",
            f"{len(problems)} that do not fit: " + "; ".join(problems[:5]) + "; …" * (len(problems) > 5),
            "files of this config",
            "; ".join([prune] * bool(wrong) + [KEEP] * bool(later)),
        )
    joined = pa.concat_tables(tables)
    return joined.cast(described(joined.schema))


def refused(files: Mapping[Path, Job], platform: str) -> tuple[list[Path], list[Path]]:
    """The files that `collect` refuses, of those that are there: those to measure again, and those to keep, which a newer version wrote."""
    return _verified({path: job for path, job in files.items() if path.exists()}, platform)[2:]


def _verified(files: Mapping[Path, Job], platform: str) -> tuple[list[pa.Table], list[str], list[Path], list[Path]]:
    """The rows of all files; what is wrong with some of them, in words; the files that are to be measured again for it; and those that
    a newer version of the package wrote."""
    tables: list[pa.Table] = []
    problems, wrong, later, codes, others = [], [], [], {}, {}
    for part in _read_in_parts(list(files)):
        tables += (joined := _joined([table for table in part.values() if isinstance(table, pa.Table)]))
        rows = itertools.chain.from_iterable(table.select(_CHECKED).to_pylist() for table in joined)
        for path, table in part.items():
            if isinstance(table, UserError):
                problems.append(str(table))
                (later if isinstance(table, Newer) else wrong).append(path)
                continue
            job, of_file = files[path], list(itertools.islice(rows, len(table)))
            if problem := _misfit(spec_of(table), of_file, job, platform.partition(".")[0]):
                problems.append(f"{path} {problem}")
                wrong.append(path)
            codes.setdefault(job.cell.bench, {})[path] = {row["code_fingerprint"] for row in of_file}
            of_others = others.setdefault(plugins.references(job), (job, {}))[1]
            of_others[path] = {row["plugin_fingerprint"] for row in of_file}
    for what, problem, today in (
        *((bench, fingerprints, find(bench).code_fingerprint) for bench, fingerprints in codes.items()),
        *(
            (", ".join(names), fingerprints, functools.partial(plugins.fingerprint, job))
            for names, (job, fingerprints) in others.items()
        ),
    ):
        versions, again = outvoted(problem, today)
        if again:
            problems.append(f"{what} was measured by {versions} versions of the code: {some(again)}")
            wrong += again
    return tables, problems, sorted(set(wrong)), later


def _read_in_parts(paths: Sequence[Path]) -> Iterator[dict[Path, pa.Table | UserError]]:
    """The rows of some hundred files at a time, read by several threads, or what is wrong with a file."""

    def rows(path: Path) -> pa.Table | UserError:
        try:
            return verified(path, again="")
        except UserError as error:
            return error

    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(paths), _AT_ONCE):
            part = paths[start : start + _AT_ONCE]
            yield dict(zip(part, threads.map(rows, part), strict=True))


def _joined(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """The rows of all tables in their order, with all columns, in one table for each run of tables with equal columns."""
    runs: list[list[pa.Table]] = []
    for table in tables:
        if not (runs and table.schema.equals(runs[-1][0].schema)):
            runs.append([])
        runs[-1].append(table)
    return [completed(pa.concat_tables(run).combine_chunks().replace_schema_metadata(None)) for run in runs]


def _misfit(spec: str | None, rows: Sequence[Mapping[str, Any]], job: Job, device: str) -> str:
    """Why a file with this spec and these rows is not that of a job, in words; empty where it may be."""
    if spec != job.spec:
        return f"was measured for spec {spec_hash(spec or '')}, the config asks for {job.hash}"
    names = [row["implementation"] for row in rows]
    if sorted(names) != sorted(job.implementations):
        return f"holds {names}, asked were {list(job.implementations)}"
    false = _false(rows, job, device)
    return false and f"has {false}"


def _false(rows: Sequence[Mapping[str, Any]], job: Job, device: str) -> str:
    """What cannot be in a row of a job, in words; empty where all may be."""
    cell, now = job.cell, datetime.now(UTC) + _CLOCKS_DIFFER
    known = dict(cell.values) | {"bench": cell.bench, "cell": cell.key, "cell_hash": job.hash, "platform": device}
    for row in rows:
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
        if wrong := contradictions.contradiction(row):
            return f"numbers that contradict each other: {wrong}"
    return ""


def orphans(folder: Path, wanted: Iterable[Path]) -> list[Path]:
    """Cell files below `folder` that no job of the config asks for, sorted."""
    return sorted(set(folder.glob("cells/*/*.parquet")) - set(wanted))
