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
    peers: Annotated[bool, typer.Option("--peers", help="Judge a choice that may also be of another package")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table there; what ships is src/moe_routing_kernels/choices/choices.json"),
    ] = None,
    force: outputs.Force = False,
) -> None:
    """Make the table that `auto` chooses from of the layers in stored rows, and print the regret of its choices."""
    if out:
        outputs.check_file("--out", out, force)
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
            out.write_text(table.text(entries), encoding="utf-8")
        print(f"wrote {out}: {len(entries)} cells")


def stored() -> list[str]:
    """The folders of results with collected rows, but for those of a CPU, which git does not keep."""
    runs = sorted(path.parent.name for path in paths.results("").glob("*/measurements.parquet"))
    return [name for name in runs if name.partition(".")[0] != platforms.CPU]


def of_runs(runs: list[str]) -> list[table.Entry]:
    """The entries of all layers that were measured in these runs, one of each cell. Raises `UserError` where there is none."""
    made = importlib.import_module("moe_routing_bench.comparison.choices")
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
