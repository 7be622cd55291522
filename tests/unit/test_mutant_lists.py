"""The mutants made by hand, and the survivors that are accepted, are of code that is there."""

import re
from pathlib import Path

import pytest
import yaml

import planted

ROOT = Path(__file__).parents[2]
WHOLE_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)


def entries(name: str) -> list[dict[str, str]]:
    return yaml.load((ROOT / "tests" / name).read_text(encoding="utf-8"), yaml.CSafeLoader)


@pytest.mark.parametrize("name", planted.LISTS)
def test_hand_made_mutants_can_be_planted(name: str) -> None:
    """Their files have the piece that they change, once, and their tests are there."""
    mutants = entries(name)
    for mutant in mutants:
        source = (ROOT / "src/moe_routing_bench" / mutant["file"]).read_text(encoding="utf-8")
        assert source.count(mutant["old"]) == 1 and mutant["new"] != mutant["old"], mutant
        files = [ROOT / path for path in mutant["tests"].split()]
        assert all(path.is_file() for path in files), mutant
        slow = all(WHOLE_FILE.search(path.read_text(encoding="utf-8")) for path in files)
        assert "marks" in mutant or not slow, f"no test of the fast lane: {mutant}"
    assert len(mutants) >= 100


@pytest.mark.parametrize("name", planted.LISTS[1:])
def test_the_page_counts_the_mutants_of_a_stranger(name: str) -> None:
    """How many there are, and how many were killed at once."""
    mutants = entries(name)
    killed = sum("first" not in mutant for mutant in mutants)
    page = (ROOT / "docs/mutation.md").read_text(encoding="utf-8").partition(f"[{name}]")[2].partition("\n- ")[0]
    assert f"killed {killed} of {len(mutants)} ({killed / len(mutants):.0%}".replace("%", " %") in page
    assert f"The {len(mutants) - killed} survivors" in page


def test_accepted_survivors_are_of_functions_that_exist() -> None:
    """mutmut names a function `module.x_name`, a method `module.xǁClassǁname`."""
    missing = []
    for survivor in entries("mutants.yaml"):
        module, _, mangled = survivor["in"].rpartition(".")
        path = ROOT / "src" / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        name = mangled.split("ǁ")[-1] if "ǁ" in mangled else mangled.removeprefix("x_")
        if not file.is_file() or not re.search(rf"\bdef {re.escape(name)}\(", file.read_text(encoding="utf-8")):
            missing.append(survivor["in"])
    assert not missing
