"""The example of expert parallelism: its losses do not depend on the number of processes, and torchrun runs it."""

import contextlib
import functools
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rank_processes

EXAMPLE = Path(__file__).parents[2] / "examples/expert_parallel.py"


def losses(rank: int) -> list[float]:
    return runpy.run_path(str(EXAMPLE))["train"](torch.device("cpu"))


def test_losses_are_those_of_one_process_and_fall(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found += rank_processes.called(ranks, folder, losses)
    assert all(isinstance(each, list) for each in found), found
    alone, first, second = found
    assert first == second and first == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < 0.9 * alone[0]


def started(rank: int, port: int, out: Path) -> None:
    """The example's `main` as torchrun starts it, on one rank of two."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    with out.open("a") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_one_rank_of_two_prints_the_losses(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = rank_processes.called(2, tmp_path, functools.partial(started, port=port, out=tmp_path / "out"))
    assert found == [None, None] and re.fullmatch(r"2 ranks on cpu: loss \S+ -> \S+\n", (tmp_path / "out").read_text())


@pytest.mark.slow
@pytest.mark.campaign
def test_torchrun_runs_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("2 ranks on "), done.stderr[-2000:]
