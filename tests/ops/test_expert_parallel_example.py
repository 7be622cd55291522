"""The example of expert parallelism: its losses do not depend on the number of processes, and torchrun runs it."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.slow
def test_torchrun_runs_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("2 ranks on "), done.stderr[-2000:]
