"""What a process prints: in whatever encoding its streams have, no character ends it. Nor do messages that nothing takes."""

import contextlib
import io
import os
import sys
from typing import Any

STDOUT, STDERR = 1, 2


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
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines, write_through=at_once)


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
    return io.TextIOWrapper(
        raw, stream.encoding, "replace", line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def to_nowhere() -> None:
    """Let stdout end without an error: what it holds cannot be written."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
