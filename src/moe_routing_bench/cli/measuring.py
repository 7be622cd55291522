"""One cell that is measured by hand. Its options are the axes of the grid."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench import files
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import progress
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config import presets
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.config.expand import config_of, expand
from moe_routing_bench.config.load import load
from moe_routing_bench.errors import bad, pick
from moe_routing_bench.fields import NONE, words
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.store import paths


def _with_axes(command: Callable) -> Callable:
    """The command with an option for every axis, in place of its ``**values``. Typer reads the signature."""
    first, second, *rest = [one for one in inspect.signature(command).parameters.values() if one.name != "values"]
    command.__signature__ = inspect.Signature([first, second, *map(_option, AXES.values()), *rest])  # type: ignore
    return command


def _option(axis: Axis) -> inspect.Parameter:
    """An option that is None where it is not given; what may be a number or none is read as text."""
    kind = str if axis.optional else axis.kind
    annotation = Annotated[kind | None, typer.Option(help=_help(axis), show_default=False)]
    return inspect.Parameter(axis.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(axis: Axis) -> str:
    unit = f" ({axis.unit})" if axis.unit else ""
    choices = f": {' | '.join(axis.choices)}" if axis.choices else ""
    default = axis.default if axis.typical is None else axis.typical
    if default is None:
        default = f"as {axis.follows}" if axis.follows else NONE if axis.kind is not str else ""
    said = f" [default: {default}]" if default != "" else ""
    return f"{axis.summary[0].upper()}{axis.summary[1:]}{unit}{choices}{said}"


@_with_axes
def measure(
    bench: Annotated[str, typer.Argument(help=" | ".join(BENCHES))],
    *,
    implementations: Annotated[
        str | None, typer.Option(help="Comma-separated names [default: all of the bench]")
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Sampling time")] = Settings.max_seconds,
    min_blocks: Annotated[int, typer.Option(help="Least blocks of samples")] = Settings.min_blocks,
    mode: Annotated[str, typer.Option(help="warm (a server that has imported torch) | cold")] = "cold",
    out: Annotated[Path | None, typer.Option(help="Also write the rows to this Parquet file")] = None,
    **values: Any,
) -> None:
    """Measure one cell by hand and print its rows.

    Exit status: 0 where every row is ok or unsupported, 1 where an implementation crashed, hung, was wrong or ran out of memory, 2 for a
    mistake in the options.
    """
    pick("bench", bench, BENCHES)
    pick("mode", mode, ("warm", "cold"))
    asked = config_of(bench, _values(values))
    if implementations is not None:
        asked["grid"][0]["implementations"] = [
            pick(f"implementation of {bench}", name.strip(), [one.name for one in BENCHES[bench].implementations])
            for name in implementations.split(",")
        ]
    most_blocks = max(min_blocks, Settings.max_blocks)
    asked["measure"] = {"max_seconds": max_seconds, "min_blocks": min_blocks, "max_blocks": most_blocks}
    if out:
        files.check_writable(out)
    (job,) = expand(load(asked), presets.load(paths.MODELS) if values["model"] else {})
    rows = importlib.import_module("moe_routing_bench.measure.supervisor").measure(job, out, mode)
    show(_results(job.cell, rows))
    if out:
        print(f"wrote {out}")
    if wrong := progress.unwell(rows):
        print(f"{len(wrong)} of {len(rows)} implementations failed", file=sys.stderr)
        raise typer.Exit(1)


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, and typical values of axes that have no default. A trace is for the sampler that reads it;
    a model gives its own values."""
    given = {name: _read(AXES[name], value) for name, value in options.items() if value is not None}
    if "trace" in given:
        given = {"sampler": "trace"} | given
    typical = {axis.name: axis.typical for axis in AXES.values() if axis.typical is not None}
    if "model" in given:
        typical = {name: value for name, value in typical.items() if not AXES[name].preset}
    return typical | given


def _read(axis: Axis, value: Any) -> Any:
    if not axis.optional or axis.kind is str or value == NONE:
        return value
    try:
        return axis.kind(value)
    except ValueError:
        raise bad(f"--{axis.name.replace('_', '-')}", value, words(axis.type)) from None


def _results(cell: Cell, rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "implementation", "status", "median us", "95 % CI us", "GB/s", "speed-up", "reason",
        title=f"{cell.bench} {cell.key}", title_justify="left", box=None,
    )  # fmt: skip
    for row in rows:
        interval = "" if row.get("ci_low_us") is None else f"{row['ci_low_us']:.2f} to {row['ci_high_us']:.2f}"
        numbers = [_number(row.get(name)) for name in ("median_us", "gb_per_s", "speedup")]
        table.add_row(row["implementation"], row["status"], numbers[0], interval, *numbers[1:], row.get("reason") or "")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
