"""The warm server and the cold process run the same job and write the same kind of file; a warm cell costs little."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import client
from moe_routing_bench.store import cell_files, platforms, records

pytestmark = pytest.mark.slow

CLIENT = [sys.executable, "-I", "-S", client.__file__]


def job(tokens: int) -> Job:
    quick = Settings(max_seconds=0.2, min_blocks=10, warmup_ms=5)
    return Job(cell_of("permute", tokens=tokens, experts=8, top_k=2), ("torch",), quick)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a warm server of its own. One thread: threads that wait for each other take long where other work runs."""
    temporary = tempfile.TemporaryDirectory(prefix="mrb-", dir="/tmp", ignore_cleanup_errors=True)
    with temporary as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Path(path)


def test_warm_and_cold_measure_the_same(folder):
    warm, cold = folder / "warm.parquet", folder / "cold.parquet"
    quickest = {warm: [], cold: []}

    def ratio() -> float:
        return min(quickest[warm]) / min(quickest[cold])

    for path, flags in ((warm, []), (cold, ["--cold"]), (warm, []), (cold, ["--cold"])):
        if quickest[cold] and len(quickest[warm]) == 1 and 1 / 2 < ratio() < 2:
            break  # a second run is for a machine that is busy with other work
        done = subprocess.run([*CLIENT, *flags, str(path), job(4096).spec], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "permute torch: ok" in done.stdout
        quickest[path].append(cell_files.collect({path: job(4096)}, platforms.current())["min_us"][0].as_py())
    rows = {path: cell_files.collect({path: job(4096)}, platforms.current()).to_pylist()[0] for path in (warm, cold)}
    assert (rows[warm]["worker_mode"], rows[cold]["worker_mode"]) == ("warm", "cold")
    assert rows[warm]["expert_load"] == rows[cold]["expert_load"]
    # the quickest call: on a shared CPU only gross differences show, and medians can be off twentyfold
    assert 1 / 2 < ratio() < 2


def test_overhead_of_a_warm_cell_is_at_most_300_ms(folder):
    """The quickest of up to 30, as the machine may be busy with other work."""
    path, overheads = folder / "cell.parquet", []
    while len(overheads) <= 30 and min(overheads[1:], default=1.0) > 0.3:  # the first one starts the server
        start = time.perf_counter()
        subprocess.run(
            [*CLIENT, str(path), job(64 + len(overheads)).spec], check=True, capture_output=True, timeout=120
        )
        wall = time.perf_counter() - start
        overheads.append(wall - records.read(path)["measure_seconds"][0].as_py())
    assert min(overheads[1:]) <= 0.3, f"after the server had started: {overheads[1:]}"
