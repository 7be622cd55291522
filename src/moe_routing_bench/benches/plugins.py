"""Implementations of other packages: declared there, measured here beside our own.

A declaration is an assignment ``NAME = Plugin(...)`` of literals in a module of that package; its reference is ``package.module:NAME``.
It is read from the source, and nothing of the package is run: Snakemake reads it, and the module may import torch. What measures it
imports its kernel as any other.
"""

import ast
import functools
import hashlib
import importlib.util
import os
import re
import site
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from moe_routing_bench import closure
from moe_routing_bench.benches.bench import Bench, Implementation, Peer, find
from moe_routing_bench.errors import bad, one_line
from moe_routing_bench.grid.job import Job

GROUP = "moe_routing_bench.implementations"  # of entry points, whose values are references
_FORM = "NAME = Plugin(bench='...', name='...', ...) of literals"
REFERENCE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?"


@dataclass(frozen=True, kw_only=True)
class Plugin(Implementation):
    """An implementation of `bench` in another package.

    `module` offers what a kernel module does: it is absolute, relative to the package of the declaration (``.kernel``), or, where it is
    not given, the module that the declaration is in. So are the modules of fused `parts`. `reference` is where it was read.
    """

    bench: str
    reference: str = ""

    @property
    def home(self) -> str:
        """The module of the declaration."""
        return self.reference.partition(":")[0]

    def place(self, bench: str) -> str:
        """The absolute name of its module."""
        return _absolute(self.module, self.home)

    def fused(self, part: str) -> str:
        """The absolute name of the module that does a part of several stages."""
        return _absolute(self.parts[part], self.home)

    def modules(self, bench: str) -> Iterator[str]:
        """No module of this package."""
        return iter(())

    def own_modules(self) -> list[str]:
        """Its modules, that of the declaration first."""
        fused = [self.fused(part) for part in self.parts if "+" in part]
        return [self.home, *([] if self.parts else [self.place(self.bench)]), *fused]

    def version(self) -> str | None:
        """The version of the installed distribution that has an entry point in this package; None where there is none."""
        mine = (one.dist.version for one in _entry_points() if one.dist and _top(one.value) == _top(self.home))
        return next(mine, None)

    def files(self) -> list[Path]:
        """The files of its modules and of all that they import from their package.

        Raises `UserError` for sources that cannot be parsed.
        """
        try:
            return closure.closure(self.own_modules(), self._root())
        except (SyntaxError, ValueError) as error:
            raise bad(f"plugin {self.reference}", one_line(error), "Python that can be parsed") from error

    def _root(self) -> Path:
        """The folder of its package, or the file of a module that is in none."""
        origin = _source(_top(self.home), self.reference)
        return origin.parent if origin.name == "__init__.py" else origin

    def code(self) -> str:
        """The hashes of its files, as `sha256sum` prints them, and the version. Raises `UserError` as `files` does."""
        root = self._root()
        named = ((path.relative_to(root.parent).as_posix(), path) for path in self.files())
        return closure.file_hashes(named) + f"version {self.version()}\n"


def installed() -> list[str]:
    """The references of all entry points of installed packages."""
    return sorted({one.value for one in _entry_points()})


@functools.cache
def read(reference: str) -> tuple[Plugin, ...]:
    """The plugins of a reference; without a name all that the module declares.

    Raises `UserError` where there is no such module, no such declaration, or one that is not made of literals.
    """
    if not re.fullmatch(REFERENCE, reference):
        raise bad("plugin", reference, "package.module or package.module:NAME")
    home, _, wanted = reference.partition(":")
    path = _source(home, reference)
    try:
        declared = _declarations(ast.parse(path.read_text(encoding="utf-8")))
        found = [replace(one, reference=f"{home}:{name}") for name, one in declared if wanted in ("", name)]
        modules = [module for one in found for module in one.own_modules()]
    except (SyntaxError, TypeError, ValueError, ImportError) as error:
        raise bad(f"plugin {reference}", one_line(error, 200), _FORM, "a declaration is read, not run") from error
    if not found:
        raise bad("plugin", reference, f"{_FORM} in {path.name}")
    for module in modules:
        if _top(module) != _top(home):
            raise bad(
                f"plugin {reference}", module, f"modules of {_top(home)}", "wrap others, and name their package as peer"
            )
        _source(module, reference)
    return tuple(found)


def by_bench(references: Iterable[str]) -> dict[str, tuple[Plugin, ...]]:
    """The plugins of references, each once, by bench."""
    found: dict[str, tuple[Plugin, ...]] = {}
    for one in {one.reference: one for reference in references for one in read(reference)}.values():
        found[one.bench] = (*found.get(one.bench, ()), one)
    return found


def bench_of(job: Job) -> Bench:
    """The bench of a job, with the plugins that it names."""
    return find(job.cell.bench, by_bench(job.plugins))


def used(bench: Bench, names: Iterable[str]) -> tuple[str, ...]:
    """The references of the plugins among implementations of a bench, and among the parts that these are made of."""
    found: set[str] = set()
    for one in map(bench.__getitem__, names):
        parts = [bench.operation(stage)[one.parts[stage.name]] for stage in bench.stages if stage.name in one.parts]
        found |= {each.reference for each in (one, *parts) if isinstance(each, Plugin)}
    return tuple(sorted(found))


def fingerprint(references: Iterable[str]) -> str | None:
    """The first 16 hex digits of the hash of the code of plugins; None without any."""
    codes = [one.code() for reference in references for one in read(reference)]
    return hashlib.sha256("".join(codes).encode()).hexdigest()[:16] if codes else None


@functools.cache
def _entry_points() -> tuple[metadata.EntryPoint, ...]:
    _search_here()
    return tuple(metadata.entry_points(group=GROUP))


def _declarations(module: ast.Module) -> Iterator[tuple[str, Plugin]]:
    """The names and values of all assignments of a `Plugin` at the top of a module."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _class(node.value) is Plugin:
            yield node.targets[0].id, _value(node.value)


def _value(node: ast.expr) -> Any:
    """What an expression of literals, `Plugin` and `Peer` is. Raises ValueError or TypeError for any other."""
    if isinstance(node, ast.Call) and (made := _class(node)):
        return made(*map(_value, node.args), **{one.arg: _value(one.value) for one in node.keywords})  # type: ignore
    return ast.literal_eval(node)


def _class(node: ast.expr) -> type | None:
    """The class that an expression calls, by its name: `Plugin` or `Peer`."""
    called = node.func if isinstance(node, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return {"Plugin": Plugin, "Peer": Peer}.get(name)


def _absolute(module: str, home: str) -> str:
    """The absolute name of a module that a declaration in `home` names."""
    if not module.startswith("."):
        return module or home
    inside = _source(home, home).name == "__init__.py"
    return importlib.util.resolve_name(module, home if inside else home.rpartition(".")[0])


def _top(module: str) -> str:
    """The package that a module, or what a reference names, is in."""
    return re.split(r"[.:]", module, maxsplit=1)[0]


def _source(module: str, reference: str) -> Path:
    """The source file of a module, found without running any of its package. Raises `UserError` where there is none."""
    top, *rest = module.split(".")
    spec, name = _found(top), top
    for part in rest:
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec and spec.origin else None
    if spec is None or not str(spec.origin).endswith(".py"):
        where = "installed, on PYTHONPATH or in the working directory"
        raise bad(
            f"plugin {reference}", f"no source of {module}", f"a module that is {where}", "a package has an __init__.py"
        )
    return Path(str(spec.origin))


def _search_here() -> None:
    """Have Python look in the working directory, last: workers and Snakemake leave it out, and all are to find the same."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _found(top: str) -> ModuleSpec | None:
    """Where a package or module is."""
    _search_here()
    if spec := _spec(top):
        return spec
    importlib.invalidate_caches()
    for folder in site.getsitepackages():  # a server may be older than an editable install
        site.addsitedir(folder)
    return _spec(top)


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module that runs and has no source, as __main__
        return None
