"""One first run of the workflow, shared by all tests of this folder."""

from pathlib import Path

import pytest

from project import Project, count


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict[str, int]]:
    """A project after its first run (two cores, and nothing but the default profile), and the jobs of that run."""
    project = Project.create(tmp_path_factory.mktemp("first"))
    return project, count(project.run("snakemake", "--cores", "2"))


@pytest.fixture(scope="session")
def done(first_run: tuple[Project, dict[str, int]]) -> Project:
    """A project after its first run. Not to be changed."""
    return first_run[0]


@pytest.fixture
def project(done: Project, tmp_path: Path) -> Project:
    """A copy of it to change."""
    return done.copy(tmp_path / "project")
