"""Why an implementation failed: what it raised, as a status and one line with its place, and whether the kernel killed it for want of memory.

The kernel counts the processes that it kills by cgroup, and for the whole machine.
"""

import resource
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from moe_routing_bench.packages import PACKAGES
from moe_routing_kernels.errors import one_line

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# In errors of torch and of CUDA, of system calls, of the dynamic loader and of C++ below a limit of memory.
_OF_MEMORY = (
    *("not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("Cannot allocate memory", "cannot allocate memory", "failed to map segment", "bad_alloc"),
)
CGROUPS = Path("/sys/fs/cgroup")
_MACHINE, _MEMBERSHIP = Path("/proc/vmstat"), Path("/proc/self/cgroup")


def described(error: BaseException) -> tuple[str, str]:
    """The status of an implementation that raised this, `out_of_memory` or `crashed`, and the reason."""
    text = with_place(error)
    kinds = {
        kind.__name__ for kind in type(error).__mro__
    }  # torch, which has one, could not be imported for want of memory
    memory = kinds & {"MemoryError", "OutOfMemoryError"} or any(part in text for part in _OF_MEMORY)
    return "out_of_memory" if memory else "crashed", text


def with_place(error: BaseException) -> str:
    """An error and its place in one line."""
    return one_line(f"{type(error).__name__}: {error} ({_place(error)})", 300)


def _place(error: BaseException) -> str:
    """File and line where the project's code, or code of no library, was last: an error inside torch is the fault of its caller."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = set(PACKAGES)
    relevant = [
        frame
        for frame in frames
        if not ours.isdisjoint(Path(frame.filename).parents) or not frame.filename.startswith(_LIBRARIES)
    ]
    last = (relevant or frames)[-1]
    path = Path(last.filename)
    shown = next((path.relative_to(package.parent) for package in PACKAGES if package in path.parents), path)
    return f"{shown}:{last.lineno}"


class MemoryKills:
    """Processes of this cgroup that were killed since this object was made; of the machine, where its cgroup has no count."""

    def __init__(self) -> None:
        """Count from now."""
        self._file = next((path for path in _of_cgroup() if _count(path) is not None), _MACHINE)
        self._before = _count(self._file)

    def any(self) -> bool:
        """Whether there were some."""
        return self._before is not None and (_count(self._file) or 0) > self._before


def limited() -> bool:
    """Whether a process may use only so many addresses (`ulimit -v`): below that, libraries end it in ways of their own."""
    return any(
        resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    )


def _of_cgroup() -> Iterator[Path]:
    """The files that may have the count of this process's cgroup, of version 2 or 1; a container sees its own group as the root."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = CGROUPS / "memory" if controllers else CGROUPS
            name = "memory.oom_control" if controllers else "memory.events"
            yield from dict.fromkeys((root / path.lstrip("/") / name, root / name))


def _count(path: Path) -> int | None:
    """The number after `oom_kill`; None where the file has none."""
    try:
        words = [line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
        return next(int(words[1]) for words in words if words[:1] == ["oom_kill"])
    except (OSError, StopIteration, IndexError, ValueError):
        return None
