"""The project's files that come with the package (Snakefile, rules, profiles, configs): the checkout's, or the wheel's copies of them."""

import importlib.metadata
import json
import os
import re
import shlex
from pathlib import Path

from moe_routing_bench.packages import COMMIT, PACKAGE

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

    A wheel has no checkout to install in place: the extra is one of the wheel, at the place that pip has noted for it.
    """
    if not installed():
        return advice
    found = next(iter(importlib.metadata.distributions(name=_NAME)), None)
    noted = found and found.read_text("direct_url.json")
    place = f" @ {json.loads(noted)['url']}" if noted else ""
    return re.sub(
        r"pip install -e '\.(\[\w+\])'", lambda extra: f"pip install {shlex.quote(_NAME + extra[1] + place)}", advice
    )


def name_commit() -> None:
    """Let this process and its jobs store in rows which commit an installed package was built from, where its wheel has recorded it.

    Git is kept from looking above the package: an environment often lies in a repository of the user's, whose commit says
    nothing about this code.
    """
    if not installed():
        return
    above = [str(PACKAGE.resolve().parent), os.environ.get("GIT_CEILING_DIRECTORIES", "")]
    os.environ["GIT_CEILING_DIRECTORIES"] = os.pathsep.join(filter(None, above))
    commit = shipped("COMMIT")
    if commit.is_file():
        os.environ[COMMIT] = commit.read_text(encoding="utf-8").strip()
