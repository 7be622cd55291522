"""The project's files: those that come with the package, the checkout's or a wheel's copies, and the sources that results depend on."""

import functools
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_routing_bench.packages import COMMIT, INSTALL, KERNELS, PACKAGE, closure, copied, lacking
from moe_routing_kernels import guarded
from moe_routing_kernels.closure import file_hashes
from moe_routing_kernels.errors import bad

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


ROWS, ROWS_FORM = "answers.json.gz", 1  # what a wheel has of published rows, in its results folder


@functools.lru_cache(maxsize=4)
def published_rows(path: Path) -> Mapping[str, Any]:
    """The rows and notes of each run in a file that `answers.stored.packed` made. Raises `UserError` if the file is damaged, too large or of another form."""
    try:
        with gzip.open(io.BytesIO(guarded.content(path)), "rb") as file:
            text = file.read(guarded.MOST_CSV + 1)
        guarded.check_amount(len(text), guarded.MOST_CSV, "bytes")
        content = json.loads(text)
        form, found = content["form"], content["runs"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise bad(
            "published rows", str(path), "a file of rows of this package", f"install it again ({error})"
        ) from error
    if form != ROWS_FORM:
        raise bad(f"form of {path}", form, f"{ROWS_FORM}", "it is of another version of the package")
    return found


@functools.lru_cache(maxsize=4)
def fits_parquet(path: Path) -> bool:
    """Whether such a file was made of exactly the published runs (those with a manifest) next to it."""
    made_of = {run: about["parquet"] for run, about in published_rows(path).items()}
    files = {one.parent.name: one.with_name("measurements.parquet") for one in path.parent.glob("*/manifest.yaml")}
    found = {run: file for run, file in files.items() if file.is_file()}
    return made_of == {run: hashlib.sha256(file.read_bytes()).hexdigest() for run, file in found.items()}


def to_install(advice: str) -> str:
    """What a checkout's user is told to install, ``pip install -e '.[gpu]'``, as it is told here.

    A wheel has no checkout to install in place: the extra is one of the wheel, at the place that pip has noted for it. All extras
    need the kernels, which are found there, too, unless they are installed.
    """
    if not installed():
        return advice
    import importlib.metadata

    distribution = next(iter(importlib.metadata.distributions(name=_NAME)), None)
    noted = distribution and distribution.read_text("direct_url.json")
    place, kernels = _places(json.loads(noted)) if noted else ("", [])
    words = ["pip", "install", *(kernels if copied() else [])]
    return re.sub(
        r"pip install (?:-e src/moe_routing_kernels )?-e '\.(\[\w+\])'",
        lambda extra: shlex.join([*words, _NAME + extra[1] + place]),
        advice,
    )


def check_extra(what: str) -> None:
    """Raise `UserError` where packages of the extra `bench`, which `what` needs, are not installed."""
    if absent := lacking():
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise bad(f"packages for {what}", f"no {', '.join(absent[:3])}{more}", "the extra bench", to_install(INSTALL))


def _places(noted: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Where the installed benchmark comes from, for a requirement, and the words that let pip find the kernels of the same source."""
    url = noted["url"]
    if vcs := noted.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
        kernels = f"{url}#subdirectory=src/{KERNELS.name}"
    elif "dir_info" in noted:
        kernels = f"{url}/src/{KERNELS.name}"
    else:  # a wheel, which the wheel of the kernels lies next to
        return f" @ {url}", ["--find-links", url.rpartition("/")[0]]
    return f" @ {url}", [f"moe-routing-kernels @ {kernels}"]


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


def named(files: Iterable[Path]) -> list[str]:
    """Files of our packages as Snakemake should name them, sorted: relative where they lie below the working directory."""
    here = Path.cwd().resolve()
    return sorted(_named(path, here) for path in files)


@functools.cache
def _named(path: Path, here: Path) -> str:
    """One of them: forty figures are drawn with the same files."""
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)


_resolved = functools.cache(Path.resolve)


def source(relative: str, of: Path = PACKAGE) -> str:
    """One file of a package, by its path below it."""
    return named([of.resolve() / relative])[0]


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
    """All files of the given folders of this package."""
    return named({p for f in folders for p in (PACKAGE.resolve() / f).rglob("*") if p.suffix in suffixes})


def code_files(bench: str) -> list[str]:
    """Every source file whose edit makes the measurements of a bench stale."""
    from moe_routing_bench.benches.bench import find  # every command imports this module

    return named(path.resolve() for path in find(bench).code_files())


def drawn_with(module: str) -> list[str]:
    """Every source file that a figure or the report is made with: the closure of a module of this package.

    Not the table of figures: what it says of one figure is a parameter of that figure's rule.
    """
    files = closure([f"moe_routing_bench.{module}"])
    return named(_resolved(path) for path in files if path != PACKAGE / "figures/__init__.py")


def code_hashes(files: Iterable[str]) -> str:
    """What `sha256sum` prints for files: to compare two of them says which file made results stale."""
    return file_hashes((name, Path(name)) for name in files)
