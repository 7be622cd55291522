"""Which source files results depend on, as Snakemake names them, and their hashes."""

import os
from collections.abc import Iterable
from pathlib import Path

from moe_routing_bench.benches.bench import find
from moe_routing_bench.packages import PACKAGE, closure
from moe_routing_kernels.closure import file_hashes


def named(files: Iterable[Path]) -> list[str]:
    """Files of our packages as Snakemake should name them, sorted: relative where they lie below the working directory."""
    here = Path.cwd().resolve()
    return sorted(os.path.relpath(path, here) if path.is_relative_to(here) else str(path) for path in files)


def source(relative: str, of: Path = PACKAGE) -> str:
    """One file of a package, by its path below it."""
    return named([of.resolve() / relative])[0]


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
    """All files of the given folders of this package."""
    return named({p for f in folders for p in (PACKAGE.resolve() / f).rglob("*") if p.suffix in suffixes})


def code_files(bench: str) -> list[str]:
    """Every source file whose edit makes the measurements of a bench stale."""
    return named(path.resolve() for path in find(bench).code_files())


def drawn_with(module: str) -> list[str]:
    """Every source file that a figure or the report is made with: the closure of a module of this package.

    Not the table of figures: what it says of one figure is a parameter of that figure's rule.
    """
    files = closure([f"moe_routing_bench.{module}"])
    return named(path.resolve() for path in files if path != PACKAGE / "figures/__init__.py")


def code_hashes(files: Iterable[str]) -> str:
    """What `sha256sum` prints for files: to compare two of them says which file made results stale."""
    return file_hashes((name, Path(name)) for name in files)
