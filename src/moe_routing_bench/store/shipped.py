"""The project's files that come with the package (Snakefile, rules, profiles, configs): the checkout's, or the wheel's copies of them."""

import importlib.metadata
import json
import re
import shlex
from pathlib import Path

from moe_routing_bench.packages import PACKAGE

_IN_WHEEL = PACKAGE / "project"  # where pyproject.toml has a wheel put them
_NAME = "moe-routing-bench"


def installed() -> bool:
    """Whether the package comes from a wheel, and not from a checkout."""
    return _IN_WHEEL.is_dir()


def shipped(name: str | Path) -> Path:
    """One of these files or folders, by its path in the repository."""
    return (_IN_WHEEL if installed() else PACKAGE.parents[1]) / name


def own_or_shipped(path: Path) -> Path:
    """`path`, where the working directory has such a file; otherwise the one that comes with the package."""
    return path if path.is_file() else shipped(path)


def to_install(advice: str) -> str:
    """What a checkout's user is told to install, ``pip install -e '.[gpu]'``, as it is told here.

    Who has a wheel has no checkout to install in place: the extra is one of the wheel, where pip has noted where that came from.
    """
    if not installed():
        return advice
    found = next(iter(importlib.metadata.distributions(name=_NAME)), None)
    noted = found and found.read_text("direct_url.json")
    place = f" @ {json.loads(noted)['url']}" if noted else ""
    return re.sub(
        r"pip install -e '\.(\[\w+\])'", lambda extra: f"pip install {shlex.quote(_NAME + extra[1] + place)}", advice
    )
