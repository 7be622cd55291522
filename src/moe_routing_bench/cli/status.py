"""`status`: how much of a config is measured."""

from typing import Any

from moe_routing_bench.cli.options import ConfigJson, Configs, Platform, Run
from moe_routing_bench.cli.printing import duration
from moe_routing_bench.quality import plan
from moe_routing_bench.quantities import counts
from moe_routing_bench.store import cell_files, paths
from moe_routing_bench.study import progress
from moe_routing_bench.study.request import config_or_last, jobs_of, last


def status(config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None) -> None:
    """Say how much of a config is measured and trained by today's code, what failed, and about how long the rest takes.

    Without a config, of the one that the workflow was last run with for these results.
    """
    effective, platform, source = config_or_last(config, config_json, platform, run)
    jobs, planned = jobs_of(effective), plan.expand(effective.get("quality", []), effective.get("perft", []))
    files = paths.cell_files(platform, jobs)
    cells = progress.of_cells(files)
    print(f"{platform}: {cells}")
    print(f"asked by {source or f'{paths.CONFIG}, because no run of the workflow has left {last(platform)}'}")
    seconds = _seconds(cells.rows)
    if cells.remain and any(seconds):
        mean = sum(seconds) / len(seconds)
        print(f"about {duration(mean * cells.remain)} at {mean:.1f} s a cell")
    print(f"rows: {counts([row['status'] for row in cells.rows])}")
    for line in progress.unwell(cells.rows):
        print(f"  {line}")
    for kind in progress.of_training(planned, platform):
        print(kind)
    if cells.remain and (collected := progress.collected(platform, jobs)):
        print(
            f"{paths.measurements(platform)} has rows of {collected[0]} of the cells, {collected[1]} of them of today's code"
        )
    orphans = cell_files.orphans(paths.results(platform), files)
    if orphans:
        print(
            f"{len(orphans)} files of cells that this config does not ask for: `moe-routing-bench prune` with it lists them"
        )


def _seconds(rows: list[dict[str, Any]]) -> list[float]:
    """How long every cell took, which each of its rows that was measured says."""
    cells: dict[tuple[str, str], float] = {}
    for row in rows:
        cell = row["bench"], row["cell"]
        cells[cell] = max(cells.get(cell, 0.0), row["measure_seconds"] or 0.0)
    return list(cells.values())
