"""The processes of isolated implementations, as the judge sees them: the judge, which is the worker, never imports an implementation.

A runner maps inputs and outputs, and runs only between a request and its reply: else it is stopped.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from moe_routing_bench.benches.plugins import isolated
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import processes, runner
from moe_routing_bench.measure.candidate import Failure
from moe_routing_bench.measure.interruptions import PERIOD
from moe_routing_bench.measure.memory_kills import MemoryKills
from moe_routing_bench.measure.running_time import RunningTime

_STATUSES = ("incorrect", "unsupported", "out_of_memory", "crashed")  # that a runner may say
_END_SECONDS = 2.0
_HANDOVERS = 20


class Runner:
    """The process of an isolated implementation, as the judge sees it: forked at once, stopped between requests."""

    def __init__(self, job: Job, name: str, device: str) -> None:
        """Fork it, and measure the hand-over while it has imported nothing of the implementation."""
        self._job, self.device, self._patience = job, device, job.settings.timeout * 0.8
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.shown, judge = os.memfd_create("moe-routing-bench"), os.getpid()
        self._ended = False
        self.pid = os.fork()
        if self.pid == 0:
            runner.serve(job, name, device, theirs, self.shown, judge)
        theirs.close()
        self._link.settimeout(min(PERIOD, self._patience))
        self._kills = MemoryKills()
        os.kill(self.pid, signal.SIGSTOP)
        times = [self.ask("rest")[1] * 1e6 for _ in range(_HANDOVERS)]
        self.handover_us, self.least_handover_us = median(times), min(times)

    def ask(self, request: str, *arguments: Any, descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], float]:
        """Have it do something, and stop it again; returns its reply, and the seconds from the moment when it may run to the reply.

        Raises `Failure` where it says that it failed, has ended, or gives no sign of life.
        """
        data, reply = pickle.dumps((request, *arguments)), b""
        try:
            socket.send_fds(self._link, [data], list(descriptors))
            begin = perf_counter()
            os.kill(self.pid, signal.SIGCONT)
            reply = self._reply()
            seconds = perf_counter() - begin
        except TimeoutError:
            self.end()
            raise Failure("timeout", f"no word for {self._patience:g} s") from None
        except (OSError, ProcessLookupError):
            seconds = 0.0
        if not reply or not self._stop():
            manner = self._manner()
            if "SIGKILL" in manner and self._kills.any():
                raise Failure("out_of_memory", "its process was killed by the kernel for want of memory")
            raise Failure("crashed", f"its process {manner}")
        return self._said(reply), seconds

    def _reply(self) -> bytes:
        """What it answers. Raises TimeoutError after its patience, in which the time does not count that this process was stopped for."""
        clock = RunningTime(PERIOD)
        while True:
            with contextlib.suppress(TimeoutError):
                return self._link.recv(runner.MOST_BYTES)
            clock.look()
            if clock.seconds >= self._patience:
                raise TimeoutError

    def _stop(self) -> bool:
        """Stop all its threads; whether it still lives."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGSTOP)
            changed = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            return changed is not None and changed.si_code == os.CLD_STOPPED
        return False

    def _manner(self) -> str:
        """How it has ended, in words."""
        with contextlib.suppress(OSError):
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if ended and ended.si_code != os.CLD_EXITED:
                return f"was killed by signal {signal.Signals(ended.si_status).name}"
        return "ended"

    def _said(self, reply: bytes) -> dict[str, Any]:
        try:
            found = json.loads(reply)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Failure("incorrect", "its process gave a reply that is none")
        if "status" in found:
            status = found["status"] if found["status"] in _STATUSES else "crashed"
            raise Failure(status, str(found.get("reason"))[:500])
        return found

    def cpu_seconds(self) -> float:
        """How long its threads have computed so far."""
        try:
            return processes.cpu_seconds(self.pid)
        except OSError:
            return 0.0

    def alone(self) -> None:
        """`Failure` where it has started processes that still run."""
        if processes.running(processes.descendants(self.pid)):
            raise Failure("incorrect", "processes were left running")

    def end(self) -> None:
        """End it and all that it has started."""
        if not self._ended:  # another process may have its number since
            self._ended = True
            processes.end_tree(self.pid, _END_SECONDS)
            self._link.close()
            os.close(self.shown)


@contextlib.contextmanager
def runners(job: Job, device: str, names: Sequence[str]) -> Iterator[dict[str, list[Runner]]]:
    """The runners of the isolated ones among implementations, two of one that has a twin. To be entered before CUDA is initialised and
    before anything is drawn: each begins as a copy of this process."""
    found: dict[str, list[Runner]] = {}
    try:
        for name in isolated(job, names):
            found[name] = []
            for _ in range(1 + (name in job.twins)):
                found[name].append(Runner(job, name, device))
        if found:
            processes.keep_to_itself()
        yield found
    finally:
        for each in (one for some in found.values() for one in some):
            each.end()
