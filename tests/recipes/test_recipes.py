"""Every recipe of docs/extending.md, followed to the letter in a copy of the repository, and its result used for real."""

import importlib
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import first_cases
import noticing
import pyarrow as pa
import pytest
from followed import RECIPES, ROOT, blocks, environment, tree, write

import forks
from moe_routing_bench.store import paths, records
from moe_routing_bench.store.parquet import write_table

pytestmark = pytest.mark.slow

UNIT = (
    "axes",
    "config",
    "dequant",
    "formats",
    "preset_cells",
    "preset_library",
    "published_rows",
    "routers",
    "weight_formats",
)
ELSEWHERE = ("gpu", "recipes", "timing", "workflow")


class Copy:
    """A copy of what the recipes touch or use, with the commands of this environment."""

    def __init__(self, folder: Path) -> None:
        """Copy sources, as far as they are compiled, configs and the config schema to `folder`."""
        self.folder = folder
        for name in ("config", "src", "workflow"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.egg-info"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def follow(self, recipe: str) -> str:
        """Write its files, apply its differences and run its commands, all in order; return what they printed."""
        written, printed = [], ""
        for block in blocks(recipe):
            if block["kind"] == "sh":
                printed += self.run("bash", "-e", "-c", textwrap.dedent(block["text"]))
                continue
            written.append(block["path"])
            write(self.folder, block)
        touched = re.search(r"^Files touched: (.*?)(?:\n\n|\Z)", recipe, re.M | re.S)
        assert touched and sorted(re.findall("`(.+?)`", touched[1])) == sorted(written)
        sources = [name for name in written if name.endswith(".py")]
        for check in (["check"], ["format", "--check"]) if sources else ():
            self.run("ruff", *check, *sources)
        return printed

    def run(self, *command: str) -> str:
        """A command in the copy, on the CPU, with the copy's sources first; its output."""
        variables = forks.environment(self.folder / "src") | {"MOE_ROUTING_BENCH_DEVICE": "cpu"}
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy to change."""
    return Copy(tmp_path)


def statuses(printed: str) -> dict[str, str]:
    """Status by implementation, from the table that `measure` prints."""
    return dict(
        line.split()[:2]
        for line in printed.splitlines()
        if re.match(r"\s*\w+ +(ok|incorrect|crashed|unsupported) ", line)
    )


def test_there_is_a_test_for_every_recipe() -> None:
    assert [name.split()[-1] for name in RECIPES] == [
        *("implementation", "own", "bench", "axis", "format", "router", "with", "figure", "preset")
    ]


def test_implementation(copy: Copy) -> None:
    """It is measured beside the baseline."""
    assert statuses(copy.follow(RECIPES["Add an implementation"])) == {"torch": "ok", "torch_index": "ok"}


def test_kernel_of_a_package_of_its_own(copy: Copy) -> None:
    """It is measured beside the baseline, from the working directory; the workflow would measure it, too."""
    assert statuses(copy.follow(RECIPES["Add a kernel in a package of your own"])) == {"torch": "ok", "my_index": "ok"}
    config = '{"plugins": ["my_kernels"], "grid": [{"benches": ["pack"], "tokens": [64], "hidden": [64], "experts": [4], "top_k": [2]}]}'
    assert "0 of 1 cells" in copy.run("moe-routing-bench", "status", "--config-json", config)


def test_bench(copy: Copy) -> None:
    """It is listed and measured."""
    printed = copy.follow(RECIPES["Add a bench"])
    assert re.search(r"^ *count +expert ids -> tokens per expert", printed, re.M), printed
    assert statuses(printed) == {"torch": "ok"}


def test_axis(copy: Copy) -> None:
    """It is an option, part of the key of its bench's cells, a column of every row, and in the schema of a config."""
    printed = copy.follow(RECIPES["Add an axis"])
    assert statuses(printed) == {"torch": "ok"} and "-temp2-" in printed, printed
    look = "from moe_routing_bench.config import axes; from moe_routing_bench.store import records; print('temperature' in records.COLUMNS, 'temperature' in axes.names('workload'))"
    assert copy.run("python", "-c", look).split() == ["True", "True"]
    assert "temperature:" in (copy.folder / "workflow/schemas/config.schema.yaml").read_text()


def test_format(copy: Copy) -> None:
    """Rows and weights are quantised to them, and found right."""
    printed = copy.follow(RECIPES["Add a number format"])
    assert statuses(printed) == {"torch": "ok", "dequant": "ok"}, printed
    assert "packed-fp8_block64" in printed and "weights-int4_g16" in printed, printed


def test_no_recipe_touches_more_than_three_files() -> None:
    """An implementation two."""
    touched = {
        name: re.search(r"^Files touched: (.*?)(?:\n\n|\Z)", text, re.M | re.S) for name, text in RECIPES.items()
    }
    counts = {name: len(re.findall("`(.+?)`", found[1])) for name, found in touched.items() if found}
    assert counts.keys() == RECIPES.keys() and max(counts.values()) <= 3 and counts["Add an implementation"] == 2


def test_router(copy: Copy) -> None:
    """`gate` measures it and finds it right."""
    assert statuses(copy.follow(RECIPES["Add a router"])) == {"torch": "ok"}


def test_rule_to_train_with(copy: Copy) -> None:
    """A model is trained with it; that it stands the tests of every rule is in the last test of this file."""
    printed = copy.follow(RECIPES["Add a rule to train with"])
    assert re.search(r"topk_temperature.* step 4/4 train .* bits/byte", printed), printed


def test_figure(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn from a table of rows."""
    monkeypatch.syspath_prepend(ROOT / "tests/unit")
    rows = importlib.import_module("rows").rows()
    table = pa.Table.from_pandas(rows, records.SCHEMA, preserve_index=False)
    write_table(copy.folder / paths.measurements("cpu"), table)
    copy.follow(RECIPES["Add a figure"])
    assert "no data" not in (copy.folder / paths.figure("cpu", "scaling")).read_text()
    assert (copy.folder / paths.figure("cpu", "scaling", "png")).stat().st_size > 1000


def test_preset(copy: Copy) -> None:
    """It expands to a cell of each bench."""
    assert "0 of 2 cells measured" in copy.follow(RECIPES["Add a model preset"])


@pytest.mark.parametrize(
    ("body", "noticed"),
    [
        ("def test_it():\n    for name in BENCHES: pass", True),
        ("def test_it():\n    names = [*registry.BENCHES]", True),
        ("def test_it():\n    bench = BENCHES['pack']", False),
        ("def test_it():\n    rows = runs.COLUMNS", False),
        ("def test_it():\n    models = load('config/models.yaml')", True),
        ("def every(): return [*BENCHES]\ndef test_it():\n    every()", True),
        ("NAMES = [*BENCHES]\n@pytest.mark.parametrize('name', NAMES)\ndef test_it(name): pass", True),
        ("@pytest.fixture\ndef names(): return [*BENCHES]\ndef test_it(names): pass", True),
        (
            "@pytest.fixture\ndef names(): return [*BENCHES]\n@pytest.mark.usefixtures('names')\ndef test_it(): pass",
            True,
        ),
        ("@pytest.fixture(autouse=True)\ndef names(): return [*BENCHES]\ndef test_it(): pass", True),
        ("for name in BENCHES: print(name)\ndef test_it(): pass", True),
        ("pytestmark = pytest.mark.parametrize('name', BENCHES)\ndef test_it(): pass", True),
        ("class TestIt:\n    def test_it(self):\n        assert list(BENCHES)", True),
        ("def test_another():\n    assert list(BENCHES)\ndef test_it(): pass", False),
        ("def test_it(shared): pass\ndef test_another():\n    list(BENCHES)", True),
        ("def test_it(quiet): pass\ndef test_another():\n    list(BENCHES)", False),
    ],
)
def test_tests_that_notice_a_new_entry_are_known(body: str, noticed: bool, tmp_path: Path) -> None:
    """A table of the test's own is none of the package."""
    path, known = tmp_path / "test_one.py", "from moe_routing_bench.benches.registry import BENCHES\n"
    fixtures = "@pytest.fixture\ndef shared(): return [*BENCHES]\n@pytest.fixture\ndef quiet(): return 1\n"
    path.with_name("conftest.py").write_text(known + fixtures)
    path.write_text(f"{known}{body}")
    assert any(one.rpartition("::")[2].lower() in ("test_it", "testit") for one in noticing.tests(path)) == noticed
    path.write_text("BENCHES = {}\ndef test_it():\n    for name in BENCHES: pass")
    assert not noticing.tests(path)


@pytest.mark.timeout(900)  # as long as two cores that others use take for hundreds of tests
@pytest.mark.parametrize(
    "folders",
    [("benches", "faults", "measure", "ops", "routers"), pytest.param(("*",), marks=pytest.mark.campaign)],
    ids=["kernels", "all"],
)
def test_no_recipe_turns_a_test_red(folders: tuple[str, ...], tmp_path: Path) -> None:
    """All recipes together, then the tests of the fast lane that could notice: the first case of each, and those of what the recipes add. `make
    recipes` runs the whole lane."""
    tree(tmp_path)
    assert all(name in "".join(RECIPES.values()) for name in first_cases.NEW)
    files = [path for folder in folders for path in (tmp_path / "tests").glob(f"{folder}/test_*.py")]
    files += [] if folders == ("*",) else [tmp_path / f"tests/unit/test_{name}.py" for name in UNIT]
    chosen = sorted(path for path in files if path.parent.name not in ELSEWHERE)
    tests = [test for path in chosen for test in noticing.tests(path)]
    assert len(tests) > 100
    command = [forks.programs() / forks.PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "first_cases"]
    variables = environment(tmp_path)
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path / "tests/recipes")
    done = subprocess.run(
        [*command, "-m", "not slow", *tests], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    (cases,) = re.findall(r"^new entries that have cases: (.*)$", done.stdout, re.M)
    assert set(cases.split()) >= {"count", "fp8_block64", "int4_g16", "tiny-moe", "topk_temperature"}, cases
