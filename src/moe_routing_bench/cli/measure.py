"""`measure`: cells that are measured by hand, and `measure-again`: those of a config whose times are in doubt."""

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import options, printing
from moe_routing_bench.cli.delivery import Delivery, Part, Rows, delivering, undisturbed
from moe_routing_bench.cli.estimates import announce
from moe_routing_bench.cli.options import (
    ConfigJson,
    Configs,
    Models,
    Platform,
    Plugins,
    Run,
    Timeout,
    among,
    asked_jobs,
    warn_of_ignored,
    with_axes,
)
from moe_routing_bench.cli.printing import show
from moe_routing_bench.grid.cell import ISOLATE, Job, Settings
from moe_routing_bench.quantities import count
from moe_routing_bench.store import paths, platforms
from moe_routing_bench.study import config_or_last, jobs_of, references, unwell
from moe_routing_kernels.errors import bad, pick, writing
from moe_routing_kernels.formats.weights import WEIGHTS


@with_axes
def measure(
    bench: Annotated[str, typer.Argument(help=f"Operation: {' | '.join(BENCHES)}", autocompletion=among(BENCHES))],
    *,
    implementations: Annotated[
        str | None, typer.Option(help="Comma-separated names [default: all of the bench]")
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Sampling time")] = Settings.max_seconds,
    min_blocks: Annotated[int, typer.Option(help="Least blocks of samples")] = Settings.min_blocks,
    cpu_threads: Annotated[int, typer.Option(help="Threads of torch on a CPU")] = Settings.cpu_threads,
    timeout: Timeout = Settings.timeout,
    mode: Annotated[
        str, typer.Option(help="What measures: cold (a process of its own) | warm (a server that has imported torch)")
    ] = "cold",
    plugin: Plugins = None,
    isolate: Annotated[
        str,
        typer.Option(
            help="Implementations that run in processes of their own: plugins (those of other packages) | all"
        ),
    ] = ISOLATE[0],
    own: Models = None,
    out: Annotated[Path | None, typer.Option(help="Also write the rows of one cell to this Parquet file")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also profile one cell: prints operators, and keeps them and Chrome traces in this folder"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns of the rows as one JSON list")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns of the rows as CSV")] = False,
    force: options.Force = False,
    **values: Any,
) -> None:
    """Measure the implementations of an operation together for one set of sizes (a cell), or for several: --tokens 64,128.

    Exit status: 0 where every row is ok or unsupported, 1 where an implementation crashed, hung, was wrong or ran out of memory, 2 for a
    mistake in the options; 130 after Ctrl-C and 143 after SIGTERM, which print the rows of the cells that are finished.
    """
    pick("--mode", mode, ("warm", "cold"))
    pick("--isolate", isolate, ISOLATE)
    if as_json and as_csv:
        raise bad("--csv", "together with --json", "one of them")
    settings = {"max_seconds": max_seconds, "min_blocks": min_blocks, "cpu_threads": cpu_threads, "timeout": timeout}
    names = None if implementations is None else implementations.split(",")
    jobs = asked_jobs(bench, names, settings, references(plugin), own, values, isolate)
    for option, path in (("--out", out), ("--profile", profile)):
        if path and len(jobs) > 1:
            raise bad(option, f"{len(jobs)} cells", "one cell", "--json and --csv print the rows of several")
    if out:
        options.check_file("--out", out, force)
    if profile:
        options.check_folder("--profile", profile, force)
    warn_of_ignored(bench, values)
    print(f"torch computes with {count(cpu_threads, 'CPU thread')}", file=sys.stderr)
    announce(jobs, platforms.current())
    tables = not (as_json or as_csv)
    delivery = Delivery(
        _tables if tables else _document(printing.write_json if as_json else printing.write_csv), len(jobs)
    )
    rows: Rows = []
    with delivering(delivery):
        for job, found in _measured(jobs, mode):
            with undisturbed():
                delivery.add(job.cell, found)
                rows += found
                if out:
                    _store(job, found, out, force, delivery)
            if tables:
                delivery.deliver()
    if out:
        print(f"wrote {out}", file=sys.stdout if tables else sys.stderr)
    if profile:
        importlib.import_module("moe_routing_bench.cli.profile").profiled(jobs[0], rows, profile, tables)
    if wrong := unwell(rows):
        print(f"{len(wrong)} of {len(rows)} rows are of implementations that failed", file=sys.stderr)
        raise typer.Exit(1)


def _measured(jobs: Sequence[Job], mode: str) -> Iterator[tuple[Job, Rows]]:
    """Each job with its rows, as soon as it is measured; each is announced on stderr."""
    supervisor = importlib.import_module("moe_routing_bench.measure.supervisor")
    memory = importlib.import_module("moe_routing_bench.measure.server").Memory()
    began = time.monotonic()
    for number, job in enumerate(jobs, 1):
        expected = (time.monotonic() - began) / (number - 1) * (len(jobs) - number + 1) if number > 1 else None
        names = ", ".join(job.implementations)
        print(f"cell {number} of {len(jobs)}: {job.cell.bench} {job.cell.key}: {names}", file=sys.stderr, flush=True)
        with printing.waited(expected):
            rows = supervisor.measure(job, None, mode, None, memory)
        yield job, rows


def _document(write: Callable[[Rows], None]) -> Callable[[Sequence[Part]], None]:
    """`write` for the rows of all cells together."""
    return lambda parts: write([row for _, rows in parts for row in _compared(rows)])


def _tables(parts: Sequence[Part]) -> None:
    """Print a table for each cell."""
    for cell, rows in parts:
        show(printing.results(cell, _compared(rows)))


def _compared(rows: Rows) -> Rows:
    """Rows with what they are against dequantised weights, where they have quantised ones: pandas and scipy take half a second to import."""
    if not any(row.get("weights") in WEIGHTS for row in rows):
        return rows
    return importlib.import_module("moe_routing_bench.comparison.ratios").against_dequantised(rows)


def _store(job: Job, rows: Rows, out: Path, force: bool, delivery: Delivery) -> None:
    """Write the rows of a job to a file; where that fails, all of their columns are kept elsewhere."""
    store = importlib.import_module("moe_routing_bench.store.rows")
    try:
        if not force and options.taken(out):
            raise bad("--out", str(out), "a new file", "it was made while this was measured")
        with writing(out):
            store.write(out, rows, job.spec)
    except Exception:
        delivery.keep(f"{out} is not written", rows)
        raise


def measure_again(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    run: Run = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/again.parquet]")
    ] = None,
    force: options.Force = False,
) -> None:
    """Measure again the cells with a doubtful time: one that does not fit neighbouring cells, or scatters.

    At most one cell in 20, or 3, each in a process of its own; both times are kept, and `collect` says which agree. Where this machine
    is not the platform that is asked for, nothing is measured, and `collect` says so.
    """
    effective, platform, _ = config_or_last(config, config_json, platform, run)
    anomalies = importlib.import_module("moe_routing_bench.comparison.anomalies")  # pandas takes a second
    cell_files, parquet = (
        importlib.import_module(f"moe_routing_bench.store.{name}") for name in ("cell_files", "parquet")
    )
    out = options.chosen(out, paths.again(platform), force)
    jobs = paths.cell_files(platform, jobs_of(effective))
    first = cell_files.collect(jobs, platform).to_pandas()
    chosen = set(anomalies.repeated(first))
    wanted = [job for job in jobs.values() if job.hash in chosen]
    here = platforms.current() == platform.partition(".")[0]
    rows = [row for job in wanted for row in _announced(job)] if here else []
    parquet.write_table(out, anomalies.seconds(first, rows))
    why = "" if here else f", because this machine is {platforms.current()}"
    print(
        f"wrote {out}: of {len(jobs)} cells {len(wanted)} to measure once more{', none was' if wanted and not here else ''}{why}"
    )


def _announced(job: Job) -> list[dict[str, Any]]:
    """The rows of a job, which is announced."""
    supervisor = importlib.import_module("moe_routing_bench.measure.supervisor")
    print(f"once more: {job.cell.bench} {job.cell.key}", flush=True)
    return supervisor.measure(job)
