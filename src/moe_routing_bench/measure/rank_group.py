"""The processes of an implementation on several ranks, as the judge sees them: what `Runner` is of one process.

All are asked together and stopped together. A rank that ends, fails or gives no sign of life ends them all, and the reason says which one it was.
"""

import contextlib
import functools
import os
import select
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from moe_routing_bench.benches.ranks import is_of
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import rank_process, runner
from moe_routing_bench.measure.candidate import Failure
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.interruptions import PERIOD, RunningTime
from moe_routing_bench.measure.isolation import Ended, Runner

_WAIT = 0.5  # share of a rank's time without a sign of life for which others wait in a collective: they then say that it did not come
_GRACE_SECONDS = 1.0  # for other ranks to say why, after the first has failed
_BARRIERS, _REPEATS = 10, 3
_LEAST_CALLS = 3  # of warm-up
# Times as long as ranks say that a turn may take by a clock around it, in the best case: at most 1.01 in 60 turns next to 8 busy
# processes on two cores.
_LONGER_TURN = {"cpu": 1.1, "cuda": 1.2}


class RankGroup:
    """The ranks of one implementation; it has the parts of `Runner` that `Turns` uses."""

    overhead_us = 0.0  # ranks take their times themselves, without the hand-over

    def __init__(self, job: Job, name: str, device: str) -> None:
        """Fork them all, and measure the hand-over while they have imported nothing of the implementation."""
        self._job, self.device, self.ranks = job, device, job.cell.ranks
        self._kind = rank_process.of(device)
        rendezvous = os.memfd_create("moe-routing-bench")  # a file that ends with its processes
        self._members = [
            Runner(
                job,
                name,
                device,
                functools.partial(self._kind, rank=rank, rendezvous=rendezvous),
                (rendezvous,),
            )
            for rank in range(self.ranks)
        ]
        os.close(rendezvous)
        self.shown = self._members[0].shown
        self.threads = self.ranks * (job.settings.cpu_threads + 1)  # the backend has one that sends and receives
        self._wait_seconds = self._members[0].patience * _WAIT
        times = [self.ask("rest")[1] * 1e6 for _ in range(_BARRIERS)]
        self.handover_us, self.least_handover_us = median(times), min(times)
        self._peer_copy: float | None = None
        self._barrier_us, self._over_turn = 0.0, float("inf")
        self._medians: list[list[float]] = [[] for _ in range(self.ranks)]

    @property
    def pids(self) -> set[int]:
        """Their processes, until they are ended."""
        return {pid for member in self._members for pid in member.pids}

    def bind(self, sets: Sets) -> dict[str, Any]:
        """Have them join, bind the sets and warm up; returns how many sets take part, and calls of warm-up."""
        self.ask("join", self._wait_seconds)
        times = [self.ask("barrier", _BARRIERS)[1] for _ in range(_REPEATS)]
        self._barrier_us = min(times) * 1e6 / _BARRIERS
        rates = [reply["gb_per_s"] for reply in self.ask("link")[0]["ranks"] if reply]
        self._peer_copy = min(rates, default=None)
        each = []
        for rank in range(self.ranks):
            stacked, shared, descriptors = sets.handles(functools.partial(is_of, rank=rank))
            each.append(((runner.Sets(stacked, shared),), descriptors))
        (reply, *_), _ = self._asked("bind", each)
        return reply | {"rotations": 1, "warmup_calls": self._warmed_up(len(sets))}

    def _warmed_up(self, sets: int) -> int:
        """Rotate for as long as a warm-up takes; returns the number of calls."""
        end, count = perf_counter() + self._job.settings.warmup_ms / 1e3, 0
        while count < _LEAST_CALLS or perf_counter() < end:
            self.ask("warm", 1)
            count += sets
        return count

    def ask(self, request: str, *arguments: Any) -> tuple[dict[str, Any], float]:
        """Have all ranks do something, and stop them again; returns the reply of each, as ``ranks``, and the seconds until the last.

        Ranks that work on copies have them filled before a rotation and fetched after it, which is not in the seconds. Raises `Failure` for
        the rank that says that it failed, has ended, or gives no sign of life, and ends all.
        """
        none, moves = [((), ())] * self.ranks, self._kind.staged and request in ("warm", "rotate")
        if moves:
            if self.device != "cpu":
                torch.cuda.synchronize()  # what this process has written is there
            self._asked("fill", none)
        replies, seconds = self._asked(request, [(arguments, ())] * self.ranks)
        if moves:
            self._asked("fetch", none)
        return {"ranks": replies}, seconds

    def _asked(
        self, request: str, each: Sequence[tuple[Sequence[Any], Sequence[int]]]
    ) -> tuple[list[dict[str, Any]], float]:
        """`ask` with arguments and descriptors for each rank."""
        for member, (arguments, descriptors) in zip(self._members, each, strict=True):
            with contextlib.suppress(OSError):  # it has ended, and does not reply
                member.post(request, arguments, descriptors)
        begin = perf_counter()
        for member in self._members:
            with contextlib.suppress(OSError):
                member.resume()
        replies, failed, seconds, failed_after = self._replies(begin)
        silent = [rank for rank in range(self.ranks) if rank not in replies and rank not in failed]
        for rank, member in enumerate(self._members if not failed and not silent else ()):
            try:
                member.stop()  # none before all are through: they may still need each other
            except Ended as failure:
                failed[rank] = failure
        if not failed and not silent:
            return [replies[rank] for rank in range(self.ranks)], seconds
        self.end()
        raise self._blamed(runner.STEPS.get(request, request), failed, silent, failed_after)

    def _replies(self, begin: float) -> tuple[dict[int, dict[str, Any]], dict[int, Failure], float, float]:
        """The replies of ranks and the failures of others, by rank, the seconds until the last reply, and those until the first failure."""
        waiting = {member.link: rank for rank, member in enumerate(self._members)}
        replies: dict[int, dict[str, Any]] = {}
        failed: dict[int, Failure] = {}
        patience, seconds, failed_after = self._members[0].patience, 0.0, 0.0
        clock = RunningTime(PERIOD)
        while waiting and clock.seconds < patience:
            ready, _, _ = select.select(list(waiting), [], [], min(PERIOD, patience, _GRACE_SECONDS))
            clock.look()
            seconds = perf_counter() - begin
            for link in ready:
                rank, reply = waiting.pop(link), b""
                with contextlib.suppress(OSError):
                    reply = link.recv(runner.MOST_BYTES)
                try:
                    replies[rank] = self._members[rank].read(reply)
                except Failure as failure:
                    failed[rank] = failure
                    if not failed_after:
                        failed_after, patience = seconds, clock.seconds + _GRACE_SECONDS
        return replies, failed, seconds, failed_after

    def _blamed(self, step: str, failed: dict[int, Failure], silent: list[int], failed_after: float) -> Failure:
        """The failure that is the cause of the others: a process that ended, a rank that did not come, or else the first."""
        ended = [rank for rank, failure in failed.items() if isinstance(failure, Ended)]
        first = next(iter(failed), None)
        if ended:
            cause, failure = ended[0], failed[ended[0]]
            return Failure(failure.status, f"rank {cause} of {self.ranks}: {step}: {failure.reason}")
        if first is None or (silent and failed_after >= self._wait_seconds):
            seconds = failed_after or self._members[0].patience
            waited = "" if first is None else f", for which rank {first} waited: {failed[first].reason}"
            ranks = f"rank {' and '.join(map(str, silent))} of {self.ranks}"
            return Failure("timeout", f"{ranks}: {step}: no word for {seconds:.1f} s{waited}")
        return Failure(failed[first].status, f"rank {first} of {self.ranks}: {failed[first].reason}")

    def spent(self, reply: dict[str, Any], seconds: float, calls: int) -> float:
        """The seconds of a turn of so many calls that count: those of the slowest rank."""
        times = [_time(rank, of_rank) for rank, of_rank in enumerate(reply["ranks"])]
        for medians, nanoseconds in zip(self._medians, times, strict=True):
            medians.append(nanoseconds / calls / 1e3)
        turn = max(times) / 1e9
        passed = seconds - (self.least_handover_us + self._barrier_us) / 1e6
        self._over_turn = min(self._over_turn, passed / max(turn, 1e-9))
        return turn

    def believed(self) -> None:
        """`Failure` where even the best turn takes much longer by the clock of this process than ranks say."""
        if self._over_turn > _LONGER_TURN["cpu" if self.device == "cpu" else "cuda"]:
            raise Failure("incorrect", f"a turn takes {self._over_turn:.2f} times as long as the ranks say")

    def fields(self) -> dict[str, object]:
        """Row fields: hand-over and barrier, and what ranks say of themselves."""
        return {
            "handover_us": self.handover_us,
            "barrier_us": self._barrier_us,
            "peer_copy_gb_per_s": self._peer_copy,
            "rank_backend": self._kind.backend,
            "rank_devices": [self.device if self.device == "cpu" else f"cuda:{rank}" for rank in range(self.ranks)],
            "rank_medians_us": [median(each) for each in self._medians],
        }

    def cpu_seconds(self) -> float:
        """How long their threads have computed so far."""
        return sum(member.cpu_seconds() for member in self._members)

    def alone(self) -> None:
        """`Failure` where they have started processes that still run."""
        for member in self._members:
            member.alone()

    def end(self) -> None:
        """End them and all that they have started."""
        for member in self._members:
            member.end()


def _time(rank: int, reply: dict[str, Any]) -> int:
    """The nanoseconds that a rank says. Raises `Failure` for what is no time."""
    time = reply.get("turn_ns")
    if type(time) is not int or time < 0:
        raise Failure("incorrect", f"rank {rank} says a time that is none")
    return time
