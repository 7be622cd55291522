"""The example package of `examples/own_kernel`, installed without an index, and packages that tests write."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
