"""The definition of the container, run section by section with its folder elsewhere and stand-ins for what only an image has."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from project import ROOT, Project

pytestmark = pytest.mark.slow
SECTIONS = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", (ROOT / "workflow/apptainer.def").read_text(), re.M | re.S))
OWN = "/opt/moe-routing-bench"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with what the definition copies and nothing else, and an environment that has the dependencies but not the package."""
    project = Project.create(tmp_path / "project")
    for line in SECTIONS["files"].splitlines():
        if line.strip():
            here, there = line.split()
            target = tmp_path / there.removeprefix("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            (project.folder / here).rename(target)
    venv.create(tmp_path / "python", symlinks=True, with_pip=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "python")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for name, text in (("apt-get", 'echo "$@"'), ("pip", 'exec python -m pip "$@" --no-deps')):
        (tmp_path / "python/bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "python/bin" / name).chmod(0o755)
    return tmp_path


def run(image: Path, script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of the definition, as apptainer's shell runs it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = os.pathsep.join((f"{image}/python/bin", str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ["sh", "-ec", script.replace(OWN, f"{image}{OWN}"), "sh", *arguments]
    return subprocess.run(
        command, cwd=folder, env=kept | {"PATH": path}, capture_output=True, text=True, timeout=250, check=False
    )


def test_what_it_copies_is_enough_to_install_and_a_checkout_runs_its_own_sources(image: Path, tmp_path: Path) -> None:
    done = run(image, SECTIONS["post"], tmp_path)
    if "Could not find a version that satisfies the requirement hatchling" in done.stderr:
        pytest.skip("pip reaches no index to take the build's backend from")
    assert done.returncode == 0, done.stdout + done.stderr
    where = "import moe_routing_bench as package; print(package.__file__)"
    installed = run(image, f"moe-routing-bench --version; python -c '{where}'", tmp_path)
    assert installed.stdout.splitlines()[1:] == [f"{image}{OWN}/src/moe_routing_bench/__init__.py"], installed.stderr

    checkout = Project.create(tmp_path / "checkout").folder
    found = run(image, f"{SECTIONS['environment']}\npython -c '{where}'", checkout)
    assert found.stdout.strip() == str(checkout / "src/moe_routing_bench/__init__.py"), found.stderr
    planned = run(image, SECTIONS["environment"] + SECTIONS["runscript"], checkout, "--cores", "1", "-n")
    assert planned.returncode == 0 and re.search(r"^measure +\d+$", planned.stdout, re.M), planned.stderr
