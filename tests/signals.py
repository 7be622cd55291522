"""Processes that tests start: which there are, and their signals."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path


def interruptible() -> None:
    """Before a program starts: a shell's background jobs ignore SIGINT, those of nohup SIGHUP, and so would their children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def runs(pid: int | str) -> bool:
    """Whether a process is there and has not ended: one that is not yet reaped by its parent has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def commands() -> Iterator[tuple[int, str]]:
    """Every process with its command line, whose words end with a NUL each; none that ends meanwhile."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace")
