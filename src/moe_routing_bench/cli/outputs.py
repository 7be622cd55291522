"""Files that a command writes where its user says: none that is there already is lost."""

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_kernels import files
from moe_routing_kernels.errors import bad

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
