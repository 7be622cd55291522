"""Which tests notice a new entry in a table of the package, or a new preset: those that reach code that goes through one."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

# The tables and the file that recipes add to.
TABLES = {"AXES", "BENCHES", "COLUMNS", "FIGURES", "FORMATS", "MODELS", "ROUTERS", "WEIGHTS", "ZOO"}
PRESETS = "models.yaml"
OTHER_TABLES = {
    "adaptation_rows",
    "cute_gemm",
    "evaluate",
    "layer_bars",
    "run_rows",
    "runs",
}  # modules whose tables have the same names

_IMPORTS = ast.Import | ast.ImportFrom
Definitions = dict[str, list[ast.stmt]]


def tests(path: Path) -> list[str]:
    """The tests of a file that notice a new entry, as pytest names them: what they reach goes through a table or reads the presets. None
    where the file itself does neither.

    A definition reaches what it names anywhere: as a variable, an attribute, a parameter, which may be a fixture, or in a text, as `usefixtures` has
    it; in the file itself, the `conftest.py` beside it, and modules of the tests that one of these imports. Fixtures that are used by themselves,
    and what a file does besides defining names, count for all.
    """
    modules = _modules([path, path.with_name("conftest.py")])
    definitions, going = _definitions(modules), set()
    for module in modules:
        tables = _imported(module)
        going |= {id(part) for part in module.body if _goes_through(part, tables)}
    if not any(id(part) in going for part in modules[0].body):  # it makes its rows by helpers alone
        return []
    always = [part for part in modules[0].body if not isinstance(part, _IMPORTS) and not _defined(part)]
    always += [part for parts in definitions.values() for part in parts if "autouse=True" in _decorators(part)]
    whole = any(id(part) in going for part in _reached(always, definitions))
    found = [part for part in modules[0].body if _is_test(part)]
    return [
        f"{path}::{part.name}"
        for part in found
        if whole or any(id(one) in going for one in _reached([part], definitions))
    ]


def _modules(paths: list[Path]) -> list[ast.Module]:
    """These, as far as they are there, and the modules of the tests that they import."""
    found: dict[Path, ast.Module] = {}
    while paths:
        if (path := paths.pop(0)).is_file() and path not in found:
            found[path] = ast.parse(path.read_text())
            nodes = [node for node in ast.walk(found[path]) if isinstance(node, _IMPORTS)]
            names = {
                name
                for node in nodes
                for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
            }
            paths += [
                folder / f"{name}.py"
                for name in sorted(filter(None, names))
                for folder in (path.parent, *path.parents[1:2])
            ]
    return list(found.values())


def _is_test(part: ast.stmt) -> bool:
    return isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name.lower().startswith("test")


def _decorators(part: ast.stmt) -> str:
    return " ".join(map(ast.unparse, getattr(part, "decorator_list", ())))


def _defined(part: ast.stmt) -> set[str]:
    """The names that a statement of a module defines; none of one that does something, or marks all tests."""
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return {part.name}
    if not isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return set()
    stored = (node for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in stored} - {"pytestmark"}


def _definitions(modules: Iterable[ast.Module]) -> Definitions:
    found: Definitions = defaultdict(list)
    for module in modules:
        for part in module.body:
            for name in _defined(part):
                found[name].append(part)
    return found


def _named(part: ast.AST) -> Iterator[str]:
    for node in ast.walk(part):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _reached(begin: Iterable[ast.stmt], definitions: Definitions) -> list[ast.stmt]:
    """These, and all that they reach."""
    found, waiting, seen = [], list(begin), set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            found.append(part)
            waiting += [one for name in _named(part) for one in definitions.get(name, ())]
    return found


def _imported(module: ast.Module) -> set[str]:
    """The tables that a module imports, from the packages or from another test file."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith(("moe_routing_", "test_"))]
    return {alias.name for node in ours for alias in node.names} & TABLES


def _goes_through(part: ast.stmt, tables: set[str]) -> bool:
    """Whether a statement has a table itself, or the presets: one that looks up a known entry notices no other."""
    nodes = list(ast.walk(part))
    looked_up = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}

    def whole(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and PRESETS in node.value
        if id(node) in looked_up:
            return False
        if isinstance(node, ast.Attribute):
            return node.attr in TABLES and ast.unparse(node.value) not in OTHER_TABLES
        return isinstance(node, ast.Name) and node.id in tables

    return any(map(whole, nodes))
