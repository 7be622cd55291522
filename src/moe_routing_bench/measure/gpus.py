"""Which GPU a job uses, and beside whom: jobs of a machine share its GPUs, whatever started them.

A measurement, or the timing of a training step, has its GPU alone; training runs share one. Each GPU has a lock file: a
run that shares holds one byte of it, whoever is alone holds all. These are locks of the process (fcntl.lockf), which end
with it. No torch, and nothing of CUDA before the GPU is chosen.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from moe_routing_bench.store import platforms

MOST_SHARERS = 64  # of one GPU
POLL_SECONDS = 0.05


@contextlib.contextmanager
def reserved(
    alone: bool, gpus: Sequence[str] | None = None, family: str = "", waiting: Callable[[], None] = lambda: None
) -> Iterator[str | None]:
    """Wait for a GPU, show this process no other, and yield it; None on a CPU, where nothing is waited for.

    `alone`: nobody else has it; otherwise it is the one with the fewest sharers. `gpus` are names as in
    CUDA_VISIBLE_DEVICES, by default those that this process may use. Jobs of one `family` get the same GPU whenever it is
    among them. `waiting` is called again and again while there is none.
    """
    gpus = visible() if gpus is None else gpus
    if family and len(gpus) > 1:
        gpus = [card_of(family, gpus)]
    if not gpus:
        yield None
        return
    with contextlib.ExitStack() as stack:
        files = {gpu: stack.enter_context(open(lock_file(gpu), "a")) for gpu in gpus}
        while (taken := _take(files, alone)) is None:
            waiting()
            time.sleep(POLL_SECONDS)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = taken
        try:
            yield taken
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]
            os.environ |= {} if before is None else {"CUDA_VISIBLE_DEVICES": before}


def visible() -> list[str]:
    """The GPUs that this process may use and that are of the platform, which is that of the first; empty on a CPU."""
    if platforms.current() == platforms.CPU:
        return []
    import pynvml

    pynvml.nvmlInit()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(index) for index in range(pynvml.nvmlDeviceGetCount())] if named is None else named.split(",")
    return [gpu for gpu in every if platforms.slug(platforms.name_of(gpu)) == platforms.current()]


def card_of(family: str, gpus: Sequence[str], identify: Callable[[str], str] = platforms.uuid_of) -> str:
    """The GPU that measures a family of cells: rendezvous hashing over the cards' UUIDs.

    Other cards that come or go move no family but their own, and the order or numbering of the cards does not matter.
    """
    return max(gpus, key=lambda gpu: hashlib.sha256(f"{family} {identify(gpu)}".encode()).digest())


def lock_file(gpu: str) -> Path:
    """The file whose bytes are locked by whoever uses a GPU."""
    return Path(tempfile.gettempdir()) / f"moe-routing-bench-{os.getuid()}-gpu{gpu}.lock"


def _take(files: Mapping[str, IO[Any]], alone: bool) -> str | None:
    """The name of a GPU that was free, now locked, or None; GPUs with fewer sharers first."""
    for place in (None,) if alone else range(MOST_SHARERS):
        for gpu, file in files.items():
            with contextlib.suppress(BlockingIOError, PermissionError):
                first, length = (0, MOST_SHARERS) if place is None else (place, 1)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, first)
                return gpu
    return None
