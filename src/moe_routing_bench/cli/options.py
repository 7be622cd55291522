"""Options that several commands have."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.store import paths

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
Models = Annotated[Path | None, typer.Option("--models", help="File of model presets beside those of the project")]
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
