"""What other packages declare for this one: an assignment ``NAME = Class(...)`` of literals in a module of theirs.

Its reference is ``package.module:NAME``. A declaration is read from the source, and nothing of the package is run: Snakemake reads it, and
the module may import torch. Nothing but the standard library is needed.
"""

import ast
import functools
import importlib.util
import os
import re
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from moe_routing_kernels import closure
from moe_routing_kernels.errors import bad, one_line

GROUP = "moe_routing_bench.implementations"  # of entry points, whose values are references
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
REFERENCE = rf"{_NAME}(\.{_NAME})*(:{_NAME})?"


def read(reference: str, kind: type, *inner: type) -> dict[str, Any]:
    """The instances of `kind` that a module declares, or the one that the reference names, by their references.

    Arguments are literals, and instances of the `inner` classes. Raises `UserError` where there is no such module, no such declaration,
    or one that is not made of literals.
    """
    if not re.fullmatch(REFERENCE, reference):
        raise bad("plugin", reference, "package.module or package.module:NAME")
    home, _, wanted = reference.partition(":")
    form, path = f"NAME = {kind.__name__}(...) of literals", source(home, reference)
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
        found = dict(_assigned(module, {one.__name__: one for one in (kind, *inner)}, kind))
    except (SyntaxError, TypeError, ValueError) as error:
        raise bad(f"plugin {reference}", one_line(error, 200), form, "a declaration is read, not run") from error
    found = {f"{home}:{name}": one for name, one in found.items() if wanted in ("", name)}
    if not found:
        raise bad("plugin", reference, f"{form} in {path.name}")
    return found


def absolute(module: str, reference: str) -> str:
    """The absolute name of a module, or of ``module:entry``, that a declaration names: relative to its package, or nothing for its own.

    Raises `UserError` for a module of another package, or without a source.
    """
    home = reference.partition(":")[0]
    if module.startswith("."):
        package = home if source(home, reference).name == "__init__.py" else home.rpartition(".")[0]
        module = f"{package}{module}" if package else module
    module, colon, entry = module.partition(":")
    name = module or home
    if package_of(name) != package_of(home):
        hint = "wrap others, and name their package as peer"
        raise bad(f"plugin {reference}", name, f"modules of {package_of(home)}", hint)
    source(name, reference)
    return f"{name}{colon}{entry}"


def files(reference: str, modules: Iterable[str], *roots: Path) -> list[Path]:
    """The files of modules and of all that they import from their package and from the packages `roots` (none given: this one).

    Raises `UserError` for sources that cannot be parsed.
    """
    try:
        own = closure.closure(modules, _root(reference))
        return [*own, *closure.closure(closure.imported(own, *roots), *roots)]
    except (SyntaxError, ValueError) as error:
        raise bad(f"plugin {reference}", one_line(error), "Python that can be parsed") from error


def code(reference: str, modules: Iterable[str], *roots: Path) -> str:
    """The hashes of these files, as `sha256sum` prints them, and the package's version. Raises `UserError` as `files` does."""
    every = (_root(reference), *(roots or (closure.PACKAGE,)))
    named = ((closure.name(path, every), path) for path in files(reference, modules, *roots))
    return closure.file_hashes(named) + f"version {version(reference)}\n"


def version(reference: str) -> str | None:
    """The version of the installed distribution that has an entry point in the package of a reference; None where there is none."""
    package = package_of(reference)
    mine = (one.dist.version for one in _entry_points() if one.dist and package_of(one.value) == package)
    return next(mine, None)


def installed() -> list[str]:
    """The references of all entry points of installed packages."""
    return sorted({one.value for one in _entry_points()})


def package_of(name: str) -> str:
    """The package that a module, or what a reference names, is in."""
    return re.split(r"[.:]", name, maxsplit=1)[0]


def source(module: str, reference: str) -> Path:
    """The source file of a module, found without running any of its package. Raises `UserError` where there is none."""
    top, *rest = module.split(".")
    spec, name = _found(top), top
    for part in rest:
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec and spec.origin else None
    if spec is None or not str(spec.origin).endswith(".py"):
        allowed = "a module that is installed, on PYTHONPATH or in the working directory"
        raise bad(f"plugin {reference}", f"no source of {module}", allowed, "a package has an __init__.py")
    return Path(str(spec.origin))


def _root(reference: str) -> Path:
    """The folder of the package of a reference, or the file of a module that is in none."""
    origin = source(package_of(reference), reference)
    return origin.parent if origin.name == "__init__.py" else origin


@functools.cache
def _entry_points() -> tuple[metadata.EntryPoint, ...]:
    _search_here()
    return tuple(metadata.entry_points(group=GROUP))


def _assigned(module: ast.Module, classes: Mapping[str, type], kind: type) -> Iterator[tuple[str, Any]]:
    """The names and values of all assignments of an instance of `kind` at the top of a module."""
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _class(node.value, classes) is kind
        ):
            yield node.targets[0].id, _value(node.value, classes)


def _value(node: ast.expr, classes: Mapping[str, type]) -> Any:
    """What an expression of literals and instances of these classes is. Raises ValueError or TypeError for any other."""
    if isinstance(node, ast.Call) and (made := _class(node, classes)):
        named = {str(one.arg): _value(one.value, classes) for one in node.keywords}
        return made(*(_value(one, classes) for one in node.args), **named)
    return ast.literal_eval(node)


def _class(node: ast.expr, classes: Mapping[str, type]) -> type | None:
    """The class that an expression calls, by its name."""
    called = node.func if isinstance(node, ast.Call) else None
    return classes.get(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""))


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
