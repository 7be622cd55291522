"""Runs the worker of a cell as a child process, and makes a complete file of whatever becomes of it.

When an implementation crashes, hangs or corrupts the CUDA context, its status is recorded, a fresh worker is started and
the others are measured again. Every requested implementation ends with a row.
"""

import contextlib
import os
import pickle
import signal
import struct
import sys
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from moe_routing_bench import streams
from moe_routing_bench.benches.plugins import bench_of, fingerprint
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import completion, gpus, processes
from moe_routing_bench.measure.faults import limited
from moe_routing_bench.measure.interruptions import PERIOD, Interrupted, Watch, settled
from moe_routing_bench.measure.phases import Phases
from moe_routing_bench.measure.worker_process import next_worker
from moe_routing_bench.store import platforms
from moe_routing_kernels import files
from moe_routing_kernels.errors import UserError, bad, one_line, writing

_GIT_SECONDS = 5.0  # that git may take to say which code this is
_LONGEST_TEXT = 4000  # letters of a line in the log
_GRACE_SECONDS = 2.0  # for a worker to end by itself
_LONGER = "`measure --timeout`, or `timeout` below `measure:` in a config, waits longer"


def measure(
    job: Job, out: Path | None = None, mode: str = "cold", watch: Any = None, memory: Any = None
) -> list[dict[str, Any]]:
    """Measure a job and return its rows in table order; write them to `out` when it is given.

    `mode` ("cold" or "warm") is recorded. `watch` is a socket that the caller closes when it no longer waits. `memory` has what earlier jobs
    have kept for this one (`server.Memory`).
    """
    if out is not None:
        files.check_writable(out)
    processes.adopt()
    platform = platforms.current()
    device = "cpu" if platform == platforms.CPU else "cuda"
    started, begin = datetime.now(UTC), time.clock_gettime(time.CLOCK_BOOTTIME)
    outcomes: dict[str, dict[str, Any]] = {}
    interrupted: list[Interrupted] = []
    bench, of_plugins = bench_of(job), fingerprint(job)  # now: a file may be edited while its cell is measured
    for name in job.implementations:
        implementation = bench[name]
        reason = platforms.missing(implementation.requires, platform, implementation.peer)
        reason = reason or gpus.lacking(job.cell.get("ranks"), platform)
        if reason:
            outcomes[name] = {"status": "unsupported", "reason": reason}
    caller = _Caller(watch, memory)
    cards = job.cell.get("ranks") or 1
    with gpus.reserved(alone=True, family=job.cell.family, waiting=caller.told, cards=cards):
        while pending := [n for n in job.implementations if n not in outcomes]:
            try:
                outcomes |= _attempt(job, device, pending, caller)
            except Interrupted as error:
                interrupted.append(error)
                outcomes |= settled(interrupted)
                print(f"measured again: {error}", file=sys.stderr, flush=True)
    # A clock that cannot be set, and that goes on while the machine sleeps.
    ended = started + timedelta(seconds=time.clock_gettime(time.CLOCK_BOOTTIME) - begin)
    rows = [
        completion.complete(job, platform, name, outcomes[name], started, ended, memory) for name in job.implementations
    ]
    if out is not None:  # else there is no log
        print(one_line(caller.phases.text(), _LONGEST_TEXT), file=sys.stderr, flush=True)
    for row in rows:
        row |= {"worker_mode": mode, "restarts": max(caller.workers - 1, 0), "plugin_fingerprint": of_plugins}
    if out is not None:
        from moe_routing_bench.store import rows as stored

        with writing(out):
            stored.write(out, rows, job.spec)
    return rows


class _Caller:
    """The caller of a job at the other end of a socket, if there is one; it gets a sign of life every second.

    `workers` counts how many there were, `memory` is what jobs of the caller share, `phases` where their time went.
    """

    def __init__(self, watch: Any, memory: Any = None) -> None:
        self.watch, self.memory, self.workers, self.phases = watch, memory, 0, Phases()
        self._last = time.monotonic()

    def told(self) -> None:
        """Give a sign of life if it is time; SystemExit when the caller no longer waits."""
        if self.watch and time.monotonic() - self._last >= 1:
            self._last = time.monotonic()
            try:
                self.watch.sendall(b".")
            except OSError:
                raise SystemExit(130) from None


def _attempt(
    job: Job, device: str, pending: list[str], caller: _Caller, audit: bool = False
) -> dict[str, dict[str, Any]]:
    """One worker's life: the outcomes that it settled, at least one. Where an implementation has harmed the others, the
    attempt includes the next worker, which finds out which implementation it was.

    Raises `Interrupted` where the worker was stopped meanwhile, and `UserError` where there is too little memory to start one.
    """
    others = processes.offspring()
    ceilings = f"ceilings of {job.settings.cpu_threads} CPU threads"
    known = caller.memory.get(ceilings) if caller.memory and device == "cpu" else None
    worker = next_worker(caller.memory)
    child, receive = worker.pid, worker.receive
    by_name: dict[str, dict[str, Any]] = {}
    begun = False
    at, step, ends, tainted, last_word, of_memory = None, "starting", False, False, "", False
    watch = Watch(child, job.settings.timeout)
    caller.phases.enter(None, step)
    try:
        worker.heed()
        worker.give(job, device, pending, audit, known)
        caller.workers += 1
        completion.code(job.cell.bench, caller.memory)  # takes a while, which the worker does too
        watch.look(at, _GIT_SECONDS)
        watch.hear()
        while not ends:
            patience = watch.patience
            ready = wait([receive, *([caller.watch] if caller.watch else [])], timeout=max(0, min(PERIOD, patience)))
            watch.look(at)
            if caller.watch in ready and receive not in ready:
                raise SystemExit(130)  # the caller is gone
            caller.told()
            if not ready:
                ends = _ended(child) and not receive.poll()  # what it has started may hold its end of the pipe
                if not ends and watch.patience <= 0:
                    break
                continue
            watch.hear()
            message = _next(receive)
            if message is None:
                ends = True
            elif message[0] == "at":
                at, step = message[1], message[2]
                begun = begun or at is not None
                caller.phases.enter(at, step)
            elif message[0] == "within":
                caller.phases.enter(message[1], message[2])
            elif message[0] == "ceilings":
                if caller.memory and not begun:  # later ones could be an implementation's
                    caller.memory.keep(ceilings, message[1])
            elif message[0] == "failed":
                by_name[message[1]] = {"status": message[2], "reason": message[3]}
                at = None
            elif message[0] == "tainted":
                tainted = True
            elif message[0] == "died":
                last_word, of_memory = f": {message[1]}", message[2] == "out_of_memory"
            else:
                by_name |= message[1]
                ends = True
    finally:
        caller.phases.enter(None, "ending")
        status = _end(child, _GRACE_SECONDS if ends else 0)
        processes.sweep(others, _GRACE_SECONDS)
        receive.close()
        caller.phases.end()
    left = [n for n in pending if n not in by_name]
    if tainted and not audit:
        return by_name | _attempt(job, device, left, caller, audit=True)
    if left and (not ends or not by_name or at is not None):
        blamed = [at] if at in left else left if not by_name else []
        if not ends:
            fault = {"status": "timeout", "reason": f"{step}: no word for {job.settings.timeout:g} s; {_LONGER}"}
        else:
            unstarted = step == "starting" and caller.workers == 1
            memory = of_memory or (_killed(status) and worker.kills.any()) or (unstarted and limited())
            what = f"worker {_manner(status)}{last_word}" + " for want of memory" * memory
            fault = {"status": "out_of_memory" if memory else "crashed", "reason": f"{step}: {what}"}
            if memory and unstarted:
                hint = "allow more (ulimit -v, the cgroup, --mem of SLURM); nothing is stored"
                raise bad("memory", f"the {what} before anything was measured", "enough to start a worker", hint)
        by_name |= {name: dict(fault) for name in blamed}
    return by_name


def _next(receive: Connection) -> tuple | None:
    """The worker's next message, or None when it has ended or sent half a message."""
    try:
        return receive.recv()
    except (EOFError, OSError, pickle.UnpicklingError, struct.error):
        return None


def _ended(child: int) -> bool:
    """Whether a child has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: int, seconds: float) -> int:
    """Wait so long for the worker to end, then kill it and its group; returns its wait status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _manner(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with status {os.WEXITSTATUS(status)}"


def main(arguments: list[str], mode: str = "cold", watch: Any = None, memory: Any = None) -> int:
    """``OUT SPEC [PLATFORM]``: measure the spec's job and write its file, on this platform alone. Returns the exit status."""
    streams.never_raise()
    out, spec, *asked = arguments
    try:
        for platform in asked:
            platforms.verify(platform)
        rows = measure(Job.from_spec(spec), Path(out), mode, watch, memory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # the file is complete, whether or not this is read
        for row in rows:
            time_text = f"{row['median_us']:.2f} us" if row.get("median_us") else row.get("reason")
            print(one_line(f"{row['bench']} {row['implementation']}: {row['status']} {time_text}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
