"""What was measured for a config: how much of it, the rows of all of it in one file, and files that nothing asks for."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench import files
from moe_routing_bench.cli.asked import asked
from moe_routing_bench.cli.options import ConfigJson, Configs, Platform, Run
from moe_routing_bench.cli.printing import counts, duration
from moe_routing_bench.errors import UserError
from moe_routing_bench.grid.job import Job
from moe_routing_bench.store import paths, records
from moe_routing_bench.store.parquet import write_table


def collect(
    config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None,
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/measurements.parquet]")] = None,
) -> None:  # fmt: skip
    """Join the rows of all cells of a config into one file, after checking that each was measured for this config."""
    jobs, platform = asked(config, config_json, platform, run)
    out = out or paths.measurements(platform)
    files.check_writable(out)
    verdicts = importlib.import_module("moe_routing_bench.comparison.verdicts")  # pandas and scipy take a second
    table = verdicts.with_verdicts(records.collect(paths.cell_files(platform, jobs), platform))
    write_table(out, table)
    print(f"wrote {out}: {len(table)} rows of {len(jobs)} cells, {counts(table['status'].to_pylist())}")


def status(config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None) -> None:
    """Say how many cells of a config are measured, what failed, and about how long the rest takes."""
    jobs, platform = asked(config, config_json, platform, run)
    files = paths.cell_files(platform, jobs)
    rows, remaining, seconds = [], [], []
    for path, job in files.items():
        found = _rows_for(path, job)
        if found is None:
            remaining.append(path)
            continue
        rows += found
        seconds += [max(row["measure_seconds"] or 0.0 for row in found)]  # of the whole cell, in each of its rows
    print(f"{platform}: {len(files) - len(remaining)} of {len(files)} cells measured, {len(remaining)} remain")
    if remaining and any(seconds):
        mean = sum(seconds) / len(seconds)
        print(f"about {duration(mean * len(remaining))} at {mean:.1f} s a cell")
    print(f"rows: {counts([row['status'] for row in rows])}")
    for row in rows:
        if row["status"] not in ("ok", "unsupported"):
            print(f"  {row['bench']} {row['cell']} {row['implementation']}: {row['status']}: {row['reason'] or ''}")
    orphans = records.orphans(paths.results(platform), files)
    if orphans:
        print(f"{len(orphans)} files of cells that this config does not ask for: `moe-routing-bench prune` lists them")


def prune(
    config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove them; without it they are only listed")] = False,
) -> None:  # fmt: skip
    """List, or remove, the files of cells that a config does not ask for."""
    jobs, platform = asked(config, config_json, platform, run)
    orphans = records.orphans(paths.results(platform), paths.cell_files(platform, jobs))
    for path in orphans:
        print(path)
        if remove:
            path.unlink()
    print(
        f"{'removed' if remove else 'found'} {len(orphans)} files"
        + ("" if remove or not orphans else "; --remove removes them")
    )


def _rows_for(path: Path, job: Job) -> list[dict[str, Any]] | None:
    """The rows of a cell's file, or None when it is missing, unreadable or measured for something else."""
    try:
        table = records.read(path)
    except UserError:
        return None
    if records.spec_of(table) != job.spec:
        return None
    return table.select(["bench", "cell", "implementation", "status", "reason", "measure_seconds"]).to_pylist()
