"""Measured rows on their way to stdout: however a command ends, the rows of finished cells are printed, or kept in a file."""

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from moe_routing_bench import streams
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.quantities import count
from moe_routing_kernels.errors import bad, one_line

Rows = list[dict[str, Any]]
Part = tuple[Cell, Rows]  # the rows of one cell
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# In which further signals are part of the first: `timeout`, schedulers and impatient users send several.
_REPEATED_SECONDS = 1.0


class Delivery:
    """Rows that are measured and not yet printed. Rows that cannot be printed are kept in a file for temporary files."""

    def __init__(self, write: Callable[[Sequence[Part]], None], asked: int) -> None:
        """`write` prints rows on stdout; `asked` is how many cells are to be measured."""
        self._write, self._asked = write, asked
        self._waiting: list[Part] = []
        self._written = False
        self.finished, self.broken = 0, False

    def add(self, cell: Cell, rows: Rows) -> None:
        """Take the rows of a cell that is measured."""
        self._waiting.append((cell, rows))
        self.finished += 1

    def deliver(self) -> None:
        """Print the rows that wait; signals wait meanwhile. Raises BrokenPipeError, `UserError` for another fault of stdout, or what
        `write` raises: the rows are kept then."""
        with undisturbed():
            parts, self._waiting = self._waiting, []
            if self._written and not parts:
                return
            self._written = True
            try:
                self._write(parts)
                if sys.stdout:
                    sys.stdout.flush()
            except Exception as error:
                self.broken = True
                reason = str(error)
                if isinstance(error, OSError):
                    reason = error.strerror or reason
                    streams.to_nowhere()
                self.keep(f"stdout: {one_line(reason)}", [row for _, rows in parts for row in rows])
                if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                    raise bad("output", "stdout", "one that can be written", reason) from error
                raise

    def keep(self, why: str, rows: Rows) -> None:
        """Write rows as JSON to a new file, whose name stderr gets; to stderr itself where no file can be written."""
        if rows:
            text = json.dumps(rows, indent=1)
            try:
                place = _temporary(text)
            except OSError:
                print(text, file=sys.stderr)
                place = "stderr"
            print(f"{why}; kept in {place}: {count(len(rows), 'row')}", file=sys.stderr, flush=True)

    @property
    def said(self) -> str:
        """How many cells are measured, of how many."""
        return f"{self.finished} of {count(self._asked, 'cell')}"


@contextlib.contextmanager
def delivering(delivery: Delivery) -> Iterator[None]:
    """Deliver the rows of all finished cells when the block ends: by itself, by an error, by Ctrl-C, SIGTERM or SIGHUP.

    A signal ends the command, with the exit status that a shell has for it.
    """
    with _as_interrupts() as numbers:
        try:
            yield
            delivery.deliver()
        except KeyboardInterrupt:
            ending = signal.Signals([*numbers, signal.SIGINT][0])
            _deliver_last(delivery, f"ended by {ending.name}")
            raise typer.Exit(128 + ending) from None
        except Exception:
            if delivery.finished and not delivery.broken:
                _deliver_last(delivery, "ended by an error")
            raise


def _deliver_last(delivery: Delivery, why: str) -> None:
    """Deliver what there is, and say how many cells that is. Nothing ends this: not another signal, and no fault of stdout."""
    for number in _heeded():
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        delivery.deliver()
    with contextlib.suppress(OSError):
        print(f"{why}: the rows are those of {delivery.said}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end the command wait for the end of the block."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def _as_interrupts() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP do what SIGINT does, and what follows within a second does nothing; yields the list of those that have come."""
    came: list[int] = []
    process, first = os.getpid(), -math.inf

    def interrupt(number: int, frame: Any) -> None:
        nonlocal first
        if os.getpid() != process:  # a worker, which has inherited this: it ends as it would without
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if time.monotonic() < first + _REPEATED_SECONDS:
            return
        came.append(number)
        first = time.monotonic()
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not interrupt:  # the supervisor has one of its own while it forks
            handler(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _heeded()}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if came else handler)  # a process that ends has its exit status by now


def _heeded() -> list[signal.Signals]:
    """The signals that end this process: not those that it ignores, as after `nohup`. Only the main thread may ask for them."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _temporary(text: str) -> str:
    """The path of a new file with this text, whole or not at all. Raises `OSError`."""
    number, path = tempfile.mkstemp(prefix="moe-routing-bench-rows-", suffix=".json")
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError:
        os.unlink(path)
        raise
    return path
