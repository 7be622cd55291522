"""Cells whose times are in doubt, measured once more."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli import options
from moe_routing_bench.cli.options import ConfigJson, Configs, Platform, Run
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.store import cell_files, paths, platforms
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.study.request import config_or_last, jobs_of


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
    out = options.chosen(out, paths.again(platform), force)
    jobs = paths.cell_files(platform, jobs_of(effective))
    first = cell_files.collect(jobs, platform).to_pandas()
    chosen = set(anomalies.repeated(first))
    wanted = [job for job in jobs.values() if job.hash in chosen]
    here = platforms.current() == platform.partition(".")[0]
    rows = [row for job in wanted for row in _measured(job)] if here else []
    write_table(out, anomalies.seconds(first, rows))
    why = "" if here else f", because this machine is {platforms.current()}"
    print(
        f"wrote {out}: of {len(jobs)} cells {len(wanted)} to measure once more{', none was' if wanted and not here else ''}{why}"
    )


def _measured(job: Job) -> list[dict[str, Any]]:
    """The rows of a job, which is announced."""
    supervisor = importlib.import_module("moe_routing_bench.measure.supervisor")
    print(f"once more: {job.cell.bench} {job.cell.key}", flush=True)
    return supervisor.measure(job)
