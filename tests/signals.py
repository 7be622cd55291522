"""Processes that tests start: which there are, and their signals."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path


def interruptible() -> None:
    """Before a program starts: a shell's background jobs ignore SIGINT, those of nohup SIGHUP, and so would their children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def commands() -> Iterator[tuple[int, str]]:
    """Every process with its command line, whose words end with a NUL each; none that ends meanwhile."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace")
