"""What a config asks for: `status`, how much of it is measured; `plan`, what its training runs take before they start; and `prune`, files of cells
that it does not ask for, or that `collect` refuses.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli.options import ConfigJson, Configs, Platform, Run
from moe_routing_bench.cli.printing import duration
from moe_routing_bench.grid.run_spec import Run as Planned
from moe_routing_bench.packages import fingerprint
from moe_routing_bench.quality import code, run_rows
from moe_routing_bench.quality import plan as training
from moe_routing_bench.quantities import count, counts
from moe_routing_bench.store import cell_files, paths, records
from moe_routing_bench.store.parquet import KEEP
from moe_routing_bench.study import config_or_last, jobs_of, last, progress, unwell
from moe_routing_kernels.errors import bad


def status(config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None) -> None:
    """Say how much of a config is measured and trained by today's code, what failed, and about how long the rest takes.

    Without a config, of the one that the workflow was last run with for these results.
    """
    effective, platform, source = config_or_last(config, config_json, platform, run)
    jobs = jobs_of(effective)
    planned = training.expand(effective.get("quality", []), effective.get("perft", []), platform)
    files = paths.cell_files(platform, jobs)
    cells = progress.of_cells(files)
    print(f"{platform}: {cells}")
    print(f"asked by {source or f'{paths.CONFIG}, because no run of the workflow has left {last(platform)}'}")
    seconds = _seconds(cells.rows)
    if cells.remain and any(seconds):
        mean = sum(seconds) / len(seconds)
        print(f"about {duration(mean * cells.remain)} at {mean:.1f} s a cell")
    print(f"rows: {counts([row['status'] for row in cells.rows])}")
    for line in unwell(cells.rows):
        print(f"  {line}")
    for kind in progress.of_training(planned, platform):
        print(kind)
    if cells.remain and (collected := progress.collected(platform, jobs)):
        print(
            f"{paths.measurements(platform)} has rows of {collected[0]} of the cells, {collected[1]} of them of today's code"
        )
    orphans = paths.orphans(platform, files)
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


def prune(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    run: Run = None,
    refused: Annotated[
        bool, typer.Option("--refused", help="Those of the config's own cells that `collect` refuses, instead")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Move them to a folder below results/PLATFORM/trash, not only list them")
    ] = False,
) -> None:
    """List, or set aside, the files of cells that a config does not ask for: without one, the config of the workflow's last run.

    Rows that a published run (one with a manifest) or a named run has collected keep their files.
    """
    effective, platform, source = config_or_last(config, config_json, platform, run)
    if source is None:
        hint = "the workflow leaves it when it runs; or give the config that the results are of"
        raise bad("--config", f"none, and no {last(platform)}", "a config to compare with", hint)
    wanted = paths.cell_files(platform, jobs_of(effective))
    print(f"compared with {source}, which asks for {len(wanted)} cells")
    if refused:
        held = []
        chosen, later = cell_files.refused(wanted, platform)
        for path in later:
            print(f"kept {path}: {KEEP}")
    else:
        orphans, collected = paths.orphans(platform, wanted), _collected(platform)
        held = [path for path in orphans if _key(path) in collected]
        chosen = [path for path in orphans if _key(path) not in collected]
    for path in chosen:
        print(path)
    if held:
        print(f"kept {len(held)} other files: their rows are in {paths.measurements(platform)}")
    what = f"{len(chosen)} files of cells that " + ("`collect` refuses" if refused else f"{source} does not ask for")
    if remove and chosen:
        print(f"moved {what} to {_moved(chosen, platform)}")
    else:
        print(f"found {what}" + ("; --remove moves them to a folder of their own" if chosen else ""))


def _key(path: Path) -> tuple[str, str]:
    """The bench of a cell's file, and the digits of the spec's hash in its name."""
    return path.parent.name, path.stem.rpartition("-")[2]


def _collected(platform: str) -> set[tuple[str, str]]:
    """The keys of the cells in the table of a published run, or of a named one; none of others, whose table is made anew at will."""
    table = paths.measurements(platform)
    if not table.is_file() or not ("." in platform or paths.manifest(platform).is_file()):
        return set()
    rows = records.read_some(table, ["bench", "cell_hash"]).to_pylist()
    return {(row["bench"], (row["cell_hash"] or "")[:8]) for row in rows}


def _moved(chosen: Iterable[Path], platform: str) -> Path:
    """Move files to a new folder, in which they have the places that they had in the folder of results; returns it."""
    results = paths.results(platform)
    trash = paths.trash(platform) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    for path in chosen:
        target = trash / path.relative_to(results)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return trash


ENGINE = "graph,operators,compiled"  # that of a GPU


def plan(config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None) -> None:
    """Say what the training runs of a config take of one GPU: seconds by stored speeds of their shape, else by estimates.

    It also says where learning rates come from that another study chose. Adaptations are not in it, nor timings. Runs are taken one after the other: several at once on a GPU take longer each.
    """
    from moe_routing_bench.quality import (
        study_costs,  # with pandas it takes a second, which other commands need not wait for
    )

    effective, folder, _ = config_or_last(config, config_json, platform, run)
    runs = training.expand(effective.get("quality", []), effective.get("perft", []), folder).runs
    if not runs:
        raise bad("config.quality", "no runs", "at least one entry")
    stored = {paths.quality(name) for name in (folder, folder.partition(".")[0])}
    tables = [run_rows.read(path) for path in sorted(stored) if path.is_file()]
    rows = [row for table in tables for row in table.to_pylist()]
    entries = study_costs.by_entry(runs.values(), study_costs.speeds(rows, ENGINE))
    print(f"{'entry':<28} {'runs':>5} {'tokens each':>12} {'s each':>8} {'GPU s':>8}  speed")
    total, bases = 0.0, set()
    for (label, purpose), parts in entries.items():
        seconds, number = sum(one.runs * one.seconds for one in parts), sum(one.runs for one in parts)
        tokens, basis = parts[0].tokens, ", ".join(sorted({one.basis for one in parts}))
        name = label if purpose == "final" else f"{label} (pilots)"
        print(f"{name:<28} {number:>5} {tokens:>12,} {seconds / number:>8.1f} {seconds:>8.0f}  {basis}")
        total += seconds
        bases |= {one.basis for one in parts}
    print(f"{count(len(runs), 'run')}, {duration(total)} of one GPU")
    for label, source in dict.fromkeys((run.label, run.lr_source) for run in runs.values() if run.lr_source):
        mine = {run.router: run.lr for run in runs.values() if (run.label, run.lr_source) == (label, source)}
        print(f"{label}: learning rates of {source}: {', '.join(f'{router} {lr:g}' for router, lr in mine.items())}")
    for line in _power(runs.values(), rows):
        print(line)
    if study_costs.ESTIMATED in bases:
        print("estimated: for one NVIDIA H200, by constants that were not measured with this engine")


def _power(runs: Iterable[Planned], rows: list[dict[str, Any]]) -> Iterable[str]:
    """How many seeds show equal rules of each entry to be equivalent, at the noise that rows of the same code and sizes have."""
    import pandas as pd

    from moe_routing_bench.quality import compare, study_costs

    finals = compare.finals(pd.DataFrame(rows)) if rows else pd.DataFrame()
    finals = finals[compare.refusals(finals) == ""] if len(finals) else finals
    today = fingerprint(code.training_files())
    final = [run for run in runs if run.purpose == "final"]
    for label in dict.fromkeys(run.label for run in final):
        mine = [run for run in final if run.label == label]
        if (rules := len({run.router for run in mine})) > 1:
            sizes = {name: getattr(mine[0], name) for name in (*study_costs.SHAPE, "batch", "steps")}
            noise, basis = study_costs.stored_noise(finals, sizes, today)
            seeds = count(len({run.seed for run in mine}), "seed")
            yield f"{label}, {seeds}: {study_costs.power_of_equivalence(noise, rules)}, at a noise of {noise:.2g} bits ({basis})"
