"""What the plan of a cell takes beside that of a job of a bare workflow, in calls of functions: other work on the machine does not change their number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from overhead import BARE, SNAKEMAKE, TINY

from moe_routing_bench.config.expand import expand

ROOT = Path(__file__).parents[2]
PROFILED = """
import cProfile
from snakemake.cli import main
profile = cProfile.Profile()
profile.enable()
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
profile.disable()
print(sum(entry.callcount for entry in profile.getstats()))
"""


def calls(folder: Path, *arguments: str) -> int:
    """The calls of a dry run in a folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", PROFILED, *SNAKEMAKE[3:], "--dry-run", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def bare(folder: Path, cells: int) -> int:
    """Those of Snakemake alone with as many jobs."""
    folder.mkdir()
    (folder / "Snakefile").write_text(BARE.format(cells=cells))
    return calls(folder)


def grid(folder: Path, cells: int) -> int:
    """Those of a grid of as many cells."""
    folder.mkdir()
    entry = {"benches": ["permute"], "implementations": ["torch"], "top_k": [2]}
    entry |= {"experts": list(range(8, 18)), "tokens": list(range(64, 64 + cells // 10))}
    config = {"seed": 17, "device": "cpu", "measure": TINY, "grid": [entry]}
    (folder / "grid.yaml").write_text(yaml.safe_dump(config))
    assert len(expand(config, {})) == cells
    return calls(folder, "--snakefile", str(ROOT / "Snakefile"), "--resources", "gpu=1", "--configfile", "grid.yaml")


@pytest.mark.slow
def test_the_plan_of_a_cell_is_that_of_a_job_and_two_thirds(tmp_path: Path) -> None:
    """It has an input, a log, parameters and a message besides. It was twice that of a bare job while two rules listed every cell."""
    each = {}
    for planned in (bare, grid):
        few, many = (planned(tmp_path / f"{planned.__name__}-{cells}", cells) for cells in (20, 120))
        each[planned.__name__] = (many - few) / 100
    assert each["grid"] < 1.67 * each["bare"], each
