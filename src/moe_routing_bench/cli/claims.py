"""Published figures, held against our rows; those that this machine can show are measured on request."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli.options import Platform, Run
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config import claims as published
from moe_routing_bench.config.expand import config_of, expand
from moe_routing_bench.config.load import load
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.quantities import counts
from moe_routing_bench.store import paths, platforms, records
from moe_routing_bench.store.project_files import own_or_shipped
from moe_routing_bench.study import models, platform_of
from moe_routing_kernels.errors import UserError, bad, pick


def claims(
    platform: Platform = None,
    run: Run = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what no row shows yet and this machine can run")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Comma-separated ids [default: all]")] = None,
    file: Annotated[Path | None, typer.Option(help=f"File of claims [default: {paths.CLAIMS}]")] = None,
) -> None:
    """Hold figures that others published against our rows: reproduced, not reproduced, or why it cannot be told; and our own: held or not."""
    platform = platform_of(platform, run)
    known = {claim.id: claim for claim in published.load(file or own_or_shipped(paths.CLAIMS))}
    chosen = [known[pick("--only", name.strip(), known)] for name in (only.split(",") if only else known)]
    if measure:
        platforms.verify(platform)
    rows = _collected(platform)
    if measure:
        _measure(verdict.claim for verdict in held(platform, chosen, rows) if verdict.why == "not measured")
    if not rows and not any(paths.claim_files(platform)):
        there = sorted(path.parent.name for path in paths.results("").glob("*/measurements.parquet"))
        allowed = f"a folder of results: {', '.join(there)}" if there else "measured cells"
        raise bad("rows", f"none of {platform}", allowed, "run `snakemake` first, or add --measure")
    verdicts = held(platform, chosen, rows)
    others, own = ([verdict for verdict in verdicts if verdict.claim.own is ours] for ours in (False, True))
    for kind, some in (("claims", others), ("figures of our own", own)):
        if some:
            show(_table(some))
            print(f"{len(some)} {kind}: {counts([verdict.verdict for verdict in some])}")
    if rows and not only:
        for text in _published(rows[0]):
            print(text)


def _published(rows: Any) -> list[str]:
    """What became of the rows that other projects published, in a paragraph for each source with rows of cells here."""
    tables = importlib.import_module("moe_routing_bench.report.section_tables").published(rows)
    return [table.note for table in tables]


def held(platform: str, chosen: Iterable[published.Claim], collected: list[Any]) -> list[Any]:
    """Claims held against tables of collected rows and what was measured for claims; `comparison.claim_verdicts.Held` each."""
    pandas, judge = (
        importlib.import_module(name) for name in ("pandas", "moe_routing_bench.comparison.claim_verdicts")
    )
    tables = [*collected, *(_read(path, platform) for path in sorted(paths.claim_files(platform)))]
    if len(tables) == 1:  # a copy of a hundred thousand rows takes half a second and hundreds of MB
        rows = tables[0].reset_index(drop=True)
    else:
        rows = pandas.concat(tables, ignore_index=True) if tables else records.frame(records.SCHEMA.empty_table())
    return judge.held(list(chosen), rows, platform.startswith(platforms.CPU))


def _collected(platform: str) -> list[Any]:
    """The table of a platform's rows; none where nothing was collected."""
    path = paths.measurements(platform)
    return [_read(path, platform)] if path.is_file() else []


def _read(path: Path, platform: str) -> Any:
    return records.frame(records.of_platform(records.read(path), platform, str(path)))


def _measure(asked: Iterable[published.Claim]) -> None:
    """Measure the cell of each claim that names a whole one, into a file of its own."""
    supervisor = importlib.import_module("moe_routing_bench.measure.supervisor")
    for claim in asked:
        try:
            job = job_of(claim)
        except UserError as error:
            print(f"{claim.id}: not measured: {error}")
            continue
        print(f"{claim.id}: {job.cell.bench} {job.cell.key}", flush=True)
        supervisor.measure(job, paths.claim_file(platforms.current(), claim.id))


def job_of(claim: published.Claim) -> Job:
    """The one cell that a claim is about, with what it compares and the baseline. Raises `UserError` where it leaves one open."""
    check = claim.check
    assert check is not None
    if check.over:
        raise bad(f"claim {claim.id}", f"the {check.over} of several cells", "one cell", "its rows come from a config")
    asked = config_of(check.bench, {name: None if value == "none" else value for name, value in check.axes.items()})
    asked["grid"][0]["implementations"] = list(dict.fromkeys(filter(None, (check.implementation, check.against))))
    (job,) = expand(load(asked), models())
    return job


def _table(verdicts: list[Any]) -> Table:
    table = Table("claim", "who", "hardware", "published", "ours", "cells", "verdict", box=None)
    for verdict in verdicts:
        unit, ours = (
            verdict.claim.unit,
            "" if verdict.ours != verdict.ours else f"{verdict.ours:.4g} {verdict.claim.unit}",
        )
        text = verdict.verdict + (f": {verdict.why}" if verdict.why else "")
        table.add_row(
            verdict.claim.id,
            verdict.claim.who,
            verdict.claim.hardware or "not said",
            f"{verdict.claim.figure:g} {unit}",
            ours,
            str(verdict.cells or ""),
            text,
        )
    return table
