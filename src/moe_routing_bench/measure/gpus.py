"""Which GPUs a job uses, and with which other jobs: jobs of a machine share its GPUs, whatever started them.

A measurement, or the timing of a training step, has its GPU alone; training runs share one. Each GPU has a lock file,
named by its UUID, that all users of the machine may open: a run that shares holds one byte of it, a run that is alone holds
all. These are locks of the process (fcntl.lockf), which end with it. No torch, and nothing of CUDA before the GPU is chosen.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import bad

MOST_SHARERS = 64  # of one GPU
POLL_SECONDS = 0.05
FOLDER = Path("/tmp")  # of the lock files: where every user may make one, whatever TMPDIR says
Identify = Callable[[str], str]  # of a GPU, as CUDA_VISIBLE_DEVICES has it


@contextlib.contextmanager
def reserved(
    alone: bool,
    gpus: Sequence[str] | None = None,
    family: str = "",
    waiting: Callable[[], None] = lambda: None,
    identify: Identify = platforms.uuid_of,
    cards: int = 1,
) -> Iterator[str | None]:
    """Wait for a GPU, or for so many `cards`, show this process no other, and yield it, or their names with commas between; None on a CPU,
    where nothing is waited for.

    `alone`: no other run has it; otherwise it is the one with the fewest sharers. `gpus` are names as in
    CUDA_VISIBLE_DEVICES, by default those that this process may use, at least `cards`. Jobs of one `family` get the same GPU whenever it is
    among them, if one is enough. `waiting` is called again and again while there is none.
    """
    gpus = visible() if gpus is None else gpus
    if family and len(gpus) > 1 and cards == 1:
        gpus = [card_of(family, gpus, identify)]
    if not gpus:
        yield None
        return
    with contextlib.ExitStack() as stack:
        files = {gpu: opened(lock_file(identify(gpu))) for gpu in gpus}
        for file in files.values():
            stack.callback(os.close, file)
        while (taken := _take(files, alone, cards)) is None:
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


def lacking(ranks: int | None, platform: str) -> str | None:
    """Why a cell on so many ranks cannot be measured here, or None; for a cell without ranks None."""
    if ranks is None or platform == platforms.CPU:
        return None
    cards = len(visible())
    return None if cards >= ranks else f"needs {ranks} GPUs, a card for each rank; there is {cards}"


def card_of(family: str, gpus: Sequence[str], identify: Identify = platforms.uuid_of) -> str:
    """The GPU that measures a family of cells: rendezvous hashing over the cards' UUIDs.

    Other cards that come or go move no family but their own, and the order or numbering of the cards does not matter.
    """
    return max(gpus, key=lambda gpu: hashlib.sha256(f"{family} {identify(gpu)}".encode()).digest())


def lock_file(uuid: str) -> Path:
    """The file whose bytes the users of a GPU lock."""
    return FOLDER / f"moe-routing-bench-{uuid}.lock"


def opened(path: Path) -> int:
    """A descriptor of a lock file that every user may open, which is made where there is none.

    Raises `UserError` for a link, for what is no file, and for one that this user may not open.
    """
    flags, hint = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, "remove it"
    try:
        try:
            file = os.open(path, flags)  # O_CREAT would be refused for another user's file in a sticky folder
        except FileNotFoundError:
            mask = os.umask(0)
            try:
                with contextlib.suppress(FileExistsError):  # another process has made it by now
                    os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666))
            finally:
                os.umask(mask)
            file = os.open(path, flags)
    except OSError as error:
        raise bad("lock of a GPU", str(path), "a file that all users may open", error.strerror or hint) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise bad("lock of a GPU", str(path), "a file that all users may open", hint)
    return file


def _take(files: Mapping[str, int], alone: bool, cards: int) -> str | None:
    """The names of so many GPUs that were free, now locked, or None and none locked; GPUs with fewer sharers first."""
    taken: dict[str, int] = {}
    for place in (None,) if alone else range(MOST_SHARERS):
        for gpu, file in files.items():
            with contextlib.suppress(BlockingIOError, PermissionError):
                first, length = (0, MOST_SHARERS) if place is None else (place, 1)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, first)
                taken[gpu] = file
            if len(taken) == cards:
                return ",".join(taken)
    for file in taken.values():  # two jobs that each hold one of two would wait for ever
        fcntl.lockf(file, fcntl.LOCK_UN, MOST_SHARERS, 0)
    return None
