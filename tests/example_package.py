"""The example package of `examples/own_kernel`, installed without an index, and packages that tests write."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import forks
from project import ROOT

EXAMPLE = ROOT / "examples/own_kernel"
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def install(target: Path) -> Path:
    """Build the example's wheel and unpack it, which is what installing it does; returns the folder to have on the path."""
    source, wheels = target / "source", target / "wheels"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(wheels)], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / "site")
    return target / "site"


def run(folder: Path, *command: str, path: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of this environment in a folder, on the CPU, with `path` on the search path of Python."""
    sources = [ROOT / "src", *([path] if path else [])]
    environment = forks.environment(*sources) | {"MOE_ROUTING_BENCH_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def bench(
    folder: Path, *arguments: str, path: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """A command of `moe-routing-bench`."""
    return run(folder, "moe-routing-bench", *arguments, path=path, check=check)


def measured(folder: Path, *arguments: str, path: Path | None = None) -> list[dict[str, Any]]:
    """Rows of `measure` where all are right. Asked again, twice at most, where the machine is so busy that few calls of an honest
    implementation cost more than many, which looks like work that is left out."""
    for _ in range(3):
        done = bench(folder, "measure", *arguments, "--json", path=path, check=False)
        rows = json.loads(done.stdout or "[]")
        if not any("work is left out" in (row.get("reason") or "") for row in rows):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return rows
