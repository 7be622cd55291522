"""Single modules of a package that cannot be imported whole."""

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from moe_routing_bench.peers.loading import Partial, Quiet, complete, file_of

SOURCES = {
    "__init__": "raise ImportError('the package needs more than is here')",
    "settings": "raise ImportError('as does this')",
    "inner/__init__": "raise ImportError('and this')",
    "inner/sums": "def total(x):\n    return sum(x)\n",
    "inner/kernel": """
from __future__ import annotations
from dataclasses import dataclass
import os.path as paths
import half_there.settings as settings
from half_there import registry
from half_there.servers import Server, register
from half_there.logs import logger_of
from other_package import twice
from .sums import total
from . import sums
from .. import named

logger = logger_of(__name__)
DEBUG = settings.DEBUG and 1


@dataclass
class Tiles:
    rows: int
    server: Server | None = None


class Client(Server):
    pass


@register(name="kernel")
def kernel(x):
    logger.info("called")
    return twice(total(x)) + named.ONE


def late():
    from half_there.inner import chosen
    return chosen()


def left_out():
    return registry.lookup("kernel")


def asked():
    return bool(settings.FAST)
""",
}
GIVEN = {
    "other_package": {"twice": lambda x: 2 * x},
    "half_there.logs": {"logger_of": lambda name: None},
    "half_there.inner": {"chosen": lambda: "chosen"},
    "half_there.named": {"ONE": 1},
    "half_there.inner.kernel": {"logger": Quiet()},
}
KERNEL, SUMS = "half_there.inner.kernel", "half_there.inner.sums"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package `half_there` whose own imports fail."""
    for name, text in SOURCES.items():
        path = tmp_path / "half_there" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "half_there"


def loaded() -> ModuleType:
    """The kernel's module."""
    return Partial("half_there", (KERNEL, SUMS), GIVEN).module(KERNEL)


@pytest.mark.usefixtures("package")
def test_a_file_runs_with_what_it_was_given() -> None:
    module = loaded()
    assert module.kernel([1, 2]) == 7 and module.late() == "chosen"
    assert module.Tiles(3).rows == 3 and issubclass(module.Client, object)
    assert module.paths is sys.modules["os.path"]


@pytest.mark.usefixtures("package")
def test_a_stand_in_that_work_depends_on_raises() -> None:
    module = loaded()
    with pytest.raises(RuntimeError, match=r"half_there\.registry\.lookup is a stand-in"):
        module.left_out()
    with pytest.raises(RuntimeError, match=r"half_there\.settings\.FAST"):
        module.asked()


def test_the_package_itself_is_not_touched(package: Path) -> None:
    before = {name for name in sys.modules if name.startswith("half_there")}
    loaded()
    assert {name for name in sys.modules if name.startswith("half_there")} == before == set()
    (package / "__init__.py").write_text("WHOLE = True")
    import half_there  # pyright: ignore[reportMissingImports]

    assert half_there.WHOLE and loaded().kernel([1]) == 3
    del sys.modules["half_there"]


def test_files_that_are_not_there(package: Path) -> None:
    assert file_of(KERNEL) == package / "inner" / "kernel.py"
    assert file_of("half_there.inner") == package / "inner" / "__init__.py"
    assert file_of("half_there.inner.lost") is None and file_of("no_such_package.inner") is None
    with pytest.raises(FileNotFoundError, match=r"inner\.lost"):
        Partial("half_there", ("half_there.inner.lost",), {}).module("half_there.inner.lost")


def test_a_file_that_fails_leaves_nothing(package: Path) -> None:
    (package / "inner" / "sums.py").write_text("raise ValueError('no sums')")
    with pytest.raises(ValueError, match="no sums"):
        loaded()
    assert not [name for name in sys.modules if "half_there" in name]


@pytest.mark.parametrize(
    ("requires", "whole"),
    [
        (None, True),
        (["torch"], True),
        (["torch==0.0.1"], False),
        (["torch>=2", "no-such-distribution"], False),
        (["torch", 'no-such-distribution; extra == "more"'], True),
    ],
)
def test_a_package_is_complete_with_all_that_it_requires(
    requires: list[str] | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert complete("half_there") == whole


def test_a_package_without_a_distribution_is_not_complete() -> None:
    assert not complete("no_such_package")
