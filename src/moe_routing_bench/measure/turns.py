"""The timer of an isolated implementation: the judge owns inputs, outputs, references and the clock, and the calls are in another process.

What that process says is not believed: every turn begins with poisoned elements in all outputs, and is wrong where one of them is left;
turns are as long as their time says where a lone rotation, and one on values that no call has seen, take as long.
"""

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
from moe_routing_bench.measure.inputs import LEAST_ROTATION_US, Sets
from moe_routing_bench.measure.runners import Process, Quiet
from moe_routing_bench.measure.verify import checked, differences

_SHARE = 1 / 200  # of a turn, that a hand-over may take
_LEAST_TURN_US = {"cpu": 0.0, "cuda": 50_000.0}
# Times as long a call may take in a lone rotation, or on new values: up to the first number it holds all its work, above the second it does
# not. In eight attempts 25 honest calls next to 12 busy processes on two cores were 0.96 to 1.6 times as long, 8 on a quieter host up to 1.23.
_WHOLE, _LONGER = {"cpu": 1.4, "cuda": 1.3}, {"cpu": 1.7, "cuda": 1.3}
# Time to launch a lone rotation and to wait for it, besides the hand-over: on an H200 a graph after a rest took 0.42 ms longer than others.
_LAUNCH_US = {"cpu": 20.0, "cuda": 400.0}
_BUSY = 8  # times as long as it computes may a call take for want of a core, where it is chosen how many a turn holds
_CORES = 1.2  # times the time of a turn that each of its threads may compute for
_BESIDE = {"cpu": 0.05, "cuda": 0.4}  # share of both in the few rotations whose time is compared with that of many
_TRIES, _TURNS = 3, 5
# Times that few rotations are compared with many before work counts as left out. The least of more turns is nearer to the cost on a quiet host:
# on a busy one honest calls were 1.85 times as long in three tries. A call that leaves work out stays as far away.
_COMPARED = 8
# The same of a call of several threads, within seconds: on a busy CPU they wait for one another by computing.
_COMPARED_WAITING, _WAITING_SECONDS = 40, 10.0
_LONG_US = 50_000.0  # of a rotation: then one is enough at a time
# Few rotations right after few others: on a busy host the caches are no longer as cold as after a rest, in which others took them.
_IN_A_ROW = 5
_CHECKED = 2  # sets that are compared with the reference on new values
_LOOKS = 16  # turns, in the mean, until all outputs of one are compared
_MOST_PAUSE = 1e-3


@dataclass(frozen=True)
class Turn:
    """How long a process took for a turn, as `spent` counts it, and how long its threads computed for it, seconds."""

    seconds: float
    computed: float


class Turns:
    """The timer of an isolated implementation: what `HostTimer` is of a call, with the clock in this process and the calls in another."""

    name = "wall"

    def __init__(self, job: Job, candidate: Candidate, sets: Sets, process: Process, quiet: Quiet) -> None:
        """Bind it to the sets, let it warm up, and choose how many rotations a sample holds."""
        self._job, self._candidate, self._sets, self._process, self._quiet = job, candidate, sets, process, quiet
        sets.poison()  # the buffers hold answers of others
        reply = process.bind(sets)
        process.alone()
        self.sets, rotations = _whole(reply, "sets", len(sets)), _whole(reply, "rotations", 1 << 20)
        self.warmup_calls = _whole(reply, "warmup_calls", 1 << 40)
        self._kind = "cpu" if process.device == "cpu" else "cuda"
        least_us = max(job.settings.interval_us, _LEAST_TURN_US[self._kind], process.overhead_us / _SHARE)
        self._request, self._count, self._rotations = "rotate", 1, 1
        once = self._once_us("rotate")
        if self._kind == "cpu":  # where no cache has to be cold
            needed = max(job.settings.check_seeds, ceil(LEAST_ROTATION_US * self.sets / once))
            if needed < self.sets:
                process.ask("limit", needed)
                once, self.sets = once * needed / self.sets, needed
        wanted = getattr(bench_of(job).definition(), "SHOWN", ())
        self.returned: Sequence[Any] = Shown(self, wanted) if wanted else [None] * self.sets
        if rotations > 1 and once < least_us:
            self._request, self._rotations = "run", rotations
            once = self._once_us("run")
        self._count = max(1, -(-int(least_us) // max(1, int(once))))
        self.calls = self.sets * self._rotations * self._count

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
        """`Failure` where few rotations cost more than many, or where new values do: work is left out, or answers are remembered; a doubt where
        they may. Gives a `sign` of life before every attempt.

        Few is one, but as many as a hand-over is little of. On a CPU the cost is the time that the process computed, which other
        processes change less than the time that passed.
        """
        self._process.believed()
        many = self._rotations * self._count
        beside = self._process.least_handover_us + _LAUNCH_US[self._kind]
        timed, alone, known, novel = [], [], [], []
        longest = max(self._cost(self._turn("rotate", 1)), 1e-3)
        if longest < _LONG_US:  # the first may have waited for others, which would make few out of many
            longest = max(min(longest, *(self._cost(self._turn("rotate", 1)) for _ in range(2))), 1e-3)
        few = max(1, int(beside / _BESIDE[self._kind] / longest))
        turns = _TURNS if longest < _LONG_US else 1
        end, left_out, remembered = perf_counter() + _WAITING_SECONDS, 0.0, 0.0
        for attempt in range(_COMPARED if self._process.threads == 1 else _COMPARED_WAITING):
            sign()
            for _ in range(turns):
                timed.append(self._cost(self._looked_at(self._request, self._count)) / many)
                for i in range(_IN_A_ROW if longest < _LONG_US else 1):
                    alone.append((self._cost(self._looked_at("rotate", few, pause=i == 0)) - beside) / few)
                self._sets.novel()
                novel.append(self._cost(self._turn("rotate", 1)) - beside)
                if len(novel) % turns == 0:
                    self._right()
                self._sets.novel()  # so that the process rests as long, and its caches are as cold
                self._sets.load(self._sets.base)
                known.append(self._cost(self._turn("rotate", 1)))
            left_out, remembered = min(alone) / max(min(timed), 1e-3), min(novel) / max(min(known), 1e-3)
            if max(left_out, remembered) <= _WHOLE[self._kind]:
                return
            if attempt >= _COMPARED and perf_counter() > end:
                break
        ratio, where, verdict, checked_us, timed_us = max(
            (remembered, "on new values as on known ones", "answers are remembered", min(novel), min(known)),
            (left_out, f"in {few} rotations as among {many}", "work is left out", min(alone), min(timed)),
        )
        figures = f"least of {len(timed)} turns: {checked_us:.0f} and {timed_us:.0f} us a rotation; limit {_LONGER[self._kind]:g}"
        reason = f"a call takes {ratio:.2f} times as long {where} ({figures})"
        if ratio > _LONGER[self._kind]:
            raise Failure("incorrect", f"{reason}: {verdict}")
        self._candidate.doubts.append(f"{reason}, on a host too busy to tell whether {verdict}")

    def fields(self) -> dict[str, object]:
        """Row fields that the process has."""
        return self._process.fields()

    def _cost(self, turn: "Turn") -> float:
        """Microseconds of a turn that say how much work it held."""
        return (turn.computed if self._kind == "cpu" else turn.seconds) * 1e6

    def _looked_at(self, request: str, count: int, pause: bool = True) -> "Turn":
        """A turn after which a few elements of all outputs, and now and then all, are right."""
        if self._kind == "cuda":  # where it takes no time, all of them
            self._sets.poison()
        places = self._sets.scar()
        if pause:
            sleep(secrets.randbelow(1000) / 1000 * _MOST_PAUSE)
        turn = self._turn(request, count)
        if self._sets.scarred(places, range(self.sets)) or secrets.randbelow(_LOOKS) == 0:
            check = differences(self._job, self._candidate, self._sets)
            if check.error:
                raise Failure("incorrect", f"after a timed turn: {check.error}")
        return turn

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
            if self._kind == "cpu" and computed > _CORES * threads * (seconds if threads == 1 else whole) + 2e-3:
                times = f"{computed / seconds:.1f} times as long as the call took"
                raise Failure("incorrect", f"it computed for {times}, on {threads} threads")
            if not (busy := self._quiet.goes_on()):
                return Turn(self._process.spent(reply, seconds), computed)
        self._process.end()
        raise Failure("incorrect", f"the GPU was still at work after the call had returned: {busy}")

    def _right(self) -> None:
        """`Failure` where outputs of a few sets are wrong, on the inputs that they hold now."""
        bench, cell, sets = bench_of(self._job), self._job.cell, self._sets
        for i in memory.some(_CHECKED, self.sets):
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


class Shown(Sequence[Any]):
    """What the call of each set returned besides its outputs, which are those that were given; asked for when it is looked at."""

    def __init__(self, turns: Turns, wanted: tuple[str, ...]) -> None:
        self._turns, self._wanted = turns, wanted

    def __len__(self) -> int:
        return self._turns.sets

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._turns.handed_on(index, self._wanted)


def _whole(reply: dict[str, Any], name: str, most: int) -> int:
    """A whole number that a runner says, from 1 to `most`."""
    number = reply.get(name)
    if type(number) is not int or not 1 <= number <= most:
        raise Failure("incorrect", f"its process says {name} {number!r}"[:200])
    return number
