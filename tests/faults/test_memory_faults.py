"""Memory that runs out is named in the row, or in one line where no implementation has run, and not as a crash."""

import contextlib
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import faults, supervisor
from moe_routing_bench.measure.faults import MemoryKills
from moe_routing_bench.store import cell_files, platforms

sys.path.insert(0, str(Path(__file__).parent))
import faulty_pack

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32")
QUICK = Settings(max_seconds=0.02, min_blocks=3, max_blocks=3, warmup_ms=1, interval_us=200, timeout=30)
MEBIBYTE = 1 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 400 MiB."""
    for folder, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(folder) / f"moe-routing-bench-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(400 * MEBIBYTE))
                yield group
                time.sleep(0.1)
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("needs a writable memory cgroup")


@pytest.mark.fault("killed for memory")
def test_an_implementation_that_the_kernel_kills_for_memory(small_group, add_packs, no_ceilings, tmp_path) -> None:
    """It is out of memory, and the other one is measured."""
    import torch  # noqa: F401  (imported before the fork, as the warm server does)

    add_packs(faulty_pack, "fault", ("hog",))
    job = Job(CELL, ("torch", "hog"), QUICK)
    if (pid := os.fork()) == 0:
        code = 99
        try:
            (small_group / "cgroup.procs").write_text(str(os.getpid()))
            supervisor.measure(job, tmp_path / "cell.parquet")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    table = cell_files.collect({tmp_path / "cell.parquet": job}, platforms.current())
    rows = {row["implementation"]: row for row in table.to_pylist()}
    assert rows["torch"]["status"] == "ok" and rows["torch"]["restarts"] == 1
    assert rows["hog"]["status"] == "out_of_memory" and "SIGKILL for want of memory" in rows["hog"]["reason"]


@pytest.mark.fault("no memory to start")
@pytest.mark.parametrize("mebibytes", [300, 600])
def test_a_worker_that_cannot_start_for_memory_is_one_line(mebibytes, tmp_path) -> None:
    """Nothing is stored: no implementation has run."""
    size = mebibytes * MEBIBYTE
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "moe_routing_bench.measure.supervisor",
            tmp_path / "cell.parquet",
            Job(CELL, ("torch",), QUICK).spec,
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    (line,) = re.findall(
        "error: memory: got 'the worker .*", done.stderr
    )  # a worker without memory may end within a line
    assert done.returncode == 2 and len(line) < 500
    assert "before anything was measured" in line and not list(tmp_path.iterdir())


@pytest.mark.fault("killed for memory")
@pytest.mark.parametrize("version", [1, 2, None])
def test_where_the_kernel_counts_what_it_kills(version, tmp_path, monkeypatch) -> None:
    """In a cgroup of either version, whose path a container does not see; else for the whole machine."""
    name = {1: "memory/memory.oom_control", 2: "memory.events", None: "vmstat"}[version]
    counts = tmp_path / name
    counts.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(faults, "CGROUPS", tmp_path)
    monkeypatch.setattr(faults, "_MACHINE", tmp_path / "vmstat")
    monkeypatch.setattr(faults, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text({1: "4:memory:/elsewhere\n0::/\n", 2: "0::/elsewhere\n", None: ""}[version])
    counts.write_text("oom 5\noom_kill 2\n")
    kills = MemoryKills()
    assert not kills.any()
    counts.write_text("oom 6\noom_kill 3\n")
    assert kills.any() and not MemoryKills().any()


@pytest.mark.fault("no memory to start")
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_say_that_memory_ran_out(error) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    assert faults.described(raised.value)[0] == "out_of_memory"
