"""The project's files that come with the package (Snakefile, rules, profiles, configs): the checkout's, or the wheel's copies of them."""

from pathlib import Path

from moe_routing_bench.closure import PACKAGE

_IN_WHEEL = PACKAGE / "project"  # where pyproject.toml has a wheel put them


def installed() -> bool:
    """Whether the package comes from a wheel, and not from a checkout."""
    return _IN_WHEEL.is_dir()


def shipped(name: str | Path) -> Path:
    """One of these files or folders, by its path in the repository."""
    return (_IN_WHEEL if installed() else PACKAGE.parents[1]) / name


def own_or_shipped(path: Path) -> Path:
    """`path`, where the working directory has such a file; otherwise the one that comes with the package."""
    return path if path.is_file() else shipped(path)
