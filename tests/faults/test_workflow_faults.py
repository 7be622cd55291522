"""Snakemake is killed, or a file of the workflow is harmed: the next run does what is missing, and no more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_routing_bench.store import paths
from project import CELLS, Project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.create(tmp_path_factory.mktemp("faults") / "project")


def files(project: Project) -> dict[Path, bytes]:
    """The cells that are measured."""
    return {path: path.read_bytes() for path in (project.folder / "results/cpu/cells").rglob("*.parquet")}


@pytest.mark.fault("killed Snakemake")
def test_a_killed_workflow_goes_on(project: Project) -> None:
    """What was measured stays as it was, byte for byte; the rest is measured, and nothing twice."""
    command = [sys.executable, "-m", "snakemake", "--cores", "1", str(paths.measurements("cpu"))]
    environment = os.environ | {"PYTHONPATH": str(project.folder / "src")}
    with subprocess.Popen(
        command, cwd=project.folder, env=environment, stdout=-3, stderr=-3, start_new_session=True
    ) as run:
        deadline = time.monotonic() + 120
        while len(files(project)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
    before = files(project)
    assert 2 <= len(before) < sum(CELLS.values())
    project.run("snakemake", "--unlock", "--cores", "1")
    project.run("snakemake", "--cores", "1", "--rerun-incomplete", str(paths.measurements("cpu")))
    after = files(project)
    assert len(after) == sum(CELLS.values())
    assert sum(after[path] == whole for path, whole in before.items()) >= len(before) - 1, (
        "all but what was being measured"
    )


@pytest.mark.fault("damaged cell")
def test_a_cell_that_is_damaged_is_measured_again_alone(project: Project) -> None:
    """After `collect` has named it."""
    before = files(project)
    lost = sorted(before)[0]
    os.truncate(lost, 100)
    (project.folder / paths.measurements("cpu")).unlink()
    done = project.run("snakemake", "--cores", "1", str(paths.measurements("cpu")), check=False)
    logs = "".join(path.read_text() for path in (project.folder / "results/cpu/logs").rglob("*.log"))
    assert done.returncode == 1 and lost.name in logs and "readable Parquet" in logs
    lost.unlink()
    project.run("snakemake", "--cores", "1", "--rerun-incomplete", str(paths.measurements("cpu")))
    after = files(project)
    assert after.keys() == before.keys() and after[lost] != before[lost]
    assert all(after[path] == whole for path, whole in before.items() if path != lost)
