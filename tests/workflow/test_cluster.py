"""The workflow on several machines: who decides the platform, what a share is, and one job per cell in a SLURM on this machine. The other
way, shares in allocations, is in `make outside`."""

import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

from loopback import slurm
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.load import on
from moe_routing_bench.study import effective, jobs_of
from project import CELLS, DRAWN, GRID, ROOT, Project, count, measured

pytestmark = pytest.mark.slow
__all__ = ["slurm"]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that has measured nothing. Only planned with."""
    return Project.create(tmp_path_factory.mktemp("cluster") / "project")


def test_a_machine_without_a_gpu_plans_for_one(fresh: Project) -> None:
    """All that the report of that platform needs, and nothing of this machine's own."""
    asked = fresh.folder / "config/h100.yaml"
    asked.write_text((fresh.folder / "config/config.yaml").read_text().replace("device: cpu", "platform: nvidia-h100"))
    done = fresh.snakemake("--dry-run", "--configfile", asked)
    asked_for = {"measure": sum(CELLS.values()), "measure_again": 1, "collect": 1, "figure": DRAWN, "html": 1, "all": 1}
    assert count(done) == asked_for
    assert "results/nvidia-h100/" in done.stdout + done.stderr and "results/cpu" not in done.stdout + done.stderr
    assert not (fresh.folder / "results").exists()


def test_every_bench_has_cells_that_the_workflow_measures(fresh: Project) -> None:
    sizes = {"tokens": [8], "hidden": [64], "intermediate": [32], "experts": [4], "top_k": [2]}
    benches = [name for name in BENCHES if name != "model"]
    asked = fresh.folder / "config/every.yaml"
    asked.write_text(yaml.safe_dump({"device": "cpu", "grid": [{"benches": benches, **sizes}]}))
    assert measured(fresh.snakemake("--dry-run", "--configfile", asked)) == dict.fromkeys(benches, 1)


def test_the_accuracy_of_quantised_weights_is_part_of_the_report_where_it_is_asked_for(fresh: Project) -> None:
    plain, asked = fresh.jobs(), fresh.jobs("--config", "accuracy=True")
    assert "accuracy" not in plain and asked == plain | {"accuracy": 1}


def test_shares_are_all_cells_each_once_and_collect_nothing(fresh: Project, tmp_path: Path) -> None:
    """And what the platform is, which nobody said, jobs on other machines are told, as an executor for clusters starts them."""
    script = tmp_path / "told.smk"
    told = 'print("told:", workflow.config_settings.config_args)'
    script.write_text(f'include: "{fresh.folder}/Snakefile"\n\n\nrule told:\n    input: rules.all.input\n\n\n{told}\n')
    plan = ("--dry-run", "--snakefile", script, "--directory", fresh.folder, "told", "--config")
    shares = [fresh.snakemake(*plan, f"share={number}/2") for number in (1, 2)]
    assert all(set(count(one)) == {"measure", "told"} for one in shares)
    assert "told: ['share=1/2', 'platform=cpu']" in shares[0].stdout + shares[0].stderr
    found = [measured(one) for one in shares]
    assert {name: sum(one.get(name, 0) for one in found) for name in CELLS} == CELLS
    assert not set(found[0]) & set(found[1])  # here every bench is one family


def test_a_job_of_another_machine_writes_its_outputs_alone(fresh: Project, tmp_path: Path) -> None:
    """The files that say what was asked for are there before jobs start, and are left to the process that the user started."""
    project = fresh.copy(tmp_path / "project")
    project.snakemake("--until", "measure", "--config", "platform=cpu", "--mode", "remote", check=False)
    assert not any(path.is_file() for path in (project.folder / "results").rglob("*"))
    project.snakemake("--touch", "--config", "platform=cpu", check=False)  # runs no job
    assert (project.folder / "results/cpu/asked.txt").is_file()


def test_a_container_has_its_own_snakemake(fresh: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `LAUNCH` starts finds it: the path of the one outside need not be there. Here with programs that only note their call."""
    notes = tmp_path / "notes"
    for name, then in (("apptainer", 'shift 3; exec "$@"'), ("sbatch", f"cat >>{notes}; echo 7"), ("squeue", "")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{notes}\n{then}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (launch,) = set(re.findall('LAUNCH="(apptainer [^"]+)"', (ROOT / "docs/cluster.md").read_text()))
    monkeypatch.setenv("LAUNCH", launch)
    fresh.copy(tmp_path / "project").run("bash", "workflow/scripts/slurm.sh", "cpu", "2", "--gpus=1", forked=True)
    started = re.findall(f"^(exec )?{launch} (\\S+) --cores 1", notes.read_text(), re.M)
    assert started == [("", "snakemake"), *[("exec ", "snakemake")] * 3], "planned once; two shares and the report"


@pytest.mark.parametrize("config", ["ep2", "ep", "h200"])
def test_a_cell_over_ranks_asks_for_a_gpu_of_each(config: str) -> None:
    """The profile's expression, which Snakemake evaluates for each job: `test_one_job_per_cell` has it do so."""
    profile = yaml.safe_load((ROOT / "workflow/profiles/slurm/profile.yaml").read_text())
    jobs = jobs_of(on(effective([ROOT / f"config/{config}.yaml"], None), "gpu"))
    asked = [
        eval(profile["set-resources"]["measure"]["gpu"], {"wildcards": SimpleNamespace(cell=job.name)}) for job in jobs
    ]
    assert asked == [dict(job.cell.values).get("ranks", 1) for job in jobs]
    assert (max(asked) > 1) == config.startswith("ep")


def test_one_job_per_cell(fresh: Project, tmp_path: Path, slurm: None) -> None:
    """Cells are measured in jobs of SLURM's."""
    if not importlib.util.find_spec("snakemake_executor_plugin_slurm"):
        pytest.skip("no snakemake-executor-plugin-slurm: pip install -e '.[slurm]'")
    project = fresh.copy(tmp_path / "project")
    project.configure([GRID[1] | {"benches": ["gate"]}])
    # One look when the cell is done: the plugin waits ten seconds longer after each at which it is not.
    each = ("--workflow-profile", "workflow/profiles/slurm", "--slurm-init-seconds-before-status-checks", "11")
    done = project.run("snakemake", *each, "--until", "measure")
    assert len(re.findall("submitted with SLURM jobid", done.stdout + done.stderr)) == 1
    project.bench("collect")
    (row,) = pq.read_table(project.folder / "results/cpu/measurements.parquet").to_pylist()
    assert (row["bench"], row["status"]) == ("gate", "ok")
