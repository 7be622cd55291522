"""The warm server has a socket wherever it runs, is not started without need, and killed jobs leave nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.job import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.measure import client

CLIENT = [sys.executable, "-I", "-S", client.__file__]


def job(tokens: int, settings: Settings) -> Job:
    return Job(cell_of("permute", tokens=tokens, experts=8, top_k=2), ("torch",), settings)


def test_a_command_may_do_without_a_server(own_server):
    """With --running none is started."""
    done = subprocess.run([*CLIENT, "--running", "--cli", "list"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "permute" in done.stdout, done.stderr
    assert not list(own_server.rglob("*.sock")) and not _children_named("server.py", own_server)


def test_a_killed_client_takes_its_worker_along_and_leaves_no_file(own_server):
    path = own_server / "out" / "cell.parquet"
    slow = job(64, Settings(max_seconds=60, max_blocks=100000, target_half_width=1e-9))
    process = subprocess.Popen([*CLIENT, str(path), slow.spec], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(_children_named("server.py", own_server)) < 2 and time.monotonic() < deadline:  # supervisor and worker
        time.sleep(0.05)
    assert process.poll() is None, "the job ended early, so this test shows nothing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _children_named("server.py", own_server):
        time.sleep(0.1)
    assert not path.exists()
    assert not list(own_server.rglob("*.tmp"))
    assert not _children_named("server.py", own_server), "the worker outlived its caller"


def _children_named(name: str, folder: Path) -> list[int]:
    """Processes forked by this test's server: same command line, and a parent with that command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode()
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, ValueError):
                continue
            if name in command and str(folder) in command:
                found[int(entry.name)] = parent
    return [pid for pid, parent in found.items() if parent in found and pid != os.getpid()]
