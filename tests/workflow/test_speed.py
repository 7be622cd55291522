"""How long Snakemake takes to say what it would do, on a grid of 1,000 cells."""

import sys
import time
from pathlib import Path

import pytest
from project import SMALL, Project

from moe_routing_bench import config, grid, paths, records

CELLS = 1000
DRY_RUN_SECONDS, NO_OP_SECONDS = 3.0, 5.0
NOISE = 1.5  # a shared machine was seen to take that much longer
GRID = [
    {"benches": ["gate"], "implementations": ["torch"], "tokens": list(range(1, 126)), "experts": [4, 8], "top_k": [1, 2], "dtype": ["fp32", "bf16"]}
]  # fmt: skip


def best(project: Project, *arguments: str) -> float:
    """The shortest of four runs: other work on the machine only ever adds."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        project.snakemake(*arguments, "--quiet", "rules")
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.slow
def test_a_thousand_cells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A dry run, and a run that has nothing to do because every cell's file is there."""
    project = Project.create(tmp_path / "project")
    project.configure(GRID)
    dry = best(project, "--dry-run")
    settings = config.load({"seed": 17, "device": "cpu", "measure": SMALL, "grid": GRID})
    jobs = grid.expand(settings, config.load_models(project.folder / paths.MODELS))
    assert len(jobs) == CELLS
    for job in jobs:
        row = {"schema_version": records.SCHEMA_VERSION, "bench": "gate", "implementation": "torch", "platform": "cpu", "cell": job.cell.key, "status": "crashed", "reason": "made up"}  # fmt: skip
        records.write(project.folder / paths.cell_file("cpu", job), [row], job.spec)
    target = "results/cpu/measurements.parquet"
    project.snakemake("--touch", target, check=False)
    project.snakemake(target)
    assert "Nothing to be done" in "".join(project.snakemake(target).stderr)
    no_op = best(project, target)
    with capsys.disabled():
        print(f"\n1,000 cells: dry run {dry:.2f} s, nothing to do {no_op:.2f} s", file=sys.stderr)
    assert dry <= NOISE * DRY_RUN_SECONDS and no_op <= NOISE * NO_OP_SECONDS
