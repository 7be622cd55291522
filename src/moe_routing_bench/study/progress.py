"""How much of what a config asks for is there: its cells, training runs and adaptations, and what collected tables hold of them."""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.packages import fingerprint
from moe_routing_bench.quality import adaptation_rows, code, run_rows
from moe_routing_bench.quality.plan import Plan
from moe_routing_bench.quantities import count, counts
from moe_routing_bench.store import cell_files, paths, records
from moe_routing_bench.store.parquet import Newer
from moe_routing_bench.store.rows import SUMMARISED
from moe_routing_bench.study import unwell
from moe_routing_kernels.errors import UserError, one_line

_DOUBTS = ("suspect", "suspect_reason", "converged")
_CODE = ("code_fingerprint", "plugin_fingerprint")
_Code = tuple[str | None, str | None]


@dataclass
class Progress:
    """How many things of one kind are asked for, are done by today's code, and were done by other code, so that they run again.

    `rows` are those of cells that are done or were done by other code; `newer` says which files a newer version of the package wrote.
    """

    what: str
    asked: int
    done: int = 0
    other_code: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    newer: list[str] = field(default_factory=list)

    @property
    def remain(self) -> int:
        """How many the workflow would still run."""
        return self.asked - self.done

    def add(self, codes: set[Any], today: Any) -> None:
        """Count one of which there is a file whose rows are of this code."""
        if codes == {today}:
            self.done += 1
        else:
            self.other_code += 1

    def __str__(self) -> str:
        """The counts in words, and a line for each of the first files of a newer version."""
        other = f", {self.other_code} of them done by other code" if self.other_code else ""
        return "\n  ".join([f"{self.done} of {self.asked} {self.what}, {self.remain} remain{other}", *self.newer[:5]])


def of_cells(files: Mapping[Path, Job]) -> Progress:
    """The cells whose file is readable and was measured for the spec of its job."""
    cells, today = Progress("cells measured", len(files)), _codes()
    for path, job in files.items():
        try:
            spec, rows = cell_files.summary(path)
        except Newer as error:
            cells.newer.append(str(error))
            continue
        except UserError:
            continue
        if spec == job.spec:
            cells.add({_code(row) for row in rows}, today(job))
            cells.rows += rows
    return cells


def of_training(planned: Plan, platform: str) -> list[Progress]:
    """The training runs with their pilots, their timings, and the adaptations with their pilots; only kinds that are asked for."""
    runs = {paths.run_file(platform, name): run.spec for name, run in planned.runs.items()}
    adapted = {
        paths.perft_file(platform, name): adaptation.spec for name, adaptation in planned.all_adaptations.items()
    }
    of_runs, of_adaptations = (fingerprint(files_of()) for files_of in (code.training_files, code.adaptation_files))
    kinds = [
        _trained("training runs done", runs, run_rows.SCHEMA, of_runs),
        _timed(planned.timing_files(platform), platform, of_runs),
        _trained("adaptations done", adapted, adaptation_rows.SCHEMA, of_adaptations),
    ]
    return [state for state in kinds if state.asked]


def _trained(what: str, specs: Mapping[Path, str], schema: pa.Schema, today: str) -> Progress:
    """The files that are readable and of the given spec."""
    state = Progress(what, len(specs))
    for path, spec in specs.items():
        try:
            table = run_rows.read(path, schema)
        except Newer as error:
            state.newer.append(str(error))
            continue
        except UserError:
            continue
        if run_rows.spec_of(table) == spec:
            state.add(set(table["code_fingerprint"].to_pylist()), today)
    return state


def _timed(timings: Collection[Path], platform: str, today: str) -> Progress:
    """The timings that are readable, as are the runs that they are of: these say by what code, as a timing follows its run."""
    state = Progress("timings done", len(timings))
    for path in timings:
        try:
            _, run = (run_rows.read(file, run_rows.SCHEMA) for file in (path, paths.run_file(platform, path.stem)))
        except UserError:
            continue
        state.add(set(run["code_fingerprint"].to_pylist()), today)
    return state


def collected(platform: str, jobs: Iterable[Job]) -> tuple[int, int] | None:
    """How many of the jobs' cells the platform's collected table holds, and how many of these are of today's code; None without a
    table. Raises `UserError` for one that cannot be read."""
    path = paths.measurements(platform)
    if not path.is_file():
        return None
    codes: dict[str, set[_Code]] = {}
    for row in records.read(path).select(["cell_hash", *_CODE]).to_pylist():
        codes.setdefault(row["cell_hash"], set()).add(_code(row))
    present, today = [job for job in jobs if job.hash in codes], _codes()
    return len(present), sum(codes[job.hash] == {today(job)} for job in present)


def closing(platform: str) -> str:
    """How many rows of the collected table have which status, for the last lines of a run, how many of the times are unreliable and why, and what
    is wrong with the first rows that need attention; next to a page of published rows, where that is. Empty without a table."""
    path, page = paths.measurements(platform), paths.published_page(platform)
    if not path.is_file():
        return ""
    rows = records.read(path).select([*SUMMARISED, *_DOUBTS]).to_pylist()
    wrong = unwell(rows)
    lines = [
        f"Rows: {counts([row['status'] for row in rows])}",
        *_unreliable(rows),
        *(f"  {line}" for line in wrong[:5]),
    ]
    lines += [f"  and {len(wrong) - 5} more"] if len(wrong) > 5 else []
    return "\n".join(lines + [f"Published rows of a GPU, to compare: {page}"] * page.is_file())


def _unreliable(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line on the times that are suspect or wider than asked, with the reason that most suspect ones have; none where all are sound."""
    ok = [row for row in rows if row["status"] == "ok"]
    suspect = [row for row in ok if row["suspect"]]
    wide = sum(row["converged"] is False and not row["suspect"] for row in ok)
    if not suspect and not wide:
        return []
    kinds: dict[str, list[str]] = {}  # reasons that differ in numbers alone
    for row in suspect:
        reason = row["suspect_reason"] or "no reason recorded"
        kinds.setdefault(re.sub(r"[\d.]+", "#", reason), []).append(reason)
    usual = max(kinds.values(), key=len, default=[])
    parts = [f"{len(suspect)} suspect, most often as: {one_line(usual[0])}"] if suspect else []
    parts += [f"{wide} with a wider interval than asked"] if wide else []
    return [f"Unreliable: {len(suspect) + wide} of {count(len(ok), 'time')}: {'; '.join(parts)}"]


def _code(row: Mapping[str, Any]) -> _Code:
    """The fingerprints of the code that measured a row: its bench's, and that of the cell's plugins."""
    bench, others = (row[name] for name in _CODE)
    return bench, others


def _codes() -> Callable[[Job], _Code]:
    """A function from a job to the fingerprints of its code today, which reads the sources of each bench and plugin once."""
    bench = functools.cache(lambda name: BENCHES[name].code_fingerprint())
    others: dict[tuple[str, ...], str | None] = {(): None}

    def of(job: Job) -> _Code:
        if (names := plugins.references(job)) not in others:
            others[names] = plugins.fingerprint(job)
        return bench(job.cell.bench), others[names]

    return of
