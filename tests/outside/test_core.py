"""The wheel of the benchmark without extras, in an empty environment: its size, the time to a first answer, and what each command says."""

import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from index import uv

import core_commands
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.packages import KERNELS
from project import ROOT

pytestmark = pytest.mark.slow
MOST_MB, MOST_SECONDS = 60, 30
ASKED = ("ask", "deepseek-v3", "--tokens", "64", "--json")
NO_INDEX = "Could not find a version|No matching distribution|connection|ConnectionError|timed out"


@dataclass
class Core:
    """An environment with the wheel: its folder of programs, and what it took from `pip install` to the answer. `busy`: other processes had all cores."""

    programs: Path
    megabytes: float
    wall: float
    cpu: float
    busy: bool
    answer: dict


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, KERNELS):
        uv("build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", folder, project)
    return folder


@pytest.fixture(scope="module")
def core(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Core:
    """The wheel of the benchmark alone, and what pip fetches for it. Nothing that another installation has kept is used."""
    environment, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    venv.create(environment, symlinks=True, with_pip=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    before = size(site)
    (wheel,) = wheels.glob("moe_routing_bench-*.whl")
    others = max(os.getloadavg()) >= (os.cpu_count() or 1)
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(environment / "bin/python", empty, "-m", "pip", "install", "-q", "--no-cache-dir", wheel)
    lacking = re.search(r"No matching distribution found for (\S+)", done.stderr)
    if done.returncode and re.search(NO_INDEX, done.stderr) and not (lacking and "moe-routing" in lacking[1]):
        pytest.skip(f"pip reaches no index: {done.stderr.splitlines()[-1].strip()}")
    assert done.returncode == 0, done.stderr
    answer = run(environment / "bin/moe-routing-bench", empty, *ASKED)
    assert answer.returncode == 0, answer.stderr
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return Core(environment / "bin", size(site) - before, wall, cpu, others, json.loads(answer.stdout))


def size(folder: Path) -> float:
    """Megabytes of the files of a folder, each as many blocks as it takes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) / 1e6


def run(program: Path, folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_it_is_small_and_answers_soon(core: Core) -> None:
    print(f"{core.megabytes:.1f} MB; {core.wall:.1f} s to the first answer, {core.cpu:.1f} s of CPU time")
    assert core.megabytes <= MOST_MB and core.cpu <= MOST_SECONDS
    assert core.answer == json.loads(json.dumps(ask("deepseek-v3", tokens=64)))
    if core.wall > MOST_SECONDS and core.busy:
        pytest.skip(f"the cores were taken by others: {core.wall:.1f} s for {core.cpu:.1f} s of CPU time")
    assert core.wall <= MOST_SECONDS


def test_each_command_works_or_names_the_extra(core: Core, wheels: Path, tmp_path: Path) -> None:
    done = run(core.programs / "python", tmp_path, ROOT / "tests/core_commands.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (wheel,) = wheels.glob("moe_routing_bench-*.whl")
    said = f"pip install --find-links {wheels.as_uri()} 'moe-routing-bench[bench] @ {wheel.as_uri()}'"
    assert found.pop("loaded") == [0, "", ""] and len(found) > 35
    status, kind, text = found.pop("api")
    assert (status, kind) == (1, "UserError") and said in text and "\n" not in text
    for name, (status, out, error) in found.items():
        if name in core_commands.LIGHT:
            assert (status, error) == (core_commands.LIGHT[name][1], "") and out, (name, error)
        else:
            (line,) = error.splitlines()
            assert status == 2 and not out and line.startswith(f"error: packages for {name}: ") and said in line, name
    assert (tmp_path / "bench/Snakefile").is_file()


def test_what_it_tells_pip_brings_the_rest(wheels: Path) -> None:
    """By metadata alone: nothing is downloaded."""
    (wheel,) = wheels.glob("moe_routing_bench-*.whl")
    asked = f"moe-routing-bench[bench] @ {wheel.as_uri()}\n"
    target = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34")
    found = uv(
        *("pip", "compile", "-", "--no-header", "--no-annotate", "--find-links", wheels, *target), given=asked
    ).split()
    names = {line.partition("==")[0] for line in found}
    assert {"moe-routing-kernels", "torch", "pyarrow", "pandas", "snakemake"} <= names
