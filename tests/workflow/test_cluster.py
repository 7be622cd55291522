"""The workflow on several machines: who decides the platform, what a share is."""

from pathlib import Path

import pytest

from project import CELLS, DRAWN, Project, count, measured


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that has measured nothing. Only planned with."""
    return Project.create(tmp_path_factory.mktemp("cluster") / "project")


def test_a_machine_without_a_gpu_plans_for_one(fresh: Project) -> None:
    """All that the report of that platform needs, and nothing of this machine's own."""
    asked = fresh.folder / "config/h100.yaml"
    asked.write_text((fresh.folder / "config/config.yaml").read_text().replace("device: cpu", "platform: nvidia-h100"))
    done = fresh.snakemake("--dry-run", "--configfile", asked)
    assert count(done) == {"measure": sum(CELLS.values()), "collect": 1, "figure": DRAWN, "html": 1, "all": 1}
    assert [path.name for path in (fresh.folder / "results").glob("*/asked.txt")] == ["asked.txt"]
    assert (fresh.folder / "results/nvidia-h100/asked.txt").is_file()
    assert "results/cpu" not in done.stdout + done.stderr


def test_shares_are_all_cells_each_once_and_collect_nothing(fresh: Project) -> None:
    shares = [fresh.snakemake("--dry-run", "--config", "platform=cpu", f"share={number}/2") for number in (1, 2)]
    assert all(set(count(one)) == {"measure", "all"} for one in shares)
    found = [measured(one) for one in shares]
    assert {name: sum(one.get(name, 0) for one in found) for name in CELLS} == CELLS
    assert not set(found[0]) & set(found[1])  # here every bench is one family


def test_where_the_platform_is_not_said_other_machines_are_told(fresh: Project, tmp_path: Path) -> None:
    """What a job on another machine is started with, as an executor for clusters would."""
    script = tmp_path / "job.smk"
    script.write_text(f'include: "{fresh.folder}/Snakefile"\nprint("told:", workflow.config_settings.config_args)\n')
    done = fresh.snakemake("--dry-run", "--snakefile", script, "--directory", fresh.folder)
    assert "told: ['platform=cpu']" in done.stdout + done.stderr
    done = fresh.snakemake("--dry-run", "--snakefile", script, "--directory", fresh.folder, "--config", "run=other")
    assert "told: ['run=other', 'platform=cpu']" in done.stdout + done.stderr
