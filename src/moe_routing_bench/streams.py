"""What a process prints: in whatever encoding its streams have, no character ends it."""

import io
import sys


def never_raise() -> None:
    """Let stdout and stderr replace characters that their encoding does not have, also in processes that are forked from this one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
