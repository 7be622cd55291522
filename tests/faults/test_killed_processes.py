"""Client, server, supervisor and worker are killed or stopped at several points: one line or a complete file, and nobody is left.

All with one warm server, which dies in the last test.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import client
from moe_routing_bench.store import cell_files, platforms, records
from signals import commands, interruptible

CELL = cell_of("permute", tokens=64, experts=8, top_k=2)
QUICK = Job(CELL, ("torch",), Settings(max_seconds=0.05, min_blocks=3, max_blocks=3, warmup_ms=1, interval_us=200))
ENDLESS = Settings(max_seconds=10 * client.SILENT_SECONDS, max_blocks=10**7, target_half_width=1e-9, warmup_ms=1)
SLOW = Job(CELL, ("torch",), ENDLESS)
LIMIT = client.SILENT_SECONDS / 2  # an answer that takes longer came by the client's own patience, or by the job's end
ASK = "import sys; sys.path.insert(0, sys.argv.pop(1)); import client; client.SILENT_SECONDS = {}; sys.exit(client.main(sys.argv[1:]))"


class Server:
    """A warm server of these tests, and the processes that it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out" / "cell.parquet"
        self.env = os.environ | {"TMPDIR": str(folder)}

    def ask(self, job: Job = SLOW, silent_seconds: float = client.SILENT_SECONDS) -> subprocess.Popen:
        """A client that gives up after so much silence; a quick job has a file of its own."""
        out = self.out if job is not QUICK else self.folder / "quick.parquet"
        words = [sys.executable, "-I", "-S", "-c", ASK.format(silent_seconds), client.HERE, str(out), job.spec]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, env=self.env, preexec_fn=interruptible, **pipes)

    def processes(self) -> list[int]:
        """The server, its supervisor, and that one's worker: those of them that there are and have not ended."""
        found = {}
        for pid, command in commands():
            if "server.py" in command and str(self.folder) in command:
                with contextlib.suppress(OSError, ValueError):
                    state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
                    if state not in "ZX":
                        found[pid] = int(parent)
        line = [pid for pid, parent in found.items() if parent not in found]
        while more := [pid for pid, parent in found.items() if parent == line[-1:][0]] if line else []:
            line += more
        return line

    def at_work(self) -> tuple[int, int, int]:
        """The processes once the worker has begun: it leads a group of its own, as git, which the supervisor asks, does not."""
        found: list[tuple[int, int, int]] = []

        def begun() -> bool:
            line = self.processes()
            for pid in line[2:]:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(pid) == pid:
                        found.append((line[0], line[1], pid))
            return bool(found)

        wait_for(begun)
        return found[0]

    def is_idle(self) -> bool:
        return len(self.processes()) == 1

    def serve_all(self) -> None:
        """Return once every request so far has been taken up and has ended: the server takes them in order."""
        last = self.ask(QUICK)
        assert last.wait(LIMIT) == 0, last.stderr.read()
        wait_for(self.is_idle)


def wait_for(condition: Callable[[], bool], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="mrb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder))
        first = server.ask(QUICK)
        assert first.wait(client.START_SECONDS) == 0, first.stderr.read()
        yield server
        for process in server.processes():
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """Idle before and after; no file."""
    started.out.unlink(missing_ok=True)
    wait_for(started.is_idle)
    yield started
    assert not list(started.folder.rglob("*.tmp"))


def refused(asked: subprocess.Popen, words: str) -> None:
    assert asked.wait(LIMIT) == 1 and asked.stderr is not None
    error = os.read(asked.stderr.fileno(), 9999).decode()  # not to its end: who is stopped has it open
    assert error.startswith("error: ") and words in error and error.count("\n") == 1, error


@pytest.mark.fault("killed client")
@pytest.mark.parametrize(("how", "after"), [("KILL", 0), ("KILL", 0.3), ("TERM", 0.1), ("INT", 0.3)])
def test_a_client_takes_its_worker_along(how, after, server) -> None:
    asked = server.ask()
    server.at_work()
    time.sleep(after)
    assert asked.poll() is None, "the job ended early, so this test shows nothing"
    asked.send_signal(getattr(signal, f"SIG{how}"))
    asked.wait()
    wait_for(server.is_idle)
    assert not server.out.exists(), records.read(server.out).select(["status", "reason"]).to_pylist()


@pytest.mark.fault("killed worker")
@pytest.mark.parametrize("after", [0, 0.3])
def test_a_worker_costs_a_row(after, server) -> None:
    """The file says what became of it."""
    asked = server.ask()
    *_, worker = server.at_work()
    time.sleep(after)
    os.kill(worker, signal.SIGKILL)
    assert asked.wait(LIMIT) == 0
    (row,) = cell_files.collect({server.out: SLOW}, platforms.current()).to_pylist()
    assert row["status"] == "crashed" and "SIGKILL" in row["reason"] and row["worker_mode"] == "warm"


@pytest.mark.fault("killed supervisor")
@pytest.mark.parametrize("after", [0, 0.3])
def test_a_supervisor_takes_its_worker_along(after, server) -> None:
    """Also one that is stopped, which no signal but this one reaches; the next job finds the server as it was."""
    asked = server.ask()
    _, supervisor, worker = server.at_work()
    time.sleep(after)
    os.kill(worker, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    refused(asked, "killed before it could answer")
    wait_for(server.is_idle)
    assert not server.out.exists()


@pytest.mark.fault("stopped process")
@pytest.mark.parametrize(("place", "silent"), [(0, 1), (1, 4)], ids=["server", "supervisor"])
def test_nobody_waits_for_ever_for_one_who_is_stopped(place, silent, server) -> None:
    """And when it goes on, it does not do what nobody waits for: not even after the next job, which comes after it."""
    asked = None if place == 0 else server.ask(silent_seconds=silent)
    stopped = server.processes()[0] if place == 0 else server.at_work()[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        refused(asked or server.ask(silent_seconds=silent), f"no sign of life for {silent} s")
    finally:
        os.kill(stopped, signal.SIGCONT)
    server.serve_all()
    assert not server.out.exists()


@pytest.mark.fault("killed server")
def test_a_job_goes_on_without_its_server(server) -> None:
    """And the next one starts another, whatever socket is left."""
    job = Job(CELL, ("torch",), Settings(max_seconds=0.5, max_blocks=100000, target_half_width=1e-9, warmup_ms=1))
    asked = server.ask(job)
    os.kill(server.at_work()[0], signal.SIGKILL)
    assert asked.wait(LIMIT) == 0
    (row,) = cell_files.collect({server.out: job}, platforms.current()).to_pylist()
    assert row["status"] == "ok" and list(server.folder.rglob("*.sock"))
