"""The processes of isolated implementations, as the judge sees them: the judge, which is the worker, never imports an implementation.

A runner maps inputs and outputs, and runs only between a request and its reply: else it is stopped.
"""

import contextlib
import functools
import json
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import processes, runner
from moe_routing_bench.measure.candidate import Failure
from moe_routing_bench.measure.faults import MemoryKills
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.interruptions import PERIOD, RunningTime

_STATUSES = ("incorrect", "unsupported", "out_of_memory", "crashed")  # that a runner may say
PATIENCE = 0.8  # share of a worker's time without a sign of life that its processes have
_END_SECONDS = 2.0
_HANDOVERS = 20


class Ended(Failure):
    """The process of an implementation has ended."""


class Runner:
    """The process of an isolated implementation, as the judge sees it: forked at once, stopped between requests."""

    def __init__(
        self,
        job: Job,
        name: str,
        device: str,
        answers: Callable[..., runner.Bound] = runner.Bound,
        kept: Sequence[int] = (),
    ) -> None:
        """Fork it, and measure the hand-over while it has imported nothing of the implementation. `answers` makes what answers requests there,
        of job, name, device and the file to show outputs in; `kept` are descriptors that it needs."""
        self._job, self.device, self.patience = job, device, job.settings.timeout * PATIENCE
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.shown, judge = os.memfd_create("moe-routing-bench"), os.getpid()
        self.threads = job.settings.cpu_threads
        self._ended = False
        self.pid = os.fork()
        if self.pid == 0:
            made = functools.partial(answers, job, name, device, self.shown)
            runner.serve(made, self.threads, theirs, (self.shown, *kept), judge, "ranks" not in job.cell)
        theirs.close()
        self.link.settimeout(min(PERIOD, self.patience))
        self._kills = MemoryKills()
        os.kill(self.pid, signal.SIGSTOP)
        times = [self.ask("rest")[1] * 1e6 for _ in range(_HANDOVERS)]
        self.handover_us, self.least_handover_us = median(times), min(times)
        self.overhead_us = self.handover_us

    @property
    def pids(self) -> set[int]:
        """Its process, until that is ended."""
        return set() if self._ended else {self.pid}

    def bind(self, sets: Sets) -> dict[str, Any]:
        """Have it bind the sets and warm up; returns its reply."""
        stacked, shared, descriptors = sets.handles()
        return self.ask("bind", runner.Sets(stacked, shared), descriptors=descriptors)[0]

    def ask(self, request: str, *arguments: Any, descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], float]:
        """Have it do something, and stop it again; returns its reply, and the seconds from the moment when it may run to the reply.

        Raises `Failure` where it says that it failed, has ended, or gives no sign of life.
        """
        reply, seconds = b"", 0.0
        try:
            self.post(request, arguments, descriptors)
            begin = perf_counter()
            self.resume()
            reply = self._reply()
            seconds = perf_counter() - begin
        except TimeoutError:
            self.end()
            raise Failure("timeout", f"no word for {self.patience:g} s") from None
        except (OSError, ProcessLookupError):
            pass
        return self.settled(reply), seconds

    def post(self, request: str, arguments: Sequence[Any], descriptors: Sequence[int]) -> None:
        """Send it a request, which it reads when it may run. OSError where it has ended."""
        socket.send_fds(self.link, [pickle.dumps((request, *arguments))], list(descriptors))

    def resume(self) -> None:
        """Let it run."""
        os.kill(self.pid, signal.SIGCONT)

    def settled(self, reply: bytes) -> dict[str, Any]:
        """Stop it after its reply, and read that; empty where it has ended. Raises `Failure` where it has, or says that it failed."""
        if reply:
            self.stop()
        return self.read(reply)

    def stop(self) -> None:
        """Stop it. Raises `Ended` where it has ended."""
        if not self._stopped():
            raise self._death()

    def read(self, reply: bytes) -> dict[str, Any]:
        """What a reply says. Raises `Ended` where it is empty, and `Failure` where it says that it failed."""
        if not reply:
            raise self._death()
        return self._message(reply)

    def _death(self) -> Ended:
        """How it has ended."""
        manner = self._manner()
        if "SIGKILL" in manner and self._kills.any():
            return Ended("out_of_memory", "its process was killed by the kernel for want of memory")
        return Ended("crashed", f"its process {manner}")

    def spent(self, reply: dict[str, Any], seconds: float, calls: int) -> float:
        """The seconds of a turn of so many calls that count: all between request and reply."""
        return seconds

    def believed(self) -> None:
        """It says no times."""

    def fields(self) -> dict[str, object]:
        """Row fields: the hand-over."""
        return {"handover_us": self.handover_us}

    def _reply(self) -> bytes:
        """What it answers. Raises TimeoutError after its patience, in which the time does not count that this process was stopped for."""
        clock = RunningTime(PERIOD)
        while True:
            with contextlib.suppress(TimeoutError):
                return self.link.recv(runner.MOST_BYTES)
            clock.look()
            if clock.seconds >= self.patience:
                raise TimeoutError

    def _stopped(self) -> bool:
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

    def _message(self, reply: bytes) -> dict[str, Any]:
        try:
            message = json.loads(reply)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Failure("incorrect", "its process gave a reply that is none")
        if "status" in message:
            status = message["status"] if message["status"] in _STATUSES else "crashed"
            raise Failure(status, str(message.get("reason"))[:500])
        return message

    def cpu_seconds(self) -> float:
        """How long its threads, and processes that it has started, have computed so far."""
        return processes.cpu_seconds(self.pid) + processes.cpu_seconds_below(self.pid)

    def alone(self) -> None:
        """`Failure` where it has started processes that still run."""
        if processes.running(processes.descendants(self.pid)):
            raise Failure("incorrect", "processes were left running")

    def end(self) -> None:
        """End it and all that it has started."""
        if not self._ended:  # another process may have its number since
            self._ended = True
            processes.end_tree(self.pid, _END_SECONDS)
            self.link.close()
            os.close(self.shown)


class Shown(Sequence[Any]):
    """What the call of each of so many sets returned besides its outputs, which are those that were given; asked for when it is looked at."""

    def __init__(self, sets: int, handed_on: Callable[[int], object]) -> None:
        self._sets, self._handed_on = sets, handed_on

    def __len__(self) -> int:
        return self._sets

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._handed_on(index)
