"""What a process prints: in whatever encoding its streams have, no character ends it."""

import io
import sys


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
