"""The options of commands: those that several have, those that the table of axes makes, how all are parsed, and checks of files to be written."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes, by_hand
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.fields import NONE, decimal, words
from moe_routing_bench.grid.cell import ISOLATE, Job
from moe_routing_bench.store import paths
from moe_routing_bench.study import models
from moe_routing_kernels import files
from moe_routing_kernels.errors import bad

Platform = Annotated[str | None, typer.Option(help="Folder name of the device [default: this machine's]")]
Run = Annotated[
    str | None,
    typer.Option("--run", help="Name of a run with results and report of its own [default: none, or the config's]"),
]
Configs = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="<path>", help=f"Config file; repeat to override [default: {paths.CONFIG}]"),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE[:NAME]",
        help="Also the implementations that this module declares, or one of them; repeat. Those of entry points are always there",
    ),
]
Models = Annotated[
    Path | None, typer.Option("--models", help="File of model presets, in addition to those of the project")
]
Timeout = Annotated[
    float, typer.Option(help="Seconds without a word from the worker after which an implementation is given up")
]
ConfigJson = Annotated[str | None, typer.Option(help="A whole config as one JSON text, instead of files")]


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """How a shell completes one of these names."""
    known = tuple(names)
    return lambda incomplete: [
        name for name in known if name.startswith(incomplete)
    ]  # Typer knows the parameter by its name


def option_of(name: str) -> str:
    """The option for an axis or a setting."""
    return f"--{name.replace('_', '-')}"


def with_axes(command: Callable) -> Callable:
    """The command with an option for every axis, in place of its ``**values``. Typer reads the signature."""
    first, second, *rest = [
        parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "values"
    ]
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
    suffix = f" [default: {default}]" if default != "" else ""
    return f"{axis.summary[0].upper()}{axis.summary[1:]}{unit}{choices}{suffix}"


def asked_jobs(
    bench: str,
    implementations: Sequence[str] | None,
    settings: Mapping[str, Any],
    plugins: list[str],
    own_models: Path | None,
    values: Mapping[str, Any],
    isolate: str = ISOLATE[0],
) -> list[Job]:
    """The jobs of a bench with these settings, and `values` of options that `with_axes` made; without names all implementations of the
    bench, those of `plugins` among them. Raises `UserError`."""
    names = None if implementations is None else [name.strip() for name in implementations]
    given = {name: _read(AXES[name], value) for name, value in values.items() if value is not None}
    with by_hand.called(option_of):
        presets = models(own_models) if values["model"] or own_models else {}
        return by_hand.jobs(bench, names, given, settings, plugins, presets, isolate)


def warn_of_ignored(bench: str, options: Mapping[str, Any]) -> None:
    """Say on stderr which of the options that were given the bench does not read. A model's sizes are for all benches."""
    read = {axis.name for axis in axes.of(BENCHES[bench].axes)} | {"model"}
    ignored = [AXES[name].option for name, value in options.items() if value is not None and name not in read]
    if ignored:
        print(f"warning: {bench} does not read {', '.join(ignored)}", file=sys.stderr)


def _read(axis: Axis, value: Any) -> Any:
    """What an option holds: of an axis of lists all values, which commas or several options separate."""
    if axis.scope == "list":
        return [_one(axis, part.strip()) for text in value for part in text.split(",")]
    return _one(axis, value)


def _one(axis: Axis, value: Any) -> Any:
    if axis.kind is str or not isinstance(value, str) or (axis.optional and value == NONE):
        return value
    if (number := decimal(axis.kind, value)) is None:
        raise bad(axis.option, value, words(axis.type))
    return number


Force = Annotated[bool, typer.Option("--force", help="Overwrite an output that is there already")]
_HINT = "it is there already; --force overwrites it"


def check_file(option: str, path: Path, force: bool) -> None:
    """Raise `UserError`, before any work is done, for a file that cannot be written, or is there and may not be overwritten."""
    if taken(path) and not force and not path.is_dir():
        raise bad(option, str(path), "a new file", _HINT)
    files.check_writable(path)


def chosen(named: Path | None, default: Path, force: bool) -> Path:
    """The file to write: the one that `--out` names, as `check_file` has it, or else the project's own, which is made anew."""
    if named is not None:
        check_file("--out", named, force)
        return named
    files.check_writable(default)
    return default


def check_folder(option: str, path: Path, force: bool) -> None:
    """Raise `UserError`, before any work is done, for a folder that cannot be written, or holds files that might be overwritten."""
    if path.is_dir() and any(path.iterdir()) and not force:
        raise bad(option, str(path), "a new or an empty folder", "--force overwrites files in it")
    files.check_writable(path / "output")


def taken(path: Path) -> bool:
    """Whether there is something of that name, a link that leads nowhere included."""
    return os.path.lexists(path)
