"""docs/routers.md says what the zoo's table says."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from moe_routing_kernels.routers import zoo

PAGE = (Path(__file__).parents[2] / "docs/routers.md").read_text()


def test_names_are_distinct_and_cells_stay_cells():
    assert len(zoo.ZOO) == len(zoo._TABLE)
    assert {line.count("|") for line in zoo.table().splitlines()} == {7}


def test_the_rules_that_do_not_learn_are_named():
    controls = re.findall("`(.+?)`", PAGE.partition("The controls (")[2].partition(")")[0])
    assert {name for name, rule in zoo.ZOO.items() if not rule.learns} == {
        name for name in zoo.ZOO for control in controls if fnmatch(name, control)
    }


def test_the_table_is_read_without_torch():
    script = "import sys; from moe_routing_kernels.routers.zoo import table; table(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_differences_name_rules():
    section = PAGE.partition("## Where a rule differs")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall("`(.+?)`", row)}
    assert named and named <= set(zoo.ZOO)
