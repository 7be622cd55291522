"""A SLURM of one node on this machine, and what tests ask of it."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from project import Project

SCRIPT = Path(__file__).parent / "workflow/slurm.sh"
DAEMONS = ("slurmctld", "slurmd", "munged")


@pytest.fixture
def slurm(own_server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A SLURM of one node. Its jobs measure one cell each, so that a warm server would take longer to start than it saves."""
    monkeypatch.setenv("MOE_ROUTING_BENCH_WORKER", "cold")
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)}; apt-get install slurm-wlm munge")
    port = next(port for port in range(20_000 + os.getpid() % 5000 * 2, 32_000, 2) if free(port) and free(port + 1))
    folder = own_server / "slurm"
    try:
        started = subprocess.run(["bash", SCRIPT, "start", folder, str(port)], capture_output=True, text=True)
        if started.returncode:
            pytest.skip(f"SLURM does not start here: {started.stderr.strip()}")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        yield
    finally:
        subprocess.run(["bash", SCRIPT, "stop", folder])


def free(port: int) -> bool:
    """Whether nobody listens; ports from 32768 on are also those of connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def queue(project: Project, *options: str) -> str:
    return project.run("squeue", "--noheader", *options).stdout


def until(done: Callable[[], object], seconds: float = 120) -> None:
    """Wait until a function returns something true."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def submit(project: Project, shares: int, *options: str) -> list[str]:
    """Submit a project in so many allocations, with options of Snakemake; returns their numbers and, last, that of the report's job."""
    words = ("workflow/scripts/slurm.sh", "cpu", str(shares), "--gpus=1", "--", *options)
    return re.findall("job ([0-9]+)", project.run("bash", *words).stdout)
