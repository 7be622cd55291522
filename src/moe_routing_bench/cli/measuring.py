"""Cells that are measured by hand. The options are the axes of the grid."""

import importlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench import files
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import measured, profiling, progress, waiting
from moe_routing_bench.cli.asked import models, references
from moe_routing_bench.cli.options import Models, Plugins, among, option_of
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config import axes, by_hand
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.errors import bad, pick
from moe_routing_bench.fields import NONE, words
from moe_routing_bench.grid.job import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.quantities import count


def with_axes(command: Callable) -> Callable:
    """The command with an option for every axis, in place of its ``**values``. Typer reads the signature."""
    first, second, *rest = [one for one in inspect.signature(command).parameters.values() if one.name != "values"]
    command.__signature__ = inspect.Signature([first, second, *map(_option, AXES.values()), *rest])  # type: ignore
    return command


def _option(axis: Axis) -> inspect.Parameter:
    """An option that is None where it is not given. An axis of a grid's lists takes several values: a sweep."""
    several = axis.scope == "list"
    kind = list[str] if several else str if axis.optional else axis.kind
    name = {int: "INTEGER", float: "FLOAT", str: "TEXT"}[axis.kind]
    option = typer.Option(
        help=_help(axis),
        show_default=False,
        metavar=f"{name}[,...]" if several else name,
        autocompletion=among(axis.choices),
    )
    return inspect.Parameter(
        axis.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(axis: Axis) -> str:
    unit = f" ({axis.unit})" if axis.unit else ""
    choices = f": {' | '.join(axis.listed)}" if axis.choices else ""
    default = axis.default if axis.typical is None else axis.typical
    if default is None:
        default = f"as {axis.follows}" if axis.follows else NONE if axis.kind is not str else ""
    said = f" [default: {default}]" if default != "" else ""
    return f"{axis.summary[0].upper()}{axis.summary[1:]}{unit}{choices}{said}"


@with_axes
def measure(
    bench: Annotated[str, typer.Argument(help=f"Operation: {' | '.join(BENCHES)}", autocompletion=among(BENCHES))],
    *,
    implementations: Annotated[
        str | None, typer.Option(help="Comma-separated names [default: all of the bench]")
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Sampling time")] = Settings.max_seconds,
    min_blocks: Annotated[int, typer.Option(help="Least blocks of samples")] = Settings.min_blocks,
    cpu_threads: Annotated[int, typer.Option(help="Threads of torch on a CPU")] = Settings.cpu_threads,
    mode: Annotated[
        str, typer.Option(help="What measures: cold (a process of its own) | warm (a server that has imported torch)")
    ] = "cold",
    plugin: Plugins = None,
    own: Models = None,
    out: Annotated[Path | None, typer.Option(help="Also write the rows of one cell to this Parquet file")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also profile one cell: prints operators, and keeps them and Chrome traces in this folder"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns of the rows as one JSON list")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns of the rows as CSV")] = False,
    **values: Any,
) -> None:
    """Measure the implementations of an operation side by side for one set of sizes (a cell), or for several: --tokens 64,128.

    Exit status: 0 where every row is ok or unsupported, 1 where an implementation crashed, hung, was wrong or ran out of memory, 2 for a
    mistake in the options.
    """
    pick("--mode", mode, ("warm", "cold"))
    if as_json and as_csv:
        raise bad("--csv", "together with --json", "one of them")
    settings = {"max_seconds": max_seconds, "min_blocks": min_blocks, "cpu_threads": cpu_threads}
    names = None if implementations is None else implementations.split(",")
    jobs = asked_jobs(bench, names, settings, references(plugin), own, values)
    for option, path in (("--out", out), ("--profile", profile)):
        if path and len(jobs) > 1:
            raise bad(option, f"{len(jobs)} cells", "one cell", "--json and --csv print the rows of several")
    if out:
        files.check_writable(out)
    if profile:
        files.check_writable(profile / profiling.TABLE)
    warn_of_ignored(bench, values)
    print(f"torch computes with {count(cpu_threads, 'CPU thread')}", file=sys.stderr)
    rows = _measured(jobs, out, mode, tables=not (as_json or as_csv))
    if as_json:
        measured.write_json(rows)
    if as_csv:
        measured.write_csv(rows)
    if out:
        print(f"wrote {out}", file=sys.stderr if as_json or as_csv else sys.stdout)
    if profile:
        profiling.profiled(jobs[0], rows, profile, tables=not (as_json or as_csv))
    if wrong := progress.unwell(rows):
        print(f"{len(wrong)} of {len(rows)} rows are of implementations that failed", file=sys.stderr)
        raise typer.Exit(1)


def asked_jobs(
    bench: str,
    implementations: Sequence[str] | None,
    settings: Mapping[str, Any],
    plugins: list[str],
    own_models: Path | None,
    values: Mapping[str, Any],
) -> list[Job]:
    """The jobs of a bench with these settings, and `values` of options that `with_axes` made; without names all implementations of the
    bench, those of `plugins` among them. Raises `UserError`."""
    names = None if implementations is None else [name.strip() for name in implementations]
    given = {name: _read(AXES[name], value) for name, value in values.items() if value is not None}
    with by_hand.called(option_of):
        return by_hand.jobs(bench, names, given, settings, plugins, models(own_models) if values["model"] else {})


def _measured(jobs: Sequence[Job], out: Path | None, mode: str, tables: bool) -> list[dict[str, Any]]:
    """The rows of all jobs, each job announced on stderr; its table is printed when it is done."""
    supervisor = importlib.import_module("moe_routing_bench.measure.supervisor")
    baselines = importlib.import_module("moe_routing_bench.comparison.baselines")
    rows, began = [], time.monotonic()
    for number, job in enumerate(jobs, 1):
        expected = (time.monotonic() - began) / (number - 1) * (len(jobs) - number + 1) if number > 1 else None
        names = ", ".join(job.implementations)
        print(f"cell {number} of {len(jobs)}: {job.cell.bench} {job.cell.key}: {names}", file=sys.stderr, flush=True)
        with waiting.waited(expected):
            found = baselines.against_dequantised(supervisor.measure(job, out, mode))
        rows += found
        if tables:
            show(measured.results(job.cell, found))
    return rows


def warn_of_ignored(bench: str, options: Mapping[str, Any]) -> None:
    """Say on stderr which of the options that were given the bench does not read. A model's sizes are for all benches."""
    read = {axis.name for axis in axes.of(BENCHES[bench].axes)} | {"model"}
    ignored = [AXES[name].option for name, value in options.items() if value is not None and name not in read]
    if ignored:
        print(f"warning: {bench} does not read {', '.join(ignored)}", file=sys.stderr)


def _read(axis: Axis, value: Any) -> Any:
    """What an option holds: of an axis of lists all values, which commas or several options separate."""
    if axis.scope == "list":
        return [_one(axis, one.strip()) for text in value for one in text.split(",")]
    return _one(axis, value)


def _one(axis: Axis, value: Any) -> Any:
    if axis.kind is str or (axis.optional and value == NONE):
        return value
    try:
        return axis.kind(value)
    except ValueError:
        raise bad(axis.option, value, words(axis.type)) from None
