"""What a process prints: in whatever encoding its streams have, no character ends it. Nor do messages that nothing takes."""

import contextlib
import io
import os
import re
import sys
from typing import Any

STDOUT, STDERR = 1, 2
# Control characters, and those that change the direction of letters or are invisible; a line's end and a tab are neither.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """A text that no terminal obeys: control characters are written as Python escapes them. Lines stay lines."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def holds_controls(text: str) -> bool:
    """Whether a name has a character that a terminal may obey, or that ends a line."""
    return bool(_CONTROL.search(text)) or "\n" in text or "\t" in text


class Unwritable(OSError):
    """stdout takes nothing: it is closed, or what it leads to is full."""


class _Results(io.FileIO):
    """Raw stdout, whose faults are told from those of files; a closed pipe stays `BrokenPipeError`."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Unwritable(error.errno, error.strerror) from error


class _Messages(io.FileIO):
    """Raw stderr, which loses what it cannot write: a message is no reason to lose what it is about."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class Plain(io.TextIOWrapper):
    """A stream of a command: names, reasons and contents of files go through it, and no terminal obeys them."""

    def write(self, text: str) -> int:
        """Write a text without control characters."""
        return super().write(plain(text))


class Styled:
    """The same stream for what makes colours and moving lines itself, and asks `plain` about every text."""

    def __init__(self, stream: Any) -> None:
        """Take a stream, `Plain` or other."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text as it is."""
        return (
            io.TextIOWrapper.write(self._stream, text) if isinstance(self._stream, Plain) else self._stream.write(text)
        )

    def __getattr__(self, name: str) -> Any:
        """What else a stream has."""
        return getattr(self._stream, name)


def guard() -> None:
    """For a command: open what its caller closed, let faults of stdout be `Unwritable`, and let stderr have none.

    Without this, messages to a closed stderr are printed on stdout, among results; and the next file that is opened is
    stdout or stderr to libraries and to workers.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a closed stdout takes nothing, rather than lose results in silence
            os.open(os.devnull, os.O_RDONLY if number == STDOUT else os.O_RDWR)
    for name, number, raw in (("stdout", STDOUT, _Results), ("stderr", STDERR, _Messages)):
        stream = getattr(sys, name)
        if stream is None or (type(stream) is io.TextIOWrapper and _descriptor(stream) == number):
            setattr(sys, name, _guarded(stream, raw(number, "wb", closefd=False)))


def _descriptor(stream: io.TextIOWrapper) -> int | None:
    """Its file descriptor; None of a stream in memory."""
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None


def _guarded(stream: io.TextIOWrapper | None, raw: io.FileIO) -> io.TextIOWrapper:
    """A stream with the encoding of another; stderr, and what a terminal shows, goes out line by line."""
    lines = raw.fileno() == STDERR or raw.isatty()
    encoding, errors, at_once = (
        (stream.encoding, stream.errors, stream.write_through) if stream else (None, "replace", False)
    )
    return Plain(io.BufferedWriter(raw), encoding, errors, line_buffering=lines, write_through=at_once)


def never_raise() -> None:
    """Let stdout and stderr replace characters that their encoding does not have, also in processes that are forked from this one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            try:
                stream.reconfigure(errors="replace")
            except OSError:
                # The warm server opened it for its log, which has positions; in its child the caller's pipe, without any, is in its place.
                setattr(sys, name, _opened_again(stream))


def _opened_again(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream with the same descriptor, which learns anew what that is."""
    raw = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115 - it lives as long as the process
    return (Plain if isinstance(stream, Plain) else io.TextIOWrapper)(
        raw, stream.encoding, "replace", line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def to_nowhere() -> None:
    """Let stdout end without an error: what it holds cannot be written."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
