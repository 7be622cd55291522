"""What is said while a cell is measured by hand: how long it has taken, and about how long the rest takes."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from moe_routing_bench.cli.printing import duration

EVERY = 15.0  # seconds between two lines where stderr is no terminal
_STDERR = 2


@contextlib.contextmanager
def waited(expected: float | None) -> Iterator[None]:
    """Say on stderr how long this has taken: on a terminal in one line that changes, elsewhere in a line now and then.

    `expected` is how many seconds this and all that follows may take, where that is known.
    """
    terminal, began, over = os.isatty(_STDERR), time.monotonic(), threading.Event()
    form = "\r\033[K{}" if terminal else "{}\n"

    def tell() -> None:
        while not over.wait(1.0 if terminal else EVERY):
            taken = time.monotonic() - began
            rest = "" if expected is None else f", about {duration(max(0.0, expected - taken))} remain"
            _write(form.format(f"{taken:4.0f} s{rest}"))
        if terminal:
            _write(form.format(""))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _write(text: str) -> None:
    """Past the lock of `sys.stderr`, which a worker that is forked meanwhile would find taken."""
    with contextlib.suppress(OSError):  # nothing takes it
        os.write(_STDERR, text.encode())
