"""A measurement that is stopped from outside and goes on has rows of a whole measurement, or none: neither timeouts nor samples of before."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import interruptions, isolation, processes, supervisor
from moe_routing_bench.measure.interruptions import Interrupted
from moe_routing_bench.store import cell_files, platforms
from moe_routing_kernels.errors import UserError

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32")
TIMEOUT = 3
SETTINGS = Settings(
    max_seconds=0.2, max_blocks=10**6, target_half_width=1e-9, warmup_ms=1, interval_us=200, timeout=TIMEOUT
)
JOB = Job(CELL, ("torch",), SETTINGS)
ENDLESS = replace(JOB, settings=replace(SETTINGS, max_seconds=1000.0))


def sampling_first(ready: int) -> None:
    """The first worker of this process goes on until it is stopped, however late that comes on a busy machine; `ready` is written to once
    its supervisor has heard that it takes samples."""
    attempt, jobs, following = supervisor._attempt, [ENDLESS], supervisor._next

    def hear(receive):
        message = following(receive)
        if message and message[0] == "at" and message[2] == "sampling":
            os.write(ready, b"s")
            supervisor._next = following
        return message

    supervisor._attempt = lambda job, *given, **named: attempt(jobs.pop() if jobs else job, *given, **named)
    supervisor._next = hear


def leads(pid: int) -> bool:
    """Whether a process leads a group of its own, as a worker does, and git does not."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        return os.getpgid(pid) == pid
    return False


class Measurement:
    """A supervisor in a fork of this process, and its worker; `path` is the cell's file."""

    def __init__(self, path: Path, before: Callable[[], object] = lambda: None) -> None:
        self.path, (known, ready) = path, os.pipe()
        if (pid := os.fork()) == 0:
            code = 99
            try:
                os.setsid()
                before()
                sampling_first(ready)
                supervisor.measure(JOB, path)
                code = 0
            finally:
                os._exit(code)
        os.close(ready)
        assert os.read(known, 1) == b"s"
        os.close(known)
        self.pid, (self.worker,) = pid, filter(leads, processes.descendants(pid))

    def signal(self, number: int, *pids: int) -> None:
        for pid in pids or (self.pid, self.worker):
            os.kill(pid, number)

    def row(self) -> dict:
        """The one row, after the end."""
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        (row,) = cell_files.collect({self.path: JOB}, platforms.current()).to_pylist()
        return row


@pytest.fixture
def measuring(no_ceilings, tmp_path) -> Iterator[Callable[..., Measurement]]:
    import torch  # noqa: F401  (imported before the fork, as the warm server does)

    started = []

    def start(before: Callable[[], object] = lambda: None) -> Measurement:
        started.append(Measurement(tmp_path / "cell.parquet", before))
        return started[-1]

    yield start
    for each in started:
        for pid in {each.pid, *processes.descendants(each.pid)}:
            if processes.running({pid}):
                os.kill(pid, signal.SIGKILL)


def whole(row: dict) -> None:
    """It was measured again, from the beginning, and no sample spans the stop."""
    assert row["status"] == "ok" and row["restarts"] >= 1, row["reason"]
    assert row["max_us"] < (TIMEOUT + 1) * 1e6


@pytest.mark.slow
@pytest.mark.fault("frozen job")
def test_a_job_that_is_stopped_for_longer_than_its_timeout_is_measured_again(measuring) -> None:
    """As `scontrol suspend` does: SIGSTOP to all, later SIGCONT."""
    job = measuring()
    job.signal(signal.SIGSTOP)
    time.sleep(TIMEOUT + 1)
    job.signal(signal.SIGCONT)
    whole(job.row())


FREEZERS = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/freezer")]


@pytest.fixture
def freezer() -> Iterator[tuple[Path, Path, str, str]]:
    """A new cgroup, its file that freezes it, and what to write to it."""
    for folder, name, words in ((FREEZERS[0], "cgroup.freeze", "10"), (FREEZERS[1], "freezer.state", "FT")):
        group = folder / f"moe-routing-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / name).exists():
            yield group, group / name, *({"F": "FROZEN", "T": "THAWED"}.get(word, word) for word in words)
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("needs a writable cgroup")


@pytest.mark.slow
@pytest.mark.fault("frozen job")
def test_a_job_that_a_cgroup_freezes_is_measured_again(measuring, freezer) -> None:
    """No signal says so, and no process is in the state of a stopped one."""
    group, state, frozen, thawed = freezer
    job = measuring(lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    state.write_text(frozen)
    time.sleep(TIMEOUT + 1)
    state.write_text(thawed)
    whole(job.row())
    deadline = time.monotonic() + 60
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.fault("stopped worker")
def test_a_worker_that_was_stopped_for_a_moment_is_measured_again(measuring) -> None:
    """However briefly: its samples may span the stop."""
    job = measuring()
    job.signal(signal.SIGSTOP, job.worker)
    time.sleep(0.05)
    job.signal(signal.SIGCONT, job.worker)
    whole(job.row())


@pytest.mark.slow
@pytest.mark.fault("stopped worker")
def test_a_worker_that_stays_stopped_is_replaced(measuring) -> None:
    """State T is no hang of the implementation."""
    job = measuring()
    job.signal(signal.SIGSTOP, job.worker)
    whole(job.row())


@pytest.fixture
def clocks(monkeypatch) -> list[float]:
    """The three clocks, at will."""
    now = [100.0, 200.0, 0.0]
    monkeypatch.setattr(interruptions, "_clocks", lambda: tuple(now))
    return now


@pytest.mark.fault("gap between polls", 4)
def test_only_a_gap_that_nothing_explains_is_a_stop(clocks) -> None:
    """Each: what passed by both clocks, what the thread waited for a CPU, and how long it was stopped."""
    clock = interruptions.RunningTime(1.0)
    for passed, with_sleep, waited, stopped in (
        (1.0, 1.0, 0.0, 0.0),
        (9.0, 9.0, 0.0, 8.0),  # SIGSTOP, a freezer cgroup, a paused virtual machine
        (9.0, 9.0, 8.5, 0.0),  # a busy machine
        (1.0, 3601.0, 0.0, 3600.0),  # a closed laptop
    ):
        for i, seconds in enumerate((passed, with_sleep, waited)):
            clocks[i] += seconds
        assert clock.look() == pytest.approx(stopped)
    assert clock.seconds == pytest.approx(1 + 2 + 2 + 1) and clock.stopped == pytest.approx(3608)


@pytest.mark.fault("clock that is set")
@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_set_while_a_cell_is_measured(hours, monkeypatch, no_ceilings, tmp_path) -> None:
    """A row's end is its beginning and what the kernel's own clock says; `collect` takes it, unless the beginning is in the future."""

    class Set(datetime):
        asked = 0

        @classmethod
        def now(cls, tz=None):
            cls.asked += 1
            return datetime.now(tz) + timedelta(hours=hours * (cls.asked > 1))

    monkeypatch.setattr(supervisor, "datetime", Set)
    job = Job(CELL, ("torch",), Settings(max_seconds=0.02, min_blocks=3, max_blocks=3, warmup_ms=1, interval_us=200))
    supervisor.measure(job, tmp_path / "cell.parquet")
    (row,) = cell_files.collect({tmp_path / "cell.parquet": job}, platforms.current()).to_pylist()
    first, last = (datetime.fromisoformat(row[name]) for name in ("started_at", "ended_at"))
    assert timedelta(0) < last - first < timedelta(minutes=5) and last - first >= timedelta(
        seconds=row["measure_seconds"] - 0.01
    )


@pytest.mark.fault("frozen job")
def test_a_runner_s_patience_counts_time_in_which_its_judge_ran(clocks, monkeypatch) -> None:
    """The judge is stopped for an hour, then the runner answers."""
    runner = object.__new__(isolation.Runner)
    replies: list = [TimeoutError, TimeoutError, b"{}"]

    class Link:
        def recv(self, most: int) -> bytes:
            clocks[0], clocks[1] = clocks[0] + 3600, clocks[1] + 3600
            if (reply := replies.pop(0)) is TimeoutError:
                raise TimeoutError
            return reply

    runner.link, runner.patience = Link(), 5.0
    assert runner._reply() == b"{}"
    replies[:] = [TimeoutError] * 9
    with pytest.raises(TimeoutError):
        runner._reply()


@pytest.mark.fault("endless interruptions", 3)
def test_what_is_interrupted_again_and_again_ends() -> None:
    """With a row where it is always the same implementation, else with one line."""
    brief, lasting = Interrupted("stopped", "cute"), Interrupted("stopped", "cute", lasting=True)
    assert interruptions.settled([brief] * 5) == interruptions.settled([lasting]) == {}
    assert interruptions.settled([lasting, Interrupted("stopped", "torch", lasting=True)]) == {}
    assert interruptions.settled([brief] * 6)["cute"]["status"] == "timeout"
    assert interruptions.settled([lasting] * 2)["cute"]["reason"] == "stopped, 2 times"
    for at in (None, "torch"):
        with pytest.raises(UserError, match="6 interruptions"):
            interruptions.settled([Interrupted("stopped", at), *[Interrupted("stopped", None)] * 5])
