"""The package as pip installs it: a wheel, in an environment of its own, used in an empty folder from `init` to the report."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from index import uv

from moe_routing_bench import study
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.packages import KERNELS, PACKAGE
from project import OF_BOTH, ROOT, count, draw_only, reduced

pytestmark = pytest.mark.slow
PLACE = "moe_routing_bench/project"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels of this tree, of the benchmark and of the kernels, built by way of sdists."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, KERNELS):
        uv("build", "--quiet", "--python", sys.executable, "--out-dir", folder, project)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has these wheels, and what it depends on from the environment that runs the tests."""
    environment = tmp_path_factory.mktemp("venv")
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # without the .pth files there: no editable package
    uv("pip", "install", "--quiet", "--no-deps", "--no-index", "--python", environment / "bin/python", *wheels)
    return environment / "bin"


def run(installed: Path, folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess:
    """A program of the environment, in a folder."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{installed}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def cells_of(config: Path) -> list[str]:
    """The bench of each cell of a config."""
    return [job.cell.bench for job in study.jobs_of(study.effective([config], None))]


def snakemake(installed: Path, folder: Path, *arguments: str) -> dict[str, int]:
    """The jobs of a run."""
    return count(run(installed, folder, "python", "-m", "snakemake", "--cores", "2", *arguments))


def test_the_wheel_has_the_workflow_and_what_answers_read(wheels: list[Path]) -> None:
    wheel, kernels = wheels
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        f"{PLACE}/{name}" for name in ("workflow/Snakefile", "workflow/rules/common.smk", "config/h200.yaml")
    } <= names
    folders = {name.removeprefix(f"{PLACE}/").split("/")[0] for name in names if name.startswith(PLACE)}
    assert folders <= {"config", "profiles", "workflow", "environment.yml", "results", "kernels", "COMMIT"}
    assert [name for name in names if name.startswith(f"{PLACE}/results/")] == [f"{PLACE}/results/answers.json.gz"]
    copied = {name.removeprefix(f"{PLACE}/kernels/") for name in names if name.startswith(f"{PLACE}/kernels/")}
    assert not [name for name in names if not name.startswith("moe_routing_bench")]
    alone = set(zipfile.ZipFile(kernels).namelist())
    sources = {path.relative_to(KERNELS.parent).as_posix() for path in KERNELS.rglob("*.py")}
    assert sources | {"moe_routing_kernels/py.typed", "moe_routing_kernels/choices/choices.json"} <= alone
    assert not [name for name in alone if not name.startswith("moe_routing_kernels")]
    assert copied == {name for name in alone if ".dist-info/" not in name}


def test_an_installed_package_answers_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """From the rows in the wheel, as the checkout does from its own."""
    asked = ("moe-routing-bench", "ask", "deepseek-v3", "--tokens", "64", "--json")
    found = json.loads(run(installed, tmp_path, *asked).stdout)
    assert found["kind"] == "measured" and found["nearest"]["run"].startswith("nvidia-h200")
    here = ask("deepseek-v3", tokens=64)
    assert found == json.loads(json.dumps(here))


@pytest.mark.timeout(600)  # a minute on two cores that have nothing else to do
def test_from_an_empty_folder_to_the_report(
    installed: Path, tmp_path: Path, own_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the default config is planned, as it is shipped, and a cell of each of its benches measured, with a figure of either table: all
    else `make report` does. And what makes cells of an installed package stale, and the commit that their rows name."""
    monkeypatch.setenv("MOE_ROUTING_BENCH_DEVICE", "cpu")
    run(installed, tmp_path, "moe-routing-bench", "init", "bench")
    folder = tmp_path / "bench"
    shipped = cells_of(ROOT / "config/config.yaml")
    planned = snakemake(installed, folder, "-n")
    assert planned["measure"] == len(shipped) and planned["train"] == planned["time_training"] == 2
    assert planned["figure"] == len(FIGURES) - 1

    reduced(folder / "config/config.yaml", [128])
    benches = cells_of(folder / "config/config.yaml")
    assert set(benches) == set(shipped)
    (kernel,) = installed.parent.rglob("site-packages/moe_routing_kernels/gate/torch_gate.py")
    draw_only(kernel.parents[2] / PACKAGE.name, *OF_BOTH)
    jobs = snakemake(installed, folder)
    assert (
        jobs["measure"] == len(benches)
        and jobs["train"] == jobs["time_training"] == 2
        and jobs["figure"] == len(OF_BOTH)
    )
    assert (folder / "reports/cpu/index.html").stat().st_size > 100_000
    rows = pq.read_table(folder / "results/cpu/measurements.parquet").to_pylist()
    assert {row["status"] for row in rows} == {"ok", "unsupported"}
    assert len({row["cell_hash"] for row in rows}) == len(benches)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert {row["git_sha"] or "" for row in rows if row["status"] == "ok"} == {head}

    assert snakemake(installed, folder, "-n") == {}
    kernel.write_text(f"{kernel.read_text()}\n# edited\n")
    reading = [one for one in benches if KERNELS / "gate/torch_gate.py" in BENCHES[one].code_files()]
    assert snakemake(installed, folder, "-n")["measure"] == len(reading) < len(benches)


def test_an_environment_of_conda_is_refused(installed: Path, tmp_path: Path) -> None:
    """It would not have the package."""
    run(installed, tmp_path, "moe-routing-bench", "init", ".")
    done = run(installed, tmp_path, "python", "-m", "snakemake", "--cores", "1", "--sdm", "conda", "-n", check=False)
    assert done.returncode == 1
    assert "error: --sdm: got 'conda'; allowed in a checkout" in done.stdout + done.stderr
