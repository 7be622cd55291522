"""Files of a user, read within limits: regular files alone, and no more bytes or values than a file of its kind has.

A limit is checked before anything is read, because some files have no end (`/dev/zero`), never begin (a pipe without a writer), or
unpack to thousands of times their size. All refusals are `Refused`, an `OSError` whose `strerror` says why.
"""

import contextlib
import errno
import io
import json
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

MOST_TEXT = 2**24  # bytes of a config, presets, claims, a manifest; a grid of 10,000 cells has 2**21
MOST_TABLE = 2**29  # bytes of a table, packed or not
MOST_CSV = 2**26  # bytes: parsed texts take up to 15 times as much
MOST_CELLS = 2**23  # of a CSV
MOST_COLUMNS = 2**12
MOST_VALUES = 2**20  # of a JSON document, which take up to 100 bytes each
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class Refused(OSError):
    """A file that is not read; `strerror` says why."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EINVAL, why)

    def __str__(self) -> str:
        return str(self.strerror)


def check(path: Path, most: int) -> int:
    """The size in bytes of a regular file. Raises `OSError` for anything else, and for more than `most`."""
    try:
        return _size(os.stat(path), most)
    except ValueError as error:  # a null in the name
        raise Refused(str(error)) from error


def _size(state: os.stat_result, most: int) -> int:
    if not stat.S_ISREG(state.st_mode):
        kind = next((name for fits, name in _KINDS if fits(state.st_mode)), "something else")
        raise Refused(f"it is {kind}, no regular file")
    check_amount(state.st_size, most, "bytes")
    return state.st_size


def check_amount(amount: int, most: int, what: str) -> None:
    """Raise `Refused` for more than a reader takes; `what` says of what."""
    if amount > most:
        raise Refused(f"{amount} {what}, at most {most} are read")


def check_names(names: Sequence[str], what: str = "columns") -> None:
    """Raise `Refused` for several columns, or keys, of one name, of which none can be taken by it."""
    if len(set(names)) < len(names):
        name, count = Counter(names).most_common(1)[0]
        raise Refused(f"it has {count} {what} {name!r}")


@contextlib.contextmanager
def opened(path: Path, most: int) -> Iterator[BinaryIO]:
    """A regular file of at most `most` bytes, to read from. Raises `OSError`."""
    check(path, most)  # opening some devices does something
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(number, "rb") as file:
        _size(os.fstat(number), most)
        yield file


def content(path: Path, most: int = MOST_TEXT) -> bytes:
    """All bytes of a file. Raises `OSError`, also for a file of `/proc`, whose size says nothing of its content."""
    with opened(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) or b""
    if len(data) > size:
        raise Refused("it has more bytes than its size says")
    return data


def text(path: Path, most: int = MOST_TEXT) -> str:
    """The text of a UTF-8 file, with or without a mark of its encoding. Raises `OSError`, `UnicodeDecodeError`."""
    return content(path, most).decode("utf-8-sig")


def json_of(path: Path, most: int = MOST_TEXT, values: int = MOST_VALUES, pairs: Callable | None = None) -> Any:
    """The document of a JSON file; `pairs` makes an object of its names and values.

    Raises `OSError`, `ValueError` for what is no JSON, and `RecursionError`.
    """
    data = content(path, most)
    check_amount(sum(map(data.count, (b",", b"[", b"{"))), values, "values")
    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=pairs)


def csv_of(path: Path, most: int = MOST_CSV, cells: int = MOST_CELLS) -> BinaryIO:
    """The bytes of a CSV file, to be parsed. Raises `OSError`: a parser fills every line up to the length of the longest."""
    data = content(path, most)
    lines = io.BytesIO(data.replace(b"\r", b"\n"))  # parsers end lines at either
    columns = 1 + max((line.count(b",") for line in lines), default=0)
    check_amount(columns, MOST_COLUMNS, "columns")
    check_amount(columns * max(data.count(b"\n"), data.count(b"\r")), cells, "cells")
    return io.BytesIO(data)


def check_archive(file: Path | BinaryIO, most: int, name: str | None = None) -> None:
    """Raise `Refused` for a zip file that unpacks to more than `most` bytes; with `name`, of that member alone."""
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if name in (None, member.filename)]
        check_amount(sum(member.file_size for member in members), most, "bytes when unpacked")
