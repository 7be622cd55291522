"""The table that `auto` chooses from, made of stored rows, and what its choices cost."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli import outputs
from moe_routing_bench.cli.printing import show
from moe_routing_bench.quantities import us
from moe_routing_bench.store import paths, platforms, records
from moe_routing_kernels.choices import table
from moe_routing_kernels.errors import bad, writing


def choices(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Folders of results/ such as nvidia-h200.layers [default: all but those of a CPU]"
        ),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Judge a choice that may also be a package of somebody else")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table there; what ships is src/moe_routing_kernels/choices/choices.json"),
    ] = None,
    force: outputs.Force = False,
) -> None:
    """Make the table that `auto` chooses from of the layers in stored rows, and print the regret of its choices."""
    if out:
        outputs.check_file("--out", out, force)
    found = of_runs(runs or stored())
    regret = importlib.import_module("moe_routing_bench.comparison.regret")
    lines = regret.lines(found, found, peers)
    show(_printed(lines))
    for one in regret.summaries(lines):
        print(f"{one.what}: {_said(one)}, {'within' if one.met else 'beyond'} the bar")
    print(
        f"bar: mean {regret.MEAN_BAR:.0%}, worst {regret.WORST_BAR:.0%}; suspect cells: {sum(one.suspect for one in lines)} of {len(lines)}"
    )
    if fixed := regret.always(lines):
        print(f"always the same, at best: {fixed[0].what}: {_said(fixed[0])}")
    if out:
        with writing(out):
            out.write_text(table.text(found), encoding="utf-8")
        print(f"wrote {out}: {len(found)} cells")


def stored() -> list[str]:
    """The folders of results with collected rows, but for those of a CPU, which git does not keep."""
    found = sorted(path.parent.name for path in paths.results("").glob("*/measurements.parquet"))
    return [name for name in found if name.partition(".")[0] != platforms.CPU]


def of_runs(runs: list[str]) -> list[table.Entry]:
    """The entries of all layers that were measured in these runs, one of each cell. Raises `UserError` where there is none."""
    made = importlib.import_module("moe_routing_bench.comparison.choices")
    found = made.fullest(entry for run in runs for entry in made.entries(_rows(run), run))
    made.check_cards(found)
    if not found:
        raise bad(
            "layers with a time", f"none in {', '.join(runs) or 'results/'}", "rows of the bench layer that are ok"
        )
    return found


def _rows(run: str) -> Any:
    path = paths.measurements(run)
    return records.frame(records.of_platform(records.read(path), run, str(path)))


def _said(one: Any) -> str:
    return f"mean {one.mean:.1%}, worst {one.worst:.1%} over {one.cells} cells"


def _printed(lines: list[Any]) -> Table:
    """What is chosen for every cell, in the table and left out, and the regret against the best candidate and the best of all."""
    printed = Table("cell", "best candidate", "best", "chosen", "regret", "left out", "regret", "", box=None)
    for line in lines:
        times, cells = line.entry.times, []
        for one in line.choices:
            cells += [one.name, f"{one.own:.1%} ({one.all:.1%})"]
        notes = [*line.unmeasured, *dict.fromkeys(line.entry.suspect.values())]
        best = [f"{name} {us(times[name])}" for name in (line.best_own, line.best)]
        printed.add_row(line.entry.label, *best, *cells, "; ".join(notes))
    return printed
