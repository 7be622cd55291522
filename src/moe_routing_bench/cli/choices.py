"""What stored rows say of our kernels: `choices`, the table that `auto` chooses from and what it costs, and `targets`, what they set out to reach."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli import options
from moe_routing_bench.cli.printing import show
from moe_routing_bench.cli.report import accuracy_of
from moe_routing_bench.quantities import counts, us
from moe_routing_bench.store import paths, platforms, records
from moe_routing_kernels import choices as table_of_choices
from moe_routing_kernels.errors import bad, writing


def choices(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Folders of results/ such as nvidia-h200.layers [default: all but those of a CPU]"
        ),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Judge a choice that may also be of another package")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table there; what ships is src/moe_routing_kernels/choices/choices.json"),
    ] = None,
    force: options.Force = False,
) -> None:
    """Make the table that `auto` chooses from of the layers in stored rows, and print the regret of its choices."""
    if out:
        options.check_file("--out", out, force)
    entries = of_runs(runs or stored())
    regret = importlib.import_module("moe_routing_bench.comparison.regret")
    lines = regret.lines(entries, entries, peers)
    show(_printed(lines))
    for summary in regret.summaries(lines):
        print(f"{summary.what}: {_summary(summary)}, {'within' if summary.met else 'beyond'} the bar")
    print(
        f"bar: mean {regret.MEAN_BAR:.0%}, worst {regret.WORST_BAR:.0%}; suspect cells: {sum(line.suspect for line in lines)} of {len(lines)}"
    )
    if fixed := regret.always(lines):
        print(f"always the same, at best: {fixed[0].what}: {_summary(fixed[0])}")
    if out:
        with writing(out):
            out.write_text(table_of_choices.text(entries), encoding="utf-8")
        print(f"wrote {out}: {len(entries)} cells")


def stored() -> list[str]:
    """The folders of results with collected rows, but for those of a CPU, which git does not keep."""
    runs = sorted(path.parent.name for path in paths.results("").glob("*/measurements.parquet"))
    return [name for name in runs if name.partition(".")[0] != platforms.CPU]


def of_runs(runs: list[str]) -> list[table_of_choices.Entry]:
    """The entries of all layers that were measured in these runs, one of each cell. Raises `UserError` where there is none."""
    made = importlib.import_module("moe_routing_bench.comparison.regret")
    entries = made.fullest(entry for run in runs for entry in made.entries(_rows(run), run))
    made.check_cards(entries)
    if not entries:
        raise bad(
            "layers with a time", f"none in {', '.join(runs) or 'results/'}", "rows of the bench layer that are ok"
        )
    return entries


def _rows(run: str) -> Any:
    path = paths.measurements(run)
    return records.frame(records.of_platform(records.read(path), run, str(path)))


def _summary(summary: Any) -> str:
    return f"mean {summary.mean:.1%}, worst {summary.worst:.1%} over {summary.cells} cells"


def _printed(lines: list[Any]) -> Table:
    """What is chosen for every cell, in the table and left out, and the regret against the best candidate and the best of all."""
    printed = Table("cell", "best candidate", "best", "chosen", "regret", "left out", "regret", "", box=None)
    for line in lines:
        times, cells = line.entry.times, []
        for choice in line.choices:
            cells += [choice.name, f"{choice.own:.1%} ({choice.all:.1%})"]
        notes = [*line.unmeasured, *dict.fromkeys(line.entry.suspect.values())]
        best = [f"{name} {us(times[name])}" for name in (line.best_own, line.best)]
        printed.add_row(line.entry.label, *best, *cells, "; ".join(notes))
    return printed


def targets(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Folders of results/ such as nvidia-h200.layers [default: all but those of a CPU]"
        ),
    ] = None,
) -> None:
    """Hold stored rows against what our kernels set out to reach on an H200: bars, figures with their intervals, and verdicts."""
    tables = rows_of(runs or stored())
    report = (
        importlib.import_module(f"moe_routing_bench.report.{name}")
        for name in ("routing_bars", "layer_bars", "reached", "format_bars")
    )
    routing, layers, reached, formats = report
    matrices = {run: matrix for run in tables if (matrix := accuracy_of(run)) is not None}
    lines = [*reached.lines((*routing.BARS, *layers.BARS), tables, True), *formats.lines(tables, matrices, True)]
    show(_bars(lines))
    print(f"{len(lines)} bars: {counts([line.verdict for line in lines])}")


def rows_of(runs: Iterable[str]) -> dict[str, Any]:
    """The rows of each run as a DataFrame, by the name of its folder. Raises `UserError` where there is none, or for what cannot be read."""
    files = {run: paths.measurements(run) for run in runs}
    if not files:
        raise bad("rows", "none in results/", "measured cells", "run `snakemake` first")
    return {run: records.frame(records.of_platform(records.read(path), run, str(path))) for run, path in files.items()}


def _bars(lines: Iterable[Any]) -> Table:
    table = Table(
        "what", "bar", "stretch", "measured, 95 % interval", "cells", "left out", "verdict", "where", box=None
    )
    for line in lines:
        table.add_row(
            line.what, line.bar, line.stretch, line.measured, line.cells, line.left_out, line.verdict, line.where
        )
    return table
