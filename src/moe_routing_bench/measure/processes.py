"""Processes of a job: a worker ends with its supervisor, and what an implementation starts ends with the worker. Linux alone."""

import contextlib
import ctypes
import glob
import os
import signal
import threading
import time
from collections.abc import Iterator

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of prctl


def adopt() -> None:
    """From now on the orphans among this process's descendants become its children, whatever session they are in."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Collect interrupts in place of raising them: Python swallows one that comes in what it runs around a fork, as `logging` has it do."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def end_with(parent: int) -> None:
    """Have this process, which `parent` has just forked, killed when that ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before this was asked for
        os._exit(1)


def offspring() -> set[int]:
    """The children of this process, ended ones included."""
    pids: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:  # the thread has ended
            pids.update(map(int, file.read().split()))
    return pids


def busy_seconds(pid: int) -> float:
    """How long a process has computed so far; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def sweep(known: set[int], seconds: float) -> set[int]:
    """Kill all children but the `known` ones, and what these leave to this process in turn; returns which there were.

    Gives up after so many seconds on what no signal ends.
    """
    pids: set[int] = set()
    deadline = time.monotonic() + seconds
    while (left := offspring() - known) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
        pids |= left
    return pids


def status(code: object) -> int:
    """The exit status that Python gives to what `sys.exit` was called with."""
    return int(code or 0) & 0xFF if code is None or isinstance(code, int) else 1
