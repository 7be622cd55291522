"""What a measurement runs: this package and that of the kernels, whose files decide what is measured again, and the packages of the extra `bench`."""

import hashlib
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_routing_kernels import closure as files

PACKAGE = Path(__file__).parent
KERNELS = files.PACKAGE
PACKAGES = (PACKAGE, KERNELS)
_RECENT_NS = 1_000_000_000  # a file that was changed so shortly before may change again without another time
INSTALL = "pip install -e src/moe_routing_kernels -e '.[bench]'"  # in a checkout; `project_files.to_install` has it for a wheel
# The modules of the extra, of which an installation without it has none.
OF_EXTRA = (
    *("torch", "pyarrow", "pandas", "numpy", "scipy", "matplotlib", "seaborn", "PIL", "jinja2", "snakemake", "nvtx"),
    *("filelock", "platformdirs"),
)
COMMIT = "MOE_ROUTING_BENCH_COMMIT"  # environment variable: the commit of a tree that was copied without its history


def closure(modules: Iterable[str]) -> list[Path]:
    """The files of modules of both packages, and of all that they import from these; sorted. Raises ModuleNotFoundError for others."""
    return files.closure(modules, *PACKAGES)


def fingerprint(paths: Iterable[Path]) -> str:
    """The first 16 hex digits of SHA-256 of the content of files and of their names in these packages: a row's `code_fingerprint`."""
    return files.fingerprint(paths, *PACKAGES)[:16]


def copied() -> bool:
    """Whether the kernels are the copy in the wheel of the benchmark, because their own distribution is not installed."""
    return KERNELS.is_relative_to(PACKAGE)


def lacking() -> list[str]:
    """The modules of the extra `bench` that are not installed. The extra pins the kernels, so a copy of them does not count."""
    absent = [name for name in OF_EXTRA if importlib.util.find_spec(name) is None]
    return [*absent, KERNELS.name] if copied() else absent


def state() -> str | None:
    """Which files of Python both packages have, and when each was changed, in hex: what depends on their content alone is the same while this is.

    None where one was changed within the last second.
    """
    states, began = [], time.time_ns()
    for entry in (entry for package in PACKAGES for entry in _sources(str(package))):
        stat = entry.stat()
        if max(stat.st_mtime_ns, stat.st_ctime_ns) > began - _RECENT_NS:
            return None
        states.append((entry.path, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino))
    return hashlib.sha256(repr(sorted(states)).encode()).hexdigest()


def _sources(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _sources(entry.path)
