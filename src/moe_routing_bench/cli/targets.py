"""What our kernels set out to reach, and what stored rows say of it."""

import importlib
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli.choices import stored
from moe_routing_bench.cli.printing import show
from moe_routing_bench.cli.report import accuracy_of
from moe_routing_bench.quantities import counts
from moe_routing_bench.store import paths, records
from moe_routing_kernels.errors import bad


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
    for one in lines:
        table.add_row(one.what, one.bar, one.stretch, one.measured, one.cells, one.left_out, one.verdict, one.where)
    return table
