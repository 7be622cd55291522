"""The workflow as a module of another: Snakemake fetches its files from a commit, and the installed package does the work."""

import subprocess
from pathlib import Path

import pytest

from project import CELLS, Project, count

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the repository with a commit of the files that Snakemake reads."""
    project = Project.create(tmp_path_factory.mktemp("committed"))
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]
    for command in (["init", "-q"], ["add", "workflow", "environment.yml"], commit):
        subprocess.run(["git", *command], cwd=project.folder, check=True)
    return project


def planned(project: Project, folder: Path, module: str = "") -> subprocess.CompletedProcess:
    """A dry run, in a folder, of a workflow that has a rule of its own and, renamed, all rules of the commit."""
    (folder / "Snakefile").write_text(f"""
configfile: "{project.folder}/config/config.yaml"
rule mine:
    output: "mine.txt"
    shell: "touch {{output}}"
module moe:
    snakefile: gitfile("{project.folder}", path="workflow/Snakefile", ref="HEAD")
    config: config
    {module}
use rule * from moe as moe_*
rule everything:
    input: rules.mine.output, rules.moe_all.input
    default_target: True
""")
    return project.run("snakemake", "-n", "--snakefile", folder / "Snakefile", "--directory", folder, check=False)


def test_its_rules_run_beside_those_of_another_workflow(committed: Project, tmp_path: Path) -> None:
    """In that one's folder, which needs no config of ours beside what the module is given."""
    found = count(planned(committed, tmp_path))
    assert {name: found[name] for name in ("mine", "moe_measure", "moe_html")} == {
        "mine": 1,
        "moe_measure": sum(CELLS.values()),
        "moe_html": 1,
    }
    assert not (tmp_path / "results").exists()


def test_a_prefix_is_refused(committed: Project, tmp_path: Path) -> None:
    """Snakemake would look for files where no command writes them."""
    done = planned(committed, tmp_path, 'prefix: "moe"')
    assert done.returncode == 1
    assert "error: a module's prefix: got 'moe/'; allowed: none" in done.stdout + done.stderr
    assert not (tmp_path / "results").exists()
