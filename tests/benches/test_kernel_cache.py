"""The kernel cache: loaded by a second process, in how long, safe with several at once, healed when damaged."""

import itertools
import subprocess
from pathlib import Path

import pytest

import forks
from moe_routing_kernels.closure import PACKAGE

pytestmark = pytest.mark.slow

pytest.importorskip("cutlass")

# For each line, so many processes at once that ask the cache for one kernel: forks, as those of a warm server are.
LOAD = """
import os, sys, time
import cutlass.cute as cute
from moe_routing_kernels.combine import cute_combine
compiled = []
original = cute.compile
cute.compile = lambda *a, **k: compiled.append(a) or original(*a, **k)
for line in sys.stdin:
    for _ in range(int(line)):
        if not os.fork():
            tiling = cute_combine.choose_tiling(4096, 2048, "bf16", 2)
            kernel = cute_combine.compile_for("sm_90a", "bf16", 2, tiling, False)
            print(callable(kernel), len(compiled), time.process_time(), flush=True)
            os._exit(0)
    for _ in range(int(line)):
        os.wait()
    print("end", flush=True)
"""


def load(program: subprocess.Popen, count: int) -> tuple[list[int], list[float], str]:
    """Numbers of compilations, and CPU seconds to have the kernel, of so many processes at once; and all that they print."""
    assert program.stdin and program.stdout
    program.stdin.write(f"{count}\n")
    program.stdin.flush()
    lines = list(itertools.takewhile("end\n".__ne__, program.stdout))
    found = [line.split() for line in lines if line.startswith("True ")]
    assert len(found) == count, lines
    return [int(compilations) for _, compilations, _ in found], [float(last) for *_, last in found], "".join(lines)


def test_processes_share_one_object(tmp_path: Path) -> None:
    """Two at once compile once; a damaged object is compiled again, with a word about it; then one loads in under 0.5 s of CPU."""
    environment = forks.environment(PACKAGE.parent) | {"MOE_ROUTING_KERNELS_CACHE": str(tmp_path)}
    with subprocess.Popen(
        [forks.programs() / forks.PYTHON, "-c", LOAD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        counts, *_ = load(program, 2)
        assert sorted(counts) == [0, 1]
        (found,) = tmp_path.glob("*.o")
        assert not list(tmp_path.glob("*.tmp"))
        found.write_bytes(b"damaged")
        counts, _, said = load(program, 1)
        assert counts == [1] and "compiled again" in said
        counts, seconds, _ = load(program, 1)
        assert counts == [0] and seconds[0] < 0.5
