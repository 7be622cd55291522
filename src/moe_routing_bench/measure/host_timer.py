"""The timer of a CPU: wall time of calls by the host clock, and the time that they computed for."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# By their own names: an implementation may replace the attributes of `time`.
from time import perf_counter, process_time, sleep, thread_time

import torch

Call = Callable[[], object]
Clock = Callable[[], float]
# More that a call computes in a rotation after a pause than among others, because code and data have left the caches: up to 16 us of
# small calls, 200 us of 3 MB (2 CPU cores, four other processes), and 50 us of small calls with nine others.
_COLD_US, _COLD_BYTES_PER_US = 100.0, 20_000.0
_MOST_PAUSE_US = 200.0
_LISTEN_SECONDS = 0.005
_PAIRS, _PAIRS_US = 10, 50_000.0  # of rotations, that an attempt compares; fewer where rotations are long
# Times as long as among others a call may compute alone: up to the first number it holds all its work, above the second it leaves work out.
# Of 64 honest calls next to 8 to 10 busy processes and tests on two cores, 61 were below the first after one attempt, all after ten, at 0.97
# to 1.09: of 1/0.7 times the work alone, all above 1.38.
_WHOLE, _SHORTENED, ATTEMPTS = 1.15, 1.25, 20
_FIRST = 1.15  # times as long a whole rotation may compute: its first call finds caches less warm
_LOWEST = 10  # a tenth of the calls: on a busy host most share caches and cores with others, and few do not
_MORE_ROTATIONS, _WAITED_US = 3, 20_000.0  # to estimate a call; one that takes longer was not merely held up
OUTSTANDING_US = 250.0  # more after a sample is work: to ask a GPU alone took up to 71 us (H200)


@dataclass
class Pairs:
    """What calls compute, µs, in rotations of two kinds in turn: `among` others, as they are timed, and `alone`, where they are checked.
    `attempts` are the ratios of each attempt's own pairs."""

    among: list[list[float]] = field(default_factory=list)
    alone: list[list[float]] = field(default_factory=list)
    attempts: list[float] = field(default_factory=list)

    def add(self, among: list[list[float]], alone: list[list[float]]) -> None:
        """The pairs of one more attempt."""
        self.among, self.alone = self.among + among, self.alone + alone
        self.attempts.append(_ratio(among, alone))

    @property
    def ratio(self) -> float:
        """Times as long as among others a call computes alone."""
        return _ratio(self.among, self.alone)

    @property
    def whole(self) -> bool:
        """Whether a call holds all its work among others."""
        return self.ratio <= _WHOLE

    @property
    def shortened(self) -> bool:
        """Whether it leaves work out, after the last attempt: all pairs together say so, and most attempts by themselves."""
        count = len(self.attempts)
        return count >= ATTEMPTS and min(self.ratio, sorted(self.attempts)[(count - 1) // 2]) > _SHORTENED

    def __str__(self) -> str:
        """The ratio, and the figures that it stands on."""
        timed, checked = _lows(self.among), _lows(self.alone)
        return (
            f"a call computes {self.ratio:.2f} times as long where it is checked as where it is timed (lowest tenth of {len(self.among)} pairs: "
            f"{checked[0]:.1f} and {timed[0]:.1f} us of a call, {checked[1]:.1f} and {timed[1]:.1f} us of a rotation; limit {_SHORTENED:g})"
        )


def _ratio(among: list[list[float]], alone: list[list[float]]) -> float:
    """Times as long alone: of calls; or of whole rotations, over what cold caches may cost, in case one call does the work of others."""
    (call, rotation), timed = _lows(alone), _lows(among)
    return max(call / max(timed[0], 1e-3), rotation / _FIRST / max(timed[1], 1e-3))


def _lows(rotations: list[list[float]]) -> tuple[float, float]:
    """Of calls, and of rotations."""
    return _low([us for rotation in rotations for us in rotation]), _low(list(map(sum, rotations)))


def _low(values: list[float]) -> float:
    """The end of the lowest tenth."""
    return sorted(values)[len(values) // _LOWEST]


class HostTimer:
    """Wall time of calls on a CPU; `interval_us` is the least time between two readings of the clock."""

    name = "wall"

    def __init__(self, calls: Sequence[Call], interval_us: float, nbytes: int = 0) -> None:
        """Estimate one call's time from a rotation and choose how many calls a sample takes. A call reads and writes `nbytes`."""
        self.calls_list, self._cold_us = calls, _COLD_US + nbytes / _COLD_BYTES_PER_US
        self.returned: list[object] = [None] * len(calls)
        self.alone: list[float] = []
        self._computed, self._among = 0.0, list[float]()  # per call, µs: of the last calls, and of every sample
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
        taken = self._go_on(self.calls)
        self._among.append(self._computed)
        return taken

    def _go_on(self, count: int) -> float:
        """Mean time of the next `count` calls, after the pause."""
        pause()
        taken = self._timed(self._next, count)
        self._next += count
        return taken

    def rotate(self) -> None:
        """Every call once, after a pause; what the later ones compute is noted in `alone`: the first finds all caches cold."""
        pause()
        sets = len(self.calls_list)
        start, first = secrets.randbelow(sets), min(1, sets - 1)  # a sample begins anywhere, too
        self._timed(start, first)
        self._timed(start + first, sets - first)
        self.alone.append(self._computed)

    def pairs(self) -> int:
        """How many pairs of rotations an attempt is to compare: none of a single set, whose only call is a first one, nor where torch has
        several threads, which compute while they wait."""
        rotation_us = max(self.among_us([]) * len(self.calls_list), 1e-3)
        alike = torch.get_num_threads() == 1 and len(self.calls_list) > 1
        return max(1, min(_PAIRS, int(_PAIRS_US / rotation_us))) if alike else 0

    def among(self) -> list[float]:
        """A rotation whose place in a sample cannot be foreseen: what each call computes."""
        self._lead()
        return self._each()

    def lone(self, mark: Callable[[], None]) -> list[float]:
        """One that is to be checked, at such a place too: `mark` does in a moment what the check asks for, just before it."""
        self._lead()
        mark()
        return self._each()

    def _lead(self) -> None:
        """What goes before it in the sample. Both kinds follow a pause: on a busy host what had a core for longer is held up more often."""
        self._go_on(1 + secrets.randbelow(max(self.calls - len(self.calls_list), 1)))

    def _each(self, spent: Clock = process_time) -> list[float]:
        """What each call of the next rotation computes, µs."""
        calls, returned, sets, seconds = self.calls_list, self.returned, len(self.calls_list), [spent()]
        for i in range(self._next, self._next + sets):
            returned[i % sets] = calls[i % sets]()
            seconds.append(spent())
        self._next += sets
        return [(end - begin) * 1e6 for begin, end in pairwise(seconds)]

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
