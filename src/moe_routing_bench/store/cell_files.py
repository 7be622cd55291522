"""The files of cells: all of a grid joined, each checked against the job that it should have been measured for, or what they say of themselves."""

import functools
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.bench import find
from moe_routing_bench.children import forked
from moe_routing_bench.grid.cell import Job, spec_hash
from moe_routing_bench.store import contradictions
from moe_routing_bench.store.parquet import KEEP, Newer, outvoted, sealed_metadata, some
from moe_routing_bench.store.records import AXIS_COLUMNS, SCHEMA, completed, described, read, spec_of, verified
from moe_routing_bench.store.rows import SCHEMA_VERSION, SPEC, STATUSES, SUMMARISED, SUMMARY
from moe_routing_kernels.errors import UserError, bad

_FINGERPRINTS = ("code_fingerprint", "plugin_fingerprint")
_CHECKED = ["bench", "cell", "cell_hash", "platform", "status", *contradictions.COLUMNS, *AXIS_COLUMNS]
_Work = Callable[[], object]
_Part = tuple[pa.Table, dict[Path, UserError], dict[Path, tuple[frozenset[Any], frozenset[Any]]]]
_AT_ONCE = 50  # files, then joined: a column of few rows takes several times the memory of its values


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


def collect(files: Mapping[Path, Job], platform: str, meanwhile: _Work = lambda: None) -> pa.Table:
    """All rows of the jobs' files, each checked against the spec it should have been measured for, and the folder that it is in.

    `meanwhile` is called once, while a child begins to read. Raises `UserError` naming every file that is unreadable, edited, stale or
    incomplete, or that other code measured than the rest of its bench; nothing is skipped.
    """
    if missing := [path for path in files if not path.exists()]:
        problem = f"{len(missing)} of {len(files)} missing, such as {missing[0]}"
        raise bad("cell files", problem, "one of every cell", "run `snakemake`, which measures what is missing")
    tables, problems, wrong, later = _verified(files, platform, meanwhile)
    if problems:
        prune = f"`moe-routing-bench prune --refused --remove --platform {shlex.quote(platform)}`, then the same command again"
        raise bad(
            "cell files",
            f"{len(problems)} that do not fit: " + "; ".join(problems[:5]) + "; …" * (len(problems) > 5),
            "files of this config",
            "; ".join([prune] * bool(wrong) + [KEEP] * bool(later)),
        )
    joined = pa.concat_tables(tables)
    return pa.Table.from_arrays(joined.columns, schema=described(joined.schema))


def refused(files: Mapping[Path, Job], platform: str) -> tuple[list[Path], list[Path]]:
    """The files that `collect` refuses, of those that are there: those to measure again, and those to keep, which a newer version wrote."""
    return _verified({path: job for path, job in files.items() if path.exists()}, platform)[2:]


def _verified(
    files: Mapping[Path, Job], platform: str, meanwhile: _Work = lambda: None
) -> tuple[list[pa.Table], list[str], list[Path], list[Path]]:
    """The rows of all files; what is wrong with some of them, in words; the files that are to be measured again for it; and those that
    a newer version of the package wrote."""
    tables: list[pa.Table] = []
    problems, wrong, later, codes, others = [], [], [], {}, {}
    for rows, misfits, fingerprints in _parts(files, platform, meanwhile):
        tables.append(rows)
        for path, (of_code, of_plugins) in fingerprints.items():
            codes.setdefault(files[path].cell.bench, {})[path] = of_code
            others.setdefault(plugins.references(files[path]), (files[path], {}))[1][path] = of_plugins
        for path, error in misfits.items():
            problems.append(str(error))
            (later if isinstance(error, Newer) else wrong).append(path)
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


def _parts(files: Mapping[Path, Job], platform: str, meanwhile: _Work) -> list[_Part]:
    """`_part` of some files at a time, by a child too: threads would wait for each other, as half of the time is Python's."""
    paths = list(files)
    each = [{path: files[path] for path in paths[i : i + _AT_ONCE]} for i in range(0, len(paths), _AT_ONCE)]
    if len(each) < 2:
        meanwhile()
        return [_part(part, platform) for part in each]
    left = iter(range(1, len(each)))  # of which both processes take one at a time

    def numbered(number: int) -> tuple[int, _Part]:
        return number, _part(each[number], platform)

    with forked(numbered, "the reader of half of the cell files") as ask:
        theirs = ask(itertools.chain([0], left))
        meanwhile()
        parts = dict([*map(numbered, left), *theirs.result()])
    return [parts[number] for number in range(len(each))]


def _part(files: Mapping[Path, Job], platform: str) -> _Part:
    """The rows of some files, what is wrong with some of these, and both fingerprints of the rows of each that can be read."""
    read, wrong = {}, {}
    for path in files:
        try:
            read[path] = verified(path, again="")
        except UserError as error:
            wrong[path] = error
    joined = _joined(list(read.values()))
    misfits = _misfits({path: (files[path], table) for path, table in read.items()}, joined, platform)
    wrong |= {path: UserError(f"{path} {words}") for path, words in misfits.items()}
    codes = zip(*(map(frozenset, _of_files(joined[name], read).values()) for name in _FINGERPRINTS), strict=True)
    return joined, {path: wrong[path] for path in files if path in wrong}, dict(zip(read, codes, strict=True))


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables in their order, with all columns."""
    groups = itertools.groupby(tables, attrgetter("schema"))
    alike = [pa.concat_tables(group).replace_schema_metadata(None) for _, group in groups]
    empty = pa.Table.from_arrays([pa.nulls(0, kind) for kind in SCHEMA.types], schema=SCHEMA)
    return completed(pa.concat_tables([empty, *alike], promote_options="default").combine_chunks())


def _of_files(column: pa.ChunkedArray, tables: Mapping[Path, pa.Table]) -> dict[Path, list[Any]]:
    """The values of each file in a column of the joined rows of all."""
    values = iter(column.to_pylist())
    return {path: list(itertools.islice(values, len(table))) for path, table in tables.items()}


def _misfits(files: Mapping[Path, tuple[Job, pa.Table]], joined: pa.Table, platform: str) -> dict[Path, str]:
    """Why files are not those of their jobs, in words; `joined` has the rows of all of them, with all columns."""
    device = platform.partition(".")[0]
    names = _of_files(joined["implementation"], {path: table for path, (_, table) in files.items()})
    true = not files or _are_true(joined, [(job, len(table)) for job, table in files.values()], device)
    found, start = {}, 0
    for path, (job, table) in files.items():
        spec = spec_of(table)
        if spec != job.spec:
            found[path] = f"was measured for spec {spec_hash(spec or '')}, the config asks for {job.hash}"
        elif Counter(names[path]) != Counter(job.implementations):
            found[path] = f"holds {names[path]}, asked were {list(job.implementations)}"
        elif not true and (false := _false(joined.select(_CHECKED).slice(start, len(table)).to_pylist(), job, device)):
            found[path] = f"has {false}"
        start += len(table)
    return found


def _are_true(joined: pa.Table, jobs: Sequence[tuple[Job, int]], device: str) -> bool:
    """Whether `_false` finds nothing in so many rows of each job; False also where only a look at each row can tell."""
    known = [values for job, rows in jobs for values in [_known(job, device)] * rows]
    for name in dict.fromkeys(itertools.chain.from_iterable(known)):
        each = zip(joined[name].to_pylist(), known, strict=True)
        if any(name in values and values[name] != value for value, values in each):
            return False
    statuses, medians = joined["status"].to_pylist(), joined["median_us"].to_pylist()
    timed = (median for status, median in zip(statuses, medians, strict=True) if status == "ok")
    if not (set(statuses) <= {*STATUSES} and all((median or 0) > 0 for median in timed)):
        return False
    dates = set(zip(joined["started_at"].to_pylist(), joined["ended_at"].to_pylist(), strict=True))
    return all(itertools.starmap(contradictions.has_ended, dates)) and contradictions.is_free(joined)


def _known(job: Job, device: str) -> dict[str, Any]:
    """What the rows of a job say of it."""
    names = {"bench": job.cell.bench, "cell": job.cell.key, "cell_hash": job.hash, "platform": device}
    return dict(job.cell.values) | names


def _false(rows: Sequence[Mapping[str, Any]], job: Job, device: str) -> str:
    """What cannot be in a row of a job, in words; empty where all may be."""
    known = _known(job, device)
    for row in rows:
        for name, value in known.items():
            if row[name] != value:
                return f"{name} {row[name]!r} in place of {value!r}"
        if row["status"] not in STATUSES or (row["status"] == "ok") > ((row["median_us"] or 0) > 0):
            return f"status {row['status']!r} with a median_us of {row['median_us']}"
        if not contradictions.has_ended(row["started_at"], row["ended_at"]):
            return f"dates from {row['started_at']} to {row['ended_at']}"
        if wrong := contradictions.contradiction(row):
            return f"numbers that contradict each other: {wrong}"
    return ""
