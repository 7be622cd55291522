"""The Triton kernels against plain torch, on the CPU under Triton's interpreter (see triton_cases for the cases)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.slow
def test_kernels_match_their_references_on_odd_shapes() -> None:
    """One subprocess runs every case: triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
