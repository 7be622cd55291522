"""The timer of a CPU: wall time of calls by the host clock, and the time that they computed for."""

import math
import secrets
from collections.abc import Callable, Sequence

# By their own names: an implementation may replace the attributes of `time`.
from time import perf_counter, process_time, sleep, thread_time

import numpy as np
import torch

from moe_routing_bench import intervals

Call = Callable[[], object]
Clock = Callable[[], float]
# More that a call computes in a rotation after a pause than among others, because code and data have left the caches: up to 16 us of
# small calls, 200 us of 3 MB (2 CPU cores, four other processes), and 50 us of small calls with nine others.
_COLD_US, _COLD_BYTES_PER_US = 100.0, 20_000.0
_MOST_PAUSE_US = 200.0
_LISTEN_SECONDS = 0.005
# Pairs of a rotation right after a sample and a lone one right after that: both find a busy host in one state. Fewer where rotations are long.
_PAIRS, _PAIRS_US = 10, 50_000.0
_BETWEEN_US = 10.0  # more that a call computes in the lone one, because its outputs are looked at in between
_MORE_ROTATIONS, _WAITED_US = 3, 20_000.0  # to estimate a call; one that takes longer was not merely held up
OUTSTANDING_US = 250.0  # more after a sample is work: to ask a GPU alone took up to 71 us (H200)


class HostTimer:
    """Wall time of calls on a CPU; `interval_us` is the least time between two readings of the clock."""

    name = "wall"

    def __init__(self, calls: Sequence[Call], interval_us: float, nbytes: int = 0) -> None:
        """Estimate one call's time from a rotation and choose how many calls a sample takes. A call reads and writes `nbytes`."""
        self.calls_list, self._cold_us = calls, _COLD_US + nbytes / _COLD_BYTES_PER_US
        self.returned: list[object] = [None] * len(calls)
        self.alone: list[float] = []
        self._computed, self._among = 0.0, list[float]()  # per call, µs: of the last calls, and of every sample
        self._afters: list[float] = []  # per call, µs: of rotations after samples
        self._lones: list[float] = []  # of the lone rotations right after these
        self._elsewhere: list[float] = []
        self._next = self._turn = 0
        once = max(self._timed(0, len(calls)), 0.1)
        for _ in range(_MORE_ROTATIONS):  # a moment's wait for a core would make a sample of a single call
            if interval_us < once < _WAITED_US:
                once = max(min(once, self._timed(0, len(calls))), 0.1)
        self.calls = max(1, math.ceil(interval_us / once))

    def begin_turn(self) -> bool:
        """Count sets that are `reached` from here; whether outputs are to be looked at after the turn."""
        self._turn = self._next
        return True

    def reached(self) -> list[int]:
        """The sets that samples have called since the turn began."""
        sets = len(self.calls_list)
        return sorted({i % sets for i in range(self._turn, min(self._next, self._turn + sets))})

    def _timed(
        self, first: int, count: int, clock: Clock = perf_counter, spent: Clock = process_time, own: Clock = thread_time
    ) -> float:
        """Mean time of so many consecutive calls. Clocks are at hand before any call: one may replace what names stand for."""
        calls, returned, sets = self.calls_list, self.returned, len(self.calls_list)
        begin, here = spent(), own()
        start = clock()
        for i in range(first, first + count):
            returned[i % sets] = calls[i % sets]()
        taken = clock() - start
        here, everywhere = own() - here, spent() - begin
        self._elsewhere.append(1 - here / everywhere if everywhere > 0 else 0.0)
        self._computed = everywhere * 1e6 / max(count, 1)
        return taken * 1e6 / max(count, 1)

    def sample(self) -> float:
        """Mean time of `calls` consecutive calls, after a pause that cannot be foreseen."""
        pause()
        taken = self._timed(self._next, self.calls)
        self._next += self.calls
        self._among.append(self._computed)
        return taken

    def rotate(self) -> None:
        """Every call once, after a pause; what the later ones compute is noted in `alone`: the first finds all caches cold."""
        pause()
        self.alone.append(self._rotation(0))

    def _rotation(self, start: int) -> float:
        """What all calls but the first compute in a rotation from this one on, each in the mean."""
        first = min(1, len(self.calls_list) - 1)
        self._timed(start, first)
        self._timed(start + first, len(self.calls_list) - first)
        return self._computed

    def pairs(self) -> int:
        """How many pairs of rotations an attempt is to compare: none where torch has several threads, which compute while they wait."""
        rotation_us = max(self.among_us([]) * len(self.calls_list), 1e-3)
        return max(1, min(_PAIRS, int(_PAIRS_US / rotation_us))) if torch.get_num_threads() == 1 else 0

    def after_sample(self) -> None:
        """A sample, and a rotation that goes on without a pause."""
        self.sample()
        self._afters.append(max(self._rotation(self._next), 1e-3))
        self._next += len(self.calls_list)

    def lone(self) -> None:
        """Every call once, without a pause, to be compared with the last rotation `after_sample`."""
        self._lones.append(max(self._rotation(0) - _BETWEEN_US, 1e-3))

    def left_out(self, last: bool) -> float:
        """Times as long as after a sample a call computes in a lone rotation: the upper end of the 95 % interval, or the median where there are few
        pairs; 0 without any. In the `last` attempt also no more than the least of the ones over the least of the others, as work that is left out is
        left out in the quietest moment, too."""
        if not self._lones:
            return 0.0
        logs = np.log(self._lones) - np.log(self._afters[: len(self._lones)])
        ends = None if last else intervals.interval(logs.tolist())
        found = float(np.exp(ends[1] if ends else np.median(logs)))
        return min(found, min(self._lones) / min(self._afters)) if last else found

    check = rotate  # a sample need not reach every set

    def alone_us(self) -> float:
        """The least time that a call computes in a rotation by itself, less what cold caches cost. Other processes change it little."""
        return min(self.alone) - self._cold_us

    def among_us(self, blocks: Sequence[Sequence[float]]) -> float:
        """The least time that a call computes in a sample, as in a rotation; `blocks` have wall times."""
        if not self._among:
            self.sample()
        return min(self._among, default=self._computed)

    def elsewhere(self) -> float:
        """Share of the computing in calls that other threads did, in most samples so far; 0 where torch has several threads."""
        return sorted(self._elsewhere)[len(self._elsewhere) // 4] if torch.get_num_threads() == 1 else 0.0

    def outstanding_us(self) -> float:
        """How long other threads compute after a sample, microseconds: the least of three; 0 for a moment or where torch has several threads."""
        times = []
        for _ in range(3 if torch.get_num_threads() == 1 else 0):
            self.sample()
            before = process_time()
            sleep(_LISTEN_SECONDS)
            times.append((process_time() - before) * 1e6)
        return min(times, default=0.0) if min(times, default=0.0) > OUTSTANDING_US else 0.0


def pause() -> None:
    """Let a time pass that cannot be foreseen: a pause then does not tell that a check comes."""
    sleep(secrets.randbelow(int(_MOST_PAUSE_US)) / 1e6)
