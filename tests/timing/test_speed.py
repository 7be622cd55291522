"""How long Snakemake takes on a grid of 1,000 cells to say what it would do, and that there is nothing to do."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_routing_bench.config import load as config
from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.store import paths, rows
from project import DRAWN, Project, count

pytestmark = pytest.mark.slow

CELLS = 1000
DRY_RUN_SECONDS, NO_OP_SECONDS = 3.0, 5.0
# Where the limits were set, Snakemake alone planned as many jobs that touch a file in 1.0 to 1.6 s. A machine that exceeds
# them, being slower or busy, is given as much longer for ours as it takes for those.
BARE_SECONDS = 1.6
BARE = f"""
rule all:
    input: expand("{{i}}.txt", i=range({CELLS}))
rule one:
    output: "{{i}}.txt"
    shell: "touch {{output}}"
"""
GRID = [
    {
        "benches": ["gate"],
        "implementations": ["torch"],
        "tokens": list(range(1, 126)),
        "experts": [4, 8],
        "top_k": [1, 2],
        "dtype": ["fp32", "bf16"],
    }
]


def seconds(project: Project, *arguments: str, jobs: int) -> float:
    """How long a command takes, which finds so many jobs to do."""
    start = time.perf_counter()
    done = project.run("snakemake", *arguments, "--cores", "1", "--resources", "gpu=1")
    passed = time.perf_counter() - start
    assert sum(count(done).values()) == jobs
    return passed


def within(limit: float, run: Callable[[], float], bare: Project) -> tuple[float, float]:
    """Seconds and their limit; measured once more where they exceed it, as other work on the machine may have met it."""
    found, allowed = run(), limit
    for again in (True, False):
        if found > allowed:
            alone = seconds(bare, "--dry-run", "--scheduler", "greedy", jobs=CELLS + 1)
            allowed = limit * max(1.0, alone / BARE_SECONDS)
        if found > allowed and again:
            found, allowed = run(), limit
    return found, allowed


def test_a_thousand_cells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A dry run before, and a run after every cell was measured (here: copied, which is all that a run looks at)."""
    (tmp_path / "bare").mkdir()
    bare, project = Project(tmp_path / "bare"), Project.create(tmp_path / "project")
    (bare.folder / "Snakefile").write_text(BARE)
    project.configure(GRID)
    jobs = expand(config.load(project.folder / paths.CONFIG), presets.load(project.folder / paths.MODELS))
    assert len(jobs) == CELLS
    planned = CELLS + DRAWN + len(("measure_again", "collect", "html", "all"))
    dry, dry_limit = within(DRY_RUN_SECONDS, lambda: seconds(project, "--dry-run", jobs=planned), bare)

    # Writes what is asked for, which cells must be newer than.
    project.run("snakemake", "--touch", "--cores", "1", check=False)
    row = {"schema_version": rows.SCHEMA_VERSION, "bench": "gate", "implementation": "torch", "status": "ok"}
    first, *others = (project.folder / paths.cell_file("cpu", job) for job in jobs)
    rows.write(first, [row], jobs[0].spec)
    for path in others:
        shutil.copy(first, path)
    made = [
        paths.again("cpu"),
        paths.measurements("cpu"),
        *(paths.figure("cpu", n, s) for n in FIGURES for s in ("svg", "png")),
        paths.report("cpu"),
    ]
    for path in made:  # as if drawn from them: only that they are newer matters here
        (project.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (project.folder / path).touch()
    no_op, no_op_limit = within(NO_OP_SECONDS, lambda: seconds(project, jobs=0), bare)
    with capsys.disabled():
        print(
            f"\n1,000 cells: dry run {dry:.2f} s (limit {dry_limit:.2f}), no-op {no_op:.2f} s (limit {no_op_limit:.2f})",
            file=sys.stderr,
        )
    assert dry <= dry_limit and no_op <= no_op_limit
