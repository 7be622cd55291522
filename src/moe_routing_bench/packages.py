"""What a measurement runs: this package and that of the kernels, whose files decide what is measured again."""

from collections.abc import Iterable
from pathlib import Path

from moe_routing_kernels import closure as files

PACKAGE = Path(__file__).parent
KERNELS = files.PACKAGE
PACKAGES = (PACKAGE, KERNELS)
COMMIT = "MOE_ROUTING_BENCH_COMMIT"  # environment variable: the commit of a tree that was copied without its history


def closure(modules: Iterable[str]) -> list[Path]:
    """The files of modules of both packages, and of all that they import from these; sorted. Raises ModuleNotFoundError for others."""
    return files.closure(modules, *PACKAGES)


def fingerprint(paths: Iterable[Path]) -> str:
    """The first 16 hex digits of SHA-256 of the content of files and of their names in these packages: a row's `code_fingerprint`."""
    return files.fingerprint(paths, *PACKAGES)[:16]
