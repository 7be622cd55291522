"""What code depends on: the source files of modules and of all that they import from some packages, and a hash of them.

Imports are found by parsing, so nothing is run and nothing but the standard library is loaded. What is imported by a
name that is only known at run time (`importlib.import_module`) is not seen: its caller passes that module as well.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent
_IMPORTED_AS = {PACKAGE: __name__.partition(".")[0]}  # loaders of kernels import this package under names of their own
_STRING = re.compile(r'''("""|\'{3})(?:.|\n)*?\1''')
_TYPE_CHECKING = re.compile(r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:\n(?:\1[ \t]+.*\n|[ \t]*\n)+", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*(?:from [\w.]+ import (?:\([^)]*\)|[^\n;]+)|import [\w., ]+)", re.MULTILINE)


def closure(modules: Iterable[str], *roots: Path) -> list[Path]:
    """The files of `modules` (absolute names) and of every module that they import, directly or not; sorted.

    Only modules of the packages in the folders `roots` count (none given: of this package); of a module that is in no package, the root is
    its file. Imports inside functions do, and so do the ``__init__`` files of parent packages, because they run first; imports under
    ``if TYPE_CHECKING`` do not. Files are read once per process.

    Raises ModuleNotFoundError for one of `modules` that is in none of the packages.
    """
    return list(_closure(tuple(modules), roots or (PACKAGE,)))


@functools.cache
def _closure(modules: tuple[str, ...], roots: tuple[Path, ...]) -> tuple[Path, ...]:
    """What `closure` returns: reports ask for that of a bench once per cell."""
    found: set[Path] = set()
    waiting = list(modules)
    for name in waiting:
        if not _parents(name, roots):
            raise ModuleNotFoundError(f"{name} is no module below {', '.join(map(str, roots))}", name=name)
    while waiting:
        for path in _parents(waiting.pop(), roots):
            if path not in found:
                found.add(path)
                waiting += _imports(path, roots)
    return tuple(sorted(found))


def imported(files: Iterable[Path], *roots: Path) -> set[str]:
    """The modules of the packages `roots` that files import, which may be of another package."""
    return {name for path in files for name in _imports(path, roots or (PACKAGE,))}


def fingerprint(files: Iterable[Path], *roots: Path) -> str:
    """SHA-256, in hex, of the content of files and of their `name` below `roots`.

    The order of the files does not matter, and neither does the folder that a package is in.
    """
    named = {name(path, roots or (PACKAGE,)): path for path in files}
    return hashlib.sha256(file_hashes(sorted(named.items())).encode()).hexdigest()


@functools.cache
def name(path: Path, roots: tuple[Path, ...]) -> str:
    """A file's path below its root, of several with the name of the package in front; the name of a file that is below none."""
    found = next((root for root in roots if path.is_relative_to(root)), None)
    if found is None:
        return path.name
    return path.relative_to(found if len(roots) == 1 else found.parent).as_posix()


def file_hashes(named: Iterable[tuple[str, Path]]) -> str:
    """What `sha256sum` prints for files, under the names given."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in named)


def forget() -> None:
    """Read files anew from now on, which a program asks for that outlives their edits."""
    for cached in (_closure, _parents, _imports):
        cached.cache_clear()


@functools.cache
def _parents(name: str, roots: tuple[Path, ...]) -> tuple[Path, ...]:
    """The files that importing a module runs, outermost package first; none where no package has such a module."""
    first, *rest = name.split(".")
    root = next((root for root in roots if first in (root.stem, _IMPORTED_AS.get(root))), None)
    if root is None:
        return ()
    path, files = root, [root / "__init__.py" if root.is_dir() else root]
    for part in rest:
        path = path / part
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            return ()
        files.append(file)
    return tuple(files)


@functools.cache
def _imports(path: Path, roots: tuple[Path, ...]) -> tuple[str, ...]:
    """The modules of the packages that a file imports, by absolute name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(statements(path.read_text(encoding="utf-8")), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, path, roots)
            # What follows `import` may be a module or an attribute of one: it is a module where there is a file for it.
            inner = {f"{base}.{alias.name}" for alias in node.names}
            names |= {base} | {name for name in inner if _parents(name, roots)}
    return tuple(sorted(name for name in names if _parents(name, roots)))


def _base(node: ast.ImportFrom, path: Path, roots: tuple[Path, ...]) -> str:
    """The absolute name of the module that a `from` statement names."""
    if not node.level:
        return node.module or ""
    folder = path.parents[node.level - 1]
    root = next((root for root in roots if folder.is_relative_to(root)), None)
    if root is None:
        return ""  # it is in another package
    above = [root.name, *folder.relative_to(root).parts]
    return ".".join([*above, *filter(None, [node.module])])


def statements(source: str) -> str:
    """The import statements of a module, one after the other, but for those that only a type checker sees.

    They are cut out by their looks, because parsing whole files takes longer than the rest of a measurement's overhead; a
    test holds the result for every file of this package to that of parsing.
    """
    code = _TYPE_CHECKING.sub("", _STRING.sub("", source))
    return "".join(f"{found[0].strip()}\n" for found in _IMPORT.finditer(code))
