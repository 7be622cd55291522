"""Snakemake is killed, or a file of the workflow is harmed: the next run does what is missing, and no more."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_routing_bench.store import paths
from project import CELLS, Project, count

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.create(tmp_path_factory.mktemp("faults") / "project")


def files(project: Project) -> dict[Path, bytes]:
    """The cells that are measured."""
    return {path: path.read_bytes() for path in (project.folder / "results/cpu/cells").rglob("*.parquet")}


def kept(project: Project) -> dict[Path, tuple[bytes, int]]:
    """What a run of the workflow leaves in the folder of results besides rows and logs, with times."""
    folders = [project.folder / "results/cpu", project.folder / "results/cpu/code"]
    names = [path for folder in folders for path in folder.glob("*") if path.is_file() and path.suffix != ".parquet"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in names}


def other(project: Project) -> Path:
    """A config with other cells."""
    path = project.folder / "other.yaml"
    path.write_text((project.folder / "config/config.yaml").read_text().replace("128", "32"))
    return path


@pytest.fixture(scope="module")
def killed(project: Project) -> dict[Path, bytes]:
    """The cells of a run that was killed after some of them; its lock is left."""
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
    return before


@pytest.mark.fault("run that is locked out")
def test_a_run_that_is_locked_out_writes_nothing(project: Project, killed: dict[Path, bytes]) -> None:
    asked = kept(project)
    done = project.snakemake("--configfile", other(project), check=False)
    assert done.returncode == 1 and "lock" in done.stdout + done.stderr
    assert kept(project) == asked and files(project) == killed


@pytest.mark.fault("killed Snakemake")
def test_a_killed_workflow_goes_on(project: Project, killed: dict[Path, bytes]) -> None:
    """What was measured stays as it was, byte for byte; the rest is measured, and nothing twice."""
    project.run("snakemake", "--unlock", "--cores", "1")
    project.run("snakemake", "--cores", "1", "--rerun-incomplete", str(paths.measurements("cpu")))
    after = files(project)
    assert len(after) == sum(CELLS.values())
    assert sum(after[path] == whole for path, whole in killed.items()) >= len(killed) - 1, (
        "all but what was being measured"
    )


PLANS = ["--dry-run", "--lint", "--list", "--summary", "--dag", "--unlock"]


@pytest.mark.fault("plan of another config", len(PLANS))
def test_a_plan_writes_nothing(project: Project) -> None:
    """So that `status` and `prune` go on comparing with the config of the run that was made."""
    asked, cells = kept(project), files(project)
    assert {path.name for path in asked} > {"config.json", "asked.txt", "pack.sha256"}
    for plan in PLANS:
        done = project.snakemake(plan, "--configfile", other(project))
        assert kept(project) == asked, plan
        assert plan != "--dry-run" or count(done)["measure"] == 2
    pruned = project.bench("prune", "--remove").stdout
    assert "compared with results/cpu/config.json" in pruned and "found 0 files" in pruned and files(project) == cells


@pytest.mark.fault("interrupted plan")
def test_code_that_was_edited_for_a_plan_alone_leaves_cells_fresh(project: Project) -> None:
    """A plan sees an edit each time that it is asked, and remembers none."""
    source = project.folder / "src/moe_routing_kernels/gate/torch_gate.py"
    text = source.read_text()
    project.edit("src/moe_routing_kernels/gate/torch_gate.py")
    until = ("--until", "collect")
    assert [project.jobs(*until)["measure"] for _ in range(2)] == [2, 2]
    source.write_text(text)
    assert project.jobs(*until) == {}


@pytest.mark.fault("damaged cell")
def test_a_cell_that_is_damaged_is_measured_again_alone(project: Project) -> None:
    """After `collect` has named it, and the command that it prints has set it aside."""
    before = files(project)
    lost = sorted(before)[0]
    os.truncate(lost, 100)
    (project.folder / paths.measurements("cpu")).unlink()
    done = project.run("snakemake", "--cores", "1", str(paths.measurements("cpu")), check=False)
    logs = "".join(path.read_text() for path in (project.folder / "results/cpu/logs").rglob("*.log"))
    assert done.returncode == 1 and lost.name in logs and "readable Parquet" in logs
    (command,) = re.findall("hint: `moe-routing-bench (prune .*?)`", logs)
    project.bench(*shlex.split(command))
    assert not lost.exists() and len(list((project.folder / "results/cpu/trash").rglob(lost.name))) == 1
    project.run("snakemake", "--cores", "1", str(paths.measurements("cpu")))
    after = files(project)
    assert after.keys() == before.keys() and after[lost] != before[lost]
    assert all(after[path] == whole for path, whole in before.items() if path != lost)


def fill(folder: Path) -> None:
    """Take all space that is left."""
    with (folder / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def take_names(folder: Path) -> None:
    """Take all inodes that are left."""
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (folder / f"file{number}").touch()


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("take", [fill, take_names])
def test_a_disk_without_room_is_one_line(take: Callable[[Path], None], tmp_path: Path) -> None:
    """Snakemake cannot write its own log then, either."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m,nr_inodes=400", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        cli = [sys.executable, "-m", "moe_routing_bench.cli"]
        subprocess.run([*cli, "init", str(disk / "project")], check=True, capture_output=True)
        take(disk)
        command = ["snakemake", "--cores", "1", "--resources", "gpu=1", "--directory", str(disk / "project")]
        done = subprocess.run(command, cwd=disk / "project", capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "No space left on device" in line
