"""A grid and a training run, through a SLURM on this machine, to the report."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from loopback import queue, slurm, submit, until
from project import BASE, GRID, OF_BOTH, Project

__all__ = ["slurm"]
# It waits for two queues, and beside other tests it has little of the cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]


def test_a_grid_in_allocations_of_which_one_is_cancelled(
    tmp_path: Path, slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted again it goes on to the report: what was measured stays, and every row names its job."""
    monkeypatch.delenv("MOE_ROUTING_BENCH_WORKER")  # a share has many cells, which one warm process measures
    project = Project.create(tmp_path / "project")
    project.configure([GRID[0] | {"tokens": [*range(64, 73)]}, GRID[1]], quality=[BASE])
    project.draw_only(*OF_BOTH)
    results, report = project.folder / "results/cpu", project.folder / "reports/cpu/index.html"

    def cells() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in results.glob("cells/*/*.parquet")}

    first, second, _ = submit(project, 2)
    until(lambda: len(cells()) >= 2)  # of 20: there is work left in both
    project.run("scancel", second)
    until(lambda: not queue(project), 600)
    kept = cells()
    assert kept and not report.exists() and not (results / "measurements.parquet").exists()

    jobs = submit(project, 1)  # in another number of shares
    until(lambda: not queue(project), 600)
    assert report.exists(), "".join(path.read_text() for path in sorted(results.glob("logs/slurm/*.log")))
    assert {path.stem for path in report.parent.glob("figures/*.svg")} == set(OF_BOTH)
    assert {path: cells()[path] for path in kept} == kept
    rows = pq.read_table(results / "measurements.parquet", columns=["status", "slurm_job_id"])
    assert len(rows) == 20 and set(rows["status"].to_pylist()) == {"ok"}
    assert {first} < set(rows["slurm_job_id"].to_pylist()) <= {first, second, *jobs}
    trained = pq.read_table(results / "quality.parquet", columns=["slurm_job_id"])
    assert set(trained["slurm_job_id"].to_pylist()) <= {first, second, *jobs}
