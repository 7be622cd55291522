"""Whether the kernel has killed a process for want of memory: it counts them by cgroup, and for the whole machine."""

import resource
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_MACHINE, _MEMBERSHIP = Path("/proc/vmstat"), Path("/proc/self/cgroup")


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
