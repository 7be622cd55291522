"""uv, which asks a package index."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def uv(*arguments: str | Path, given: str | None = None) -> str:
    """What `uv` prints, with `given` as its input; skip where it is not installed, or fails because no index can be reached."""
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("uv is not installed")
    done = subprocess.run([program, *arguments], input=given, capture_output=True, text=True, timeout=280)
    if done.returncode and re.search("error sending request|Failed to fetch|timed out|dns error", done.stderr):
        pytest.skip(f"uv reaches no index: {done.stderr.splitlines()[-1].strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout
