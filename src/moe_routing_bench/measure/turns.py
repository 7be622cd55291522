"""The timer of an isolated implementation: the judge owns inputs, outputs, references and the clock, and the calls are in another process.

What that process says is not believed. Every turn begins with poisoned elements in all outputs, and is wrong where one of them is left.
On a CPU a turn is one rotation, and no call has seen its values before: work that is left out is missing in the outputs. On a GPU a turn
holds many rotations, and is as long as its time says where a lone rotation, and one on new values, take as long.
"""

import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, sleep
from typing import Any

import torch

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import memory, sharing
from moe_routing_bench.measure.candidate import Candidate, Failure
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.isolation import Shown
from moe_routing_bench.measure.runners import Process, Quiet
from moe_routing_bench.measure.timers import LEAST_SETS, MOST_ROTATION_US
from moe_routing_bench.measure.verify import checked, differences

_SHARE = 1 / 200  # of a turn, that a hand-over may take
_LEAST_TURN_US = 50_000.0  # on a GPU
_LONGER = 1.3  # times as long a call may take in a lone rotation, or on new values, of a GPU
# Time to launch a lone rotation and to wait for it, besides the hand-over: on an H200 a graph after a rest took 0.42 ms longer than others.
_LAUNCH_US = 400.0
_BUSY = 8  # times as long as it computes may a call take for want of a core, where it is chosen how many sets take part
# Times the time of a turn that each of its threads may compute for; and a single thread in all turns together, besides half a millisecond.
_CORES, _CORES_IN_ALL, _SLACK_SECONDS = 1.2, 1.05, 5e-4
_SLOWER_AT_FIRST = 4  # times as long as later may calls take while it is chosen how many sets take part
_OVERHEAD_SHARE = 0.4  # share of launch and hand-over in the few rotations whose time is compared with that of many
_TRIES, _TURNS = 3, 5
_COMPARED = 8  # times that few rotations are compared with many before work counts as left out
_LUCKY = 2  # turns that may be short by chance
_LONG_US = 50_000.0  # of a rotation: then one is enough at a time
_IN_A_ROW = 5  # few rotations right after few others
_CHECKED = 2  # sets that are compared with the reference on new values
_LOOKS = 16  # turns of a GPU, in the mean, until all outputs of one are compared
_NEW_LOOKS = 4  # turns of a CPU, in the mean, until outputs of `_CHECKED` sets are
_JUDGED = 10  # turns of a CPU of which they are in any case
_MOST_PAUSE = 1e-3


@dataclass(frozen=True)
class Turn:
    """How long a process took for a turn, as `spent` counts it, and how long its threads computed for it, seconds."""

    seconds: float
    computed: float

    @property
    def us(self) -> float:
        """Its time in microseconds."""
        return self.seconds * 1e6


class Turns:
    """The timer of an isolated implementation: what `HostTimer` is of a call, with the clock in this process and the calls in another."""

    name = "wall"

    def __init__(self, job: Job, candidate: Candidate, sets: Sets, process: Process, quiet: Quiet) -> None:
        """Bind it to the sets, let it warm up, and choose how many rotations a sample holds."""
        self._job, self._candidate, self._sets, self._process, self._quiet = job, candidate, sets, process, quiet
        sets.poison()  # the buffers hold answers of others
        reply = process.bind(sets)
        process.alone()
        self._kind = "cpu" if process.device == "cpu" else "cuda"
        one = self._kind == "cpu"  # rotation at a time, of all sets
        self.sets = _whole(reply, "sets", len(sets), len(sets))
        rotations = _whole(reply, "rotations", 1, 1 if one else 1 << 20)
        self.warmup_calls = _whole(reply, "warmup_calls", 1, 1 << 40)
        self._computed = self._passed = 0.0
        self._request, self._count, self._rotations = "rotate", 1, {"rotate": 1}
        least_us = max(job.settings.interval_us, process.overhead_us / _SHARE)
        if one:
            self._limit(max(job.settings.check_seeds, ceil(least_us * self.sets / self._once_us("rotate"))))
        elif reply.get("launched"):
            self._limit(LEAST_SETS)
            self._limit(max(self.sets, int(MOST_ROTATION_US * self.sets / self._once_us("rotate"))))
        wanted = getattr(bench_of(job).definition(), "SHOWN", ())
        shown = functools.partial(self.handed_on, wanted=wanted)
        self.returned: Sequence[Any] = Shown(self.sets, shown) if wanted else [None] * self.sets
        if not one:
            self._rotate_for(max(least_us, _LEAST_TURN_US), rotations)
        self.calls = self.sets * self._rotations[self._request] * self._count

    def _limit(self, count: int) -> None:
        """Let so many sets take part, if there are."""
        count = min(count, len(self._sets))
        if count != self.sets:
            self._process.ask("limit", count)
            self.sets = count

    def _rotate_for(self, least_us: float, rotations: int) -> None:
        """Choose how many rotations a turn of a GPU holds; a graph may hold several of them."""
        once = self._once_us("rotate")
        if rotations > 1 and once < least_us:
            self._request, self._rotations["run"] = "run", rotations
            once = self._once_us("run")
        self._count = max(1, -(-int(least_us) // max(1, int(once))))

    def _once_us(self, request: str) -> float:
        """How long one takes, for a guess: where other processes have the cores as well, what it computes, or few sets and rotations would be left."""
        turns = [self._turn(request, 1) for _ in range(2)]
        busy = _BUSY if self._kind == "cpu" else 1
        return min(max(turn.seconds / busy, min(turn.seconds, turn.computed)) for turn in turns) * 1e6

    def sample(self) -> float:
        """Mean time of a call in a turn, microseconds; `Failure` where its outputs are wrong."""
        return self._looked_at(self._request, self._count).seconds * 1e6 / self.calls

    def rotate(self) -> None:
        """Every call once."""
        self._turn("rotate", 1)

    check = rotate

    def begin_turn(self) -> bool:
        """False: a sample is a turn, and looks at the outputs itself."""
        return False

    def reached(self) -> list[int]:
        """None that are still to be looked at."""
        return []

    def alone_us(self) -> float:
        """0: `judge` compares it with what is timed."""
        return 0.0

    def among_us(self, blocks: Sequence[Sequence[float]]) -> float:
        """1: `judge` compares what turns cost."""
        return 1.0

    def pairs(self) -> int:
        """0: `judge` compares rotations with samples."""
        return 0

    def elsewhere(self) -> float:
        """0: every turn finds out."""
        return 0.0

    def outstanding_us(self) -> float:
        """A runner is stopped, and its device found idle, after every turn."""
        return 0.0

    def judge(self, sign: Callable[[], object]) -> None:
        """`Failure` where work is left out, answers are remembered, or a second core did some of it. Gives a `sign` of life before every
        attempt."""
        self._process.believed()
        (self._compared_on_new_values if self._kind == "cpu" else self._few_with_many)(sign)

    def _compared_on_new_values(self, sign: Callable[[], object]) -> None:
        """Turns of which outputs are compared in any case; and whether a call of one thread computed for longer than it took."""
        for number in range(_JUDGED):
            sign()
            if self._looked_at("rotate", 1, look=True).seconds * 1e6 > _LONG_US and number:
                break
        if self._process.threads == 1 and self._computed > _CORES_IN_ALL * self._passed + _SLACK_SECONDS:
            raise self._several_cores(self._computed / self._passed)

    def _few_with_many(self, sign: Callable[[], object]) -> None:
        """`Failure` where few rotations cost more than many, or where new values do. Few is one, but as many as a hand-over is little of."""
        many = self._rotations[self._request] * self._count
        overhead_us = self._process.least_handover_us + _LAUNCH_US
        timed, alone, known, novel = [], [], [], []
        longest = max(self._turn("rotate", 1).us, 1e-3)
        if longest < _LONG_US:  # the first may have waited for others, which would make few out of many
            longest = max(min(longest, *(self._turn("rotate", 1).us for _ in range(2))), 1e-3)
        few = max(1, int(overhead_us / _OVERHEAD_SHARE / longest))
        turns = _TURNS if longest < _LONG_US else 1
        left_out, remembered = 0.0, 0.0
        if self.sets < len(self._sets) and (slower := MOST_ROTATION_US / longest) > _SLOWER_AT_FIRST:
            raise Failure("incorrect", f"calls took {slower:.1f} times as long while the number of sets was chosen")
        for _ in range(_COMPARED):
            sign()
            for _ in range(turns):
                timed.append(self._looked_at(self._request, self._count).us / many)
                for i in range(_IN_A_ROW if longest < _LONG_US else 1):
                    alone.append((self._looked_at("rotate", few, pause=i == 0).us - overhead_us) / few)
                self._sets.novel()
                novel.append(self._turn("rotate", 1).us - overhead_us)
                if len(novel) % turns == 0:
                    self._right([])
                self._sets.novel()  # so that the process rests as long, and its caches are as cold
                self._sets.load(self._sets.base)
                known.append(self._turn("rotate", 1).us)
            left_out, remembered = min(alone) / _common(timed), min(novel) / _common(known)
            if max(left_out, remembered) <= _LONGER:
                return
        ratio, where, verdict, checked_us, timed_us = max(
            (remembered, "on new values as on known ones", "answers are remembered", min(novel), _common(known)),
            (left_out, f"in {few} rotations as among {many}", "work is left out", min(alone), _common(timed)),
        )
        figures = f"{len(timed)} turns: at least {checked_us:.0f}, and {timed_us:.0f} us a rotation; limit {_LONGER:g}"
        raise Failure("incorrect", f"a call takes {ratio:.2f} times as long {where} ({figures}): {verdict}")

    def fields(self) -> dict[str, object]:
        """Row fields that the process has."""
        return self._process.fields()

    def _looked_at(self, request: str, count: int, pause: bool = True, look: bool = False) -> "Turn":
        """A turn after which a few elements of all outputs are right, and now and then, or with `look`, all of some sets."""
        if self._kind == "cpu":
            return self._of_new_values(request, count, look)
        self._sets.poison()  # where it takes no time, all of them
        turn, left = self._scarred(request, count, pause)
        if left or secrets.randbelow(_LOOKS) == 0:
            check = differences(self._job, self._candidate, self._sets)
            if check.error:
                raise Failure("incorrect", f"after a timed turn: {check.error}")
        return turn

    def _of_new_values(self, request: str, count: int, look: bool) -> "Turn":
        """The same on values that no call has seen."""
        try:
            self._sets.novel()
            turn, left = self._scarred(request, count)
            if left or look or secrets.randbelow(_NEW_LOOKS) == 0:
                self._right(left)
            return turn
        finally:
            self._sets.load(self._sets.base)

    def _scarred(self, request: str, count: int, pause: bool = True) -> tuple["Turn", list[int]]:
        """A turn that begins with a few elements of all outputs poisoned, after a pause; and the sets that have some left."""
        self._sets.scar(places := self._sets.places())
        if pause:
            sleep(secrets.randbelow(1000) / 1000 * _MOST_PAUSE)
        return self._turn(request, count), self._sets.scarred(places, range(self.sets))

    def _turn(self, request: str, count: int) -> "Turn":
        """So many rotations, or graphs of several. `Failure` where work goes on elsewhere, or went on in other processes or threads."""
        for _ in range(_TRIES):  # a host that is busy once looks like a device that is
            self._quiet.before()
            before, begin = self._process.cpu_seconds(), perf_counter()
            reply, seconds = self._process.ask(request, count)
            computed, whole = self._process.cpu_seconds() - before, perf_counter() - begin
            self._process.alone()
            threads = self._process.threads
            # Several threads look out for more to do, by computing, until they are stopped: on a busy CPU a while after the reply.
            self._computed, self._passed = self._computed + computed, self._passed + seconds
            if self._kind == "cpu" and computed > _CORES * threads * (seconds if threads == 1 else whole) + 2e-3:
                raise self._several_cores(computed / seconds)
            if not (busy := self._quiet.goes_on()):
                return Turn(self._process.spent(reply, seconds, self.sets * self._rotations[request] * count), computed)
        self._process.end()
        if any(self._quiet.goes_on() for _ in range(_TRIES)):
            raise Failure("timeout", f"the GPU was at work for others, or the host: {busy}")
        raise Failure("incorrect", f"the GPU was still at work after the call had returned: {busy}")

    def _several_cores(self, times: float) -> Failure:
        said = f"{times:.2f} times as long as the calls took, on {self._process.threads} threads"
        return Failure("incorrect", f"it computed for {said}")

    def _right(self, left: list[int]) -> None:
        """`Failure` where outputs of a few sets are wrong, on the inputs that they hold now; of those with poison `left` in them, too."""
        bench, cell, sets = bench_of(self._job), self._job.cell, self._sets
        chosen = [left[place] for place in memory.some(_CHECKED, len(left))]
        for i in dict.fromkeys((*memory.some(_CHECKED, self.sets), *chosen)):
            expected = bench.definition().reference(cell, sets.inputs[i])
            outputs = sets.outputs[i] | (self.returned[i] or {})
            check = checked(bench, self._candidate.name, cell, sets.inputs[i], sets.outputs[i], outputs, expected)
            if check.error:
                raise Failure("incorrect", f"on new values: {check.error}")

    def shown(self) -> dict[str, torch.Tensor]:
        """Tensors of the first set by name: operands, and what the stages of a composite handed on."""
        return self.handed_on(0) | self._sets.inputs[0] | self._sets.outputs[0]

    def handed_on(self, i: int, wanted: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        """The `wanted` tensors, or all but operands, that the call of set i returned."""
        reply, _ = self._process.ask("show", i, wanted)
        device, tensors = next(iter(self._sets.outputs[i].values())).device, {}
        try:
            for name, kind, shape, place in reply["shown"]:
                tensor = sharing.read(self._process.shown, place, getattr(torch, kind), tuple(shape))
                tensors[str(name)] = tensor.to(device)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError, RuntimeError) as error:
            raise Failure("incorrect", "its process shows outputs of stages that are none") from error
        return tensors


def _common(times: list[float]) -> float:
    """The least that is no luck: fewer turns than `_LUCKY` and one may be shorter by chance."""
    return max(sorted(times)[: _LUCKY + 1][-1], 1e-3)


def _whole(reply: dict[str, Any], name: str, least: int, most: int) -> int:
    """A whole number that a runner says, from `least` to `most`."""
    number = reply.get(name)
    if type(number) is not int or not least <= number <= most:
        raise Failure("incorrect", f"its process says {name} {number!r}, not {least} to {most}"[:200])
    return number
