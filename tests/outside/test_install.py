"""The environment that `make` makes around a torch that is there: nothing of torch is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from project import Project

pytestmark = pytest.mark.slow


@pytest.mark.campaign
def test_a_torch_that_is_there_is_used(tmp_path: Path) -> None:
    """In an environment of its own, in which the programs of the project are, and what that Python lacks."""
    project = Project.create(tmp_path / "project")
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = ["make", ".venv/.report", "SYSTEM_TORCH=1", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=project.folder, env=own, capture_output=True, text=True, timeout=250)
    if "Could not find a version that satisfies the requirement hatchling" in done.stderr:
        pytest.skip("pip reaches no index to take the build's backend from")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing what the report needs" in done.stdout
    programs = project.folder / ".venv/bin"
    code = "import moe_routing_bench, torch; print(torch.__file__, moe_routing_bench.__file__)"
    found = subprocess.run([programs / "python", "-c", code], env=own, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [torch.__file__, str(project.folder / "src/moe_routing_bench/__init__.py")]
    assert not list(programs.parent.glob("lib/*/site-packages/torch"))
    assert (programs / "moe-routing-bench").is_file()
