"""Files that appear whole or not at all, whatever happens while they are written."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moe_routing_kernels.errors import writing

_TRIED = 2**16  # bytes that an output takes at least, with what is written next to it


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; what it holds then takes the place of `path`, or is removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def holds(path: Path, text: str) -> bool:
    """Whether there is such a file, and its content is the text."""
    return path.is_file() and path.stat().st_size == len(text.encode()) and path.read_bytes() == text.encode()


def keep(path: Path, text: str) -> None:
    """Make the file hold the text; one that does already is not touched. Its folder must be writable."""
    if not holds(path, text):
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def check_way(path: Path) -> None:
    """Raise `UserError` for a path with a file where a folder should be. Nothing is written."""
    with writing(path), contextlib.suppress(FileNotFoundError):
        (path / "here").stat()


def check_writable(path: Path) -> None:
    """Raise `UserError`, before any work is done for it, for an output that could not be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # replacing a link to a folder would succeed
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(_TRIED))
            file.flush()
