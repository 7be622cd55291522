"""The steps of docs/kernels: each compiles for Hopper without a GPU, and the page shows the times that are stored."""

import subprocess
from pathlib import Path

import pandas as pd
import pytest

import forks
from campaign import sampled

pytest.importorskip("cutlass")
ROOT = Path(__file__).parents[2]
STEPS = ROOT / "docs/kernels"
FILES = sorted(STEPS.glob("step_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("step", sampled(FILES, [FILES[0], FILES[-1]]), ids=lambda path: path.stem)
def test_a_step_runs(step: Path) -> None:
    """With a GPU it checks its result, else it compiles."""
    python, environment = forks.programs() / forks.PYTHON, forks.environment(ROOT / "src")
    done = subprocess.run([python, str(step)], env=environment, capture_output=True, text=True, timeout=200)
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
