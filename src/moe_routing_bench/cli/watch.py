"""The loop of a kernel's author: edit, and a second later see whether it is right, how fast, and against what."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import options
from moe_routing_bench.cli.options import Models, Plugins, Timeout, among, asked_jobs, warn_of_ignored, with_axes
from moe_routing_bench.cli.rounds import Rivals, Round, Sources, Warmth
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.packages import PACKAGE, PACKAGES
from moe_routing_bench.quantities import count
from moe_routing_bench.study import FINE, references
from moe_routing_kernels.errors import UserError, bad, one_line, pick

POLL_SECONDS = 0.1
_Row = dict[str, Any]


@with_axes
def watch(
    bench: Annotated[str, typer.Argument(help=f"Operation: {' | '.join(BENCHES)}", autocompletion=among(BENCHES))],
    *,
    implementations: Annotated[str, typer.Option(help="Comma-separated names of those that are being written")],
    against: Annotated[
        str | None, typer.Option(help="Comma-separated names of rivals [default: all others of the bench]")
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Sampling time of a round")] = 0.3,
    min_blocks: Annotated[int, typer.Option(help="Least blocks of samples")] = 10,
    cpu_threads: Annotated[int, typer.Option(help="Threads of torch on a CPU")] = Settings.cpu_threads,
    timeout: Timeout = Settings.timeout,
    plugin: Plugins = None,
    own: Models = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also profile every version that is right: operators, a Chrome trace and ncu's command line"),
    ] = None,
    force: options.Force = False,
    **values: Any,
) -> None:
    """Measure an implementation and the fastest of its rivals, and again whenever one of its files changes, until Ctrl-C.

    The first round has all rivals and finds the fastest. One that torch.compile makes is in the first alone: later rounds are compared with it
    through the bench's baseline. A round is short, so that small differences stay undecided: `measure` takes longer.
    """
    written, known = implementations.split(","), references(plugin)
    settings = {
        "max_seconds": max_seconds,
        "min_blocks": min_blocks,
        "warmup_ms": 20,
        "cpu_threads": cpu_threads,
        "timeout": timeout,
    }
    names = None if against is None else [*written, *against.split(",")]
    jobs = asked_jobs(bench, names, settings, known, own, values)
    if len(jobs) > 1:
        raise bad("watch", f"{len(jobs)} cells", "one cell")
    (job,) = jobs
    written = [pick("--implementations", name.strip(), job.implementations) for name in written]
    if profile:
        options.check_folder("--profile", profile, force)
    warn_of_ignored(bench, values)
    watched = _Watch(job, written, profile)
    try:
        watched.run()
    except KeyboardInterrupt:
        print(f"\n{watched.closing()}")


class _Watch:
    """The rounds of one cell, and what they have shown so far."""

    def __init__(self, job: Job, written: list[str], profile: Path | None) -> None:
        """`mine` are the implementations of the job that are edited; all others are rivals. `profile`: a folder for profiles."""
        self._profile = profile
        self._job, self._mine = job, written
        self._rivals = Rivals(bench_of(job), written, job.implementations)
        self._sources = Sources(bench_of(job), written)
        self._last: dict[str, _Row] = {}  # the last version of each that was right
        self._fastest: dict[str, _Row] = {}
        self._rounds = 0

    def run(self) -> None:
        """Measure, and again after every edit; never returns."""
        cell, files = self._job.cell, self._sources.files
        print(f"{cell.bench} {cell.key}\nwatching {_names(files)}; Ctrl-C ends")
        print(f"the first round takes longest: it has {', '.join(self._rivals.rivals) or 'no rival'}", flush=True)
        with tempfile.TemporaryDirectory(prefix="watch-") as folder:
            while True:
                self._measured(Path(folder))
                _log("edited", ", ".join(path.name for path in self._edited()))

    def _edited(self) -> list[Path]:
        """Wait for an edit that can be parsed; one that cannot is said."""
        warmth = Warmth()
        while True:
            time.sleep(POLL_SECONDS)
            warmth.keep()
            if (changed := self._sources.changed()) and self._parsed():
                return changed

    def _parsed(self) -> bool:
        try:
            self._sources.read()
        except SyntaxError as error:
            _log("broken", f"{error.filename}:{error.lineno}: {error.msg}")
            return False
        except (UserError, ModuleNotFoundError) as error:
            _log("broken", one_line(error))
            return False
        return True

    def _measured(self, folder: Path) -> None:
        """A round, begun again when a file changes meanwhile; printed when it is over."""
        while (current := self._round(folder)) is None:
            pass
        try:
            rows = current.rows()
        except UserError as error:
            return _log("failed", str(error))
        self._rounds += 1
        self._show({row["implementation"]: row for row in rows}, current)

    def _round(self, folder: Path) -> Round | None:
        """A round that is over, or None where a file has changed before it was."""
        names = tuple(dict.fromkeys((*self._mine, *self._rivals.rivals)))
        current = Round(dataclasses.replace(self._job, implementations=names), folder)
        try:
            while not current.over():
                time.sleep(POLL_SECONDS)
                if self._sources.changed() and self._parsed():
                    return None
        finally:
            current.end()
        return current

    def _show(self, rows: Mapping[str, _Row], current: Round) -> None:
        """A line of each implementation that is edited, and what a failed one has printed; the fastest rival is kept."""
        for name in self._mine:
            row = rows[name]
            _log(name, f"{'; '.join(self._parts(row, rows))}; round {self._rounds}, {current.seconds:.1f} s")
            if row["status"] == "ok":
                self._last[name] = row
                best = self._fastest.get(name)
                if best is None or row["median_us"] < best["median_us"]:
                    self._fastest[name] = row
        if any(rows[name]["status"] not in FINE for name in self._mine) and (output := current.output().rstrip()):
            print(output, file=sys.stderr, flush=True)
        right = [name for name in self._mine if rows[name]["status"] == "ok"]
        if self._profile and right:
            print(current.profile(right, self._profile), flush=True)
        if self._rounds == 1:
            self._rivals.choose(rows)

    def _parts(self, row: _Row, rows: Mapping[str, _Row]) -> Iterator[str]:
        """What is said of a row: whether it is right, its time, its share of the limit, and the comparisons."""
        if row["status"] != "ok":
            yield f"{row['status']}: {row['reason']}"
            return
        interval = "" if row["ci_low_us"] is None else f" [{row['ci_low_us']:.4g}, {row['ci_high_us']:.4g}]"
        yield f"right, {row['median_us']:.4g} us{interval}"
        if row.get("share_of_roofline"):
            yield f"{row['share_of_roofline']:.0%} of the limit"
        yield from self._rivals.said(row, rows, self._last.get(row["implementation"]))

    def closing(self) -> str:
        """How many rounds there were, and the fastest version of each implementation."""
        best = [f"{name} {row['median_us']:.4g} us" for name, row in self._fastest.items()]
        return f"{count(self._rounds, 'round')}; fastest: {', '.join(best) or 'none was right'}"


def _names(files: Sequence[Path]) -> str:
    """The names of files; of a kernel of another package its own, and how many it imports from this one."""
    outside = [path for path in files if not set(PACKAGES) & set(path.parents)] or files
    names = ", ".join(path.name for path in outside if path.name != "__init__.py")
    return (
        f"{names} and {count(len(files) - len(outside), 'file')} of {PACKAGE.name}"
        if len(outside) < len(files)
        else names
    )


def _log(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}: {text}", flush=True)
