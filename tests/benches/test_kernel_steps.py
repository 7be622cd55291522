"""The steps of docs/kernels: each compiles for Hopper without a GPU, and the page shows the times that are stored."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("cutlass")
STEPS = Path(__file__).parents[2] / "docs/kernels"
FILES = sorted(STEPS.glob("step_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("step", FILES, ids=lambda path: path.stem)
def test_a_step_runs(step: Path) -> None:
    """With a GPU it checks its result, else it compiles."""
    done = subprocess.run([sys.executable, str(step)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    number = step.stem.split("_")[1]
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith(f"{number} ") for line in lines), done.stdout


def test_each_step_is_faster() -> None:
    """The stored times: a line per step, each faster than the steps before."""
    times = pd.read_csv(STEPS / "times.csv")
    best = times.groupby(times.step.str[0].astype(int)).us.min()
    assert list(best.index) == [int(path.stem.split("_")[1]) for path in FILES]
    assert best.is_monotonic_decreasing
