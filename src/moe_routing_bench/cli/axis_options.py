"""Options for the axes of the grid, and the cells that they ask for."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli.asked import models
from moe_routing_bench.cli.options import among, option_of
from moe_routing_bench.config import axes, by_hand
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.fields import NONE, words
from moe_routing_bench.grid.job import Job
from moe_routing_kernels.errors import bad


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
