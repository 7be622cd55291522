"""One first run of the workflow, shared by all tests of this folder."""

from pathlib import Path

import pytest

from project import SHOWN, Project, count


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run measures: the warm server of this folder is started once."""
    return tmp_path_factory.mktemp("place") / "project"


@pytest.fixture(scope="session")
def first_run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict[str, int]]:
    """A project after its first run (two cores, and nothing but the default profile), and the jobs of that run."""
    project = Project.create(place)
    project.draw_only(*SHOWN)
    jobs = count(project.run("snakemake", "--cores", "2", forked=True))
    return project.copy(tmp_path_factory.mktemp("first") / "project"), jobs


@pytest.fixture(scope="session")
def done(first_run: tuple[Project, dict[str, int]]) -> Project:
    """A project after its first run. Not to be changed, and not to measure."""
    return first_run[0]


@pytest.fixture
def project(done: Project, place: Path) -> Project:
    """A copy of it to change, in the same folder for every test."""
    return done.copy(place)
