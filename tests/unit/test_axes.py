"""A new axis is one line of the table: everything that differs between cells is derived from it."""

import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings

PACKAGE = Path(__file__).parents[2] / "src/moe_routing_bench"
LINE = '    Axis("rotation", int, "quarters by which rows are turned", "workload", prefix="rot", default=0, least=0, most=3),\n'
BENCH = '''"""turn: rows are turned."""

from moe_routing_bench.benches.bench import Bench, Implementation

BENCH = Bench("turn", "rows -> turned rows", ("tokens", "rotation"), "torch", (Implementation("torch", "torch_turn"),))
'''
SEEN = """
import inspect, json, sys
import yaml
from moe_routing_bench.cli.measure import measure
from moe_routing_bench.config import axes, sections
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.store import records

cells = {name: cell_of(name, **values) for name, values in json.loads(sys.argv[1]).items()}
turned = cell_of("turn", tokens=4, rotation=3)
entry = yaml.safe_load(sections.text())["$defs"]["GridEntry"]["properties"]
print(json.dumps({
    "specs": {name: Job(cell, ("torch",), Settings()).spec for name, cell in cells.items()},
    "key": turned.key, "default": cell_of("turn", tokens=4).rotation, "schema": entry["rotation"],
    "column": str(records.COLUMNS["rotation"]), "option": inspect.signature(measure).parameters["rotation"].annotation.__metadata__[0].help,
    "groupings": [axes.names(), axes.names("workload"), axes.names(without=["tokens"])],
}))
"""
SHAPE = {"tokens": 64, "hidden": 16, "intermediate": 24, "experts": 8, "top_k": 2}
CELLS = {name: {axis: SHAPE[axis] for axis in SHAPE if axis in bench.axes} for name, bench in BENCHES.items()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a copy of the package, with one more axis and a bench that reads it, says of both."""
    copy = tmp_path_factory.mktemp("copy") / "moe_routing_bench"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    table = copy / "config/axes.py"
    table.write_text(table.read_text().replace('    Axis("router",', LINE + '    Axis("router",', 1))
    (copy / "benches/turn").mkdir()
    (copy / "benches/turn/__init__.py").write_text(BENCH)
    registry = copy / "benches/registry.py"
    registry.write_text(registry.read_text().replace("OPERATIONS = (", 'OPERATIONS = ("turn", ', 1))
    done = subprocess.run(
        [sys.executable, "-c", SEEN, json.dumps(CELLS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (copy.parent, PACKAGE.parent)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_axis_is_in_keys_schema_columns_options_and_groupings(seen):
    assert seen["key"] == "T4-rot3-seed17" and seen["default"] == 0
    assert seen["schema"]["items"] == {
        "description": "an integer from 0 to 3",
        "minimum": 0,
        "maximum": 3,
        "type": "integer",
    }
    assert seen["schema"]["title"] == "quarters by which rows are turned" and seen["schema"]["default"] == [0]
    assert seen["column"] == "int64" and "Quarters by which rows are turned [default: 0]" in seen["option"]
    assert all("rotation" in names for names in seen["groupings"])


@pytest.mark.parametrize("bench", BENCHES)
def test_a_new_axis_and_a_new_bench_leave_the_specs_of_others_alone(seen, bench):
    job = Job(cell_of(bench, **CELLS[bench]), ("torch",), Settings())
    assert seen["specs"][bench] == job.spec
    assert "rotation" not in job.spec


def test_no_module_of_the_package_but_the_table_lists_axes():
    """A list of several axes elsewhere would go out of date: options, entries and columns are derived."""
    options = importlib.import_module("moe_routing_bench.cli.measure").measure
    named = [one for one in inspect.signature(options).parameters if one in axes.AXES]
    assert named == list(axes.AXES)


def test_a_grouping_leaves_out_only_what_it_names():
    everything = list(axes.AXES)
    assert axes.names() == everything and axes.names(without=["skew"]) == [n for n in everything if n != "skew"]
    assert sorted(axes.names("shape") + axes.names("workload") + axes.names("format", "way")) == sorted(everything)
    with pytest.raises(AssertionError, match="speed"):
        axes.names(without=["speed"])
