"""Which files modules depend on, in a small package made for it and in ours, and the hash of files."""

import ast
import subprocess
from pathlib import Path

import pytest

import forks
from moe_routing_bench import packages
from moe_routing_kernels.closure import PACKAGE, closure, fingerprint, forget, statements
from moe_routing_kernels.closure import name as named

FILES = {
    "__init__.py": "",
    "alone.py": "import os\nimport other.thing\nfrom elsewhere import alone\n",
    "first.py": "from made.second import VALUE\n",
    "second.py": "import made.first\nVALUE = 1\n",
    "late.py": "def f():\n    if f:\n        with f:\n            from made.alone import x\n    return x\n",
    "inner/__init__.py": "from made import constants\n",
    "inner/leaf.py": "",
    "inner/near.py": "from . import leaf\nfrom .. import late\nfrom .leaf import x\n",
    "constants.py": "leaf = 1\n",
    "takes_module.py": "from made.inner import leaf\n",
    "takes_attribute.py": "from made.constants import leaf, first\n",
    "takes_dotted.py": "import made.inner.leaf as leaf\n",
    "types_only.py": "import typing\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made import first\n"
    "if typing.TYPE_CHECKING:\n    from made import first\nelse:\n    from made import constants\n",
    "guarded.py": "try:\n    from made import alone\nexcept ImportError:\n    from made import constants\n",
    "star.py": "from made.inner import *\n",
}
EXPECTED = {
    "made": ["__init__"],
    "made.alone": ["__init__", "alone"],
    "made.first": ["__init__", "first", "second"],
    "made.second": ["__init__", "first", "second"],
    "made.late": ["__init__", "alone", "late"],
    "made.inner": ["__init__", "constants", "inner/__init__"],
    "made.inner.leaf": ["__init__", "constants", "inner/__init__", "inner/leaf"],
    "made.inner.near": ["__init__", "alone", "constants", "inner/__init__", "inner/leaf", "inner/near", "late"],
    "made.takes_module": ["__init__", "constants", "inner/__init__", "inner/leaf", "takes_module"],
    "made.takes_attribute": ["__init__", "constants", "takes_attribute"],
    "made.takes_dotted": ["__init__", "constants", "inner/__init__", "inner/leaf", "takes_dotted"],
    "made.types_only": ["__init__", "constants", "types_only"],
    "made.guarded": ["__init__", "alone", "constants", "guarded"],
    "made.star": ["__init__", "constants", "inner/__init__", "star"],
}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a package named `made`."""
    for name, text in FILES.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "made"


@pytest.mark.parametrize("module", EXPECTED)
def test_files_of_a_module(made: Path, module: str) -> None:
    assert closure([module], made) == sorted(made / f"{name}.py" for name in EXPECTED[module])


def test_files_of_several_packages_are_named_with_their_package(made: Path) -> None:
    """Equal files of two packages have two names."""
    leaf, other = made / "inner/leaf.py", made.parent / "other"
    assert named(leaf, (made,)) == "inner/leaf.py" and named(leaf, (other, made)) == "made/inner/leaf.py"
    assert named(leaf, (other,)) == "leaf.py"


def test_several_modules_are_a_union(made: Path) -> None:
    names = ["made.alone", "made.takes_module"]
    assert closure(iter(names), made) == sorted({*closure(names[:1], made), *closure(names[1:], made)})
    assert closure([], made) == []


def test_an_edit_counts_once_files_are_read_anew(made: Path) -> None:
    before = closure(["made.alone"], made)
    before.clear()  # the list is the caller's own
    (made / "alone.py").write_text("import made.constants\n")
    assert closure(["made.alone"], made) == [made / "__init__.py", made / "alone.py"]
    forget()
    assert closure(["made.alone"], made) == [made / f"{name}.py" for name in ("__init__", "alone", "constants")]


@pytest.mark.parametrize("name", ["made.missing", "made.constants.leaf", "other", "made.inner.leaf.deeper"])
def test_a_module_that_is_not_there_is_an_error(made: Path, name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        closure(["made.alone", name], made)


@pytest.mark.parametrize(
    "name",
    ["moe_routing_kernels.pack.torch_pack", "moe_routing_bench.workload.skew", "moe_routing_bench.workload.row_map"],
)
def test_it_holds_what_python_loads_of_our_packages(name: str) -> None:
    """In a process that has nothing of them: modules that nothing imports by a computed name."""
    script = (
        f"import sys, {name}\n"
        "for one, module in sys.modules.items():\n"
        "    if one.split('.')[0].startswith('moe_routing'): print(module.__file__)"
    )
    words, environment = [forks.programs() / forks.PYTHON, "-c", script], forks.environment(PACKAGE.parent)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    loaded = set(map(Path, done.stdout.split()))
    assert PACKAGE / "__init__.py" in loaded and loaded <= set(packages.closure([name]))


def test_a_kernel_depends_on_no_other_operation() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in closure(["moe_routing_kernels.pack.cute_pack"])}
    assert {
        "pack/cute_pack.py",
        "pack/cute_pack_bulk.py",
        "formats/__init__.py",
    } <= names
    assert {"__init__.py", "cute/cache.py", "pack/__init__.py"} <= names
    assert {name.split("/")[0] for name in names} <= {
        *("__init__.py", "pack", "cute", "errors.py", "formats", "files.py", "closure.py", "declarations.py"),
        *("implementations.py", "target.py"),  # of the table in pack/__init__.py
    }


def test_files_of_two_packages(made: Path, tmp_path: Path) -> None:
    """A package that imports another has the files of both, and names that tell equal paths apart."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "__init__.py").write_text("from made import constants\n")
    files = closure(["other"], other, made)
    assert files == sorted([other / "__init__.py", made / "__init__.py", made / "constants.py"])
    assert closure(["other"], other) == [other / "__init__.py"]
    before = fingerprint(files, other, made)
    (other / "__init__.py").write_text((made / "__init__.py").read_text())
    (made / "__init__.py").write_text("from made import constants\n")
    assert fingerprint(files, other, made) != before


def test_fingerprint_is_of_names_and_content(made: Path, tmp_path: Path) -> None:
    files = closure(["made.first"], made)
    known = fingerprint(files, made)
    assert len(known) == 64 and fingerprint(reversed(files), made) == known
    moved = made.rename(tmp_path / "elsewhere")
    there = [moved / path.relative_to(made) for path in files]
    assert fingerprint(there, moved) == known
    (moved / "second.py").write_text("VALUE = 2\n")
    assert fingerprint(there, moved) != known
    (moved / "second.py").write_text(FILES["second.py"])
    assert fingerprint(there, moved) == known
    (moved / "second.py").rename(moved / "third.py")
    assert fingerprint([there[0], there[1], moved / "third.py"], moved) != known


def parsed(node: ast.AST) -> list[str]:
    """Every import below a node in its plain form, but those for type checkers; found by parsing the whole."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return []
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [ast.unparse(node)]
    return [text for child in ast.iter_child_nodes(node) for text in parsed(child)]


def test_imports_that_are_cut_out_are_those_that_parsing_finds() -> None:
    """For every file of the packages and of the tests, where strings hold whole programs."""
    files = [*PACKAGE.parent.rglob("*.py"), *Path(__file__).parents[1].rglob("*.py")]
    assert len(files) > 250
    for path in files:
        source = path.read_text()
        assert parsed(ast.parse(statements(source))) == parsed(ast.parse(source)), path
