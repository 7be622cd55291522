"""What the plan of a cell takes beside that of a job of a bare workflow, in calls of functions: other work on the machine does not change their number."""

import subprocess
from pathlib import Path

import pytest
import yaml

import forks
from moe_routing_bench.config.expand import expand

ROOT = Path(__file__).parents[2]
TINY = {"max_seconds": 0.01, "min_blocks": 3, "warmup_ms": 1}
BARE = """
rule all:
    input: expand("{{i}}.txt", i=range({cells}))
rule one:
    output: "{{i}}.txt"
    shell: "touch {{output}}"
"""
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
    command = [forks.programs() / forks.PYTHON, "-c", PROFILED, "--cores", "1", "--dry-run", *arguments]
    environment = forks.environment(ROOT / "src")
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
@pytest.mark.campaign
def test_the_plan_of_a_cell_is_that_of_a_job_and_two_thirds(tmp_path: Path) -> None:
    """It has an input, a log, parameters and a message besides. It was twice that of a bare job while two rules listed every cell."""
    each = {}
    for planned in (bare, grid):
        few, many = (planned(tmp_path / f"{planned.__name__}-{cells}", cells) for cells in (20, 120))
        each[planned.__name__] = (many - few) / 100
    assert each["grid"] < 1.67 * each["bare"], each
