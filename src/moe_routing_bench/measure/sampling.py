"""How samples are taken: warm-up, then blocks in random order until the interval is narrow enough or a limit is reached."""

import contextlib
import functools
import random
import secrets
from collections.abc import Callable, Iterator
from math import isfinite
from statistics import median
from time import perf_counter, sleep  # by their own names, as in `timers`
from typing import Any

import torch

from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import leftovers
from moe_routing_bench.measure.candidate import Candidate, half_width
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.verify import verify

_LONG_BLOCK_US = 25_000.0
_REST_SECONDS = 1.0  # after long turns: the clock that the power limit has lowered rises within a third of a second
TURNS = 6  # of two, nothing is known of how far turns differ; an even number, for orders and their opposites
# Until the card is in the state of the work: blocks of layers show no trend after a tenth of a second (H200).
_SETTLING_SECONDS = 0.3
_ASK_SECONDS = 0.05
_LIMITED_BLOCK_US = 100_000.0  # under the power limit the clock swings within a third of a second (H200)
Guarded = Callable[[str, str, Callable[[], object]], bool]  # (implementation, step, action) -> whether it went well


def warm_up(candidate: Candidate, milliseconds: float, device: str) -> int:
    """Call for at least that long and 3 times; returns the number of calls."""
    end, count = perf_counter() + milliseconds / 1e3, 0
    while count < 3 or perf_counter() < end:
        candidate.calls[count % len(candidate.calls)]()
        count += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return count


def settle(candidate: Candidate, settings: Settings) -> int:
    """Take blocks until the medians of two in a row agree within 1 %, or the block limit; returns the number of calls.

    The row field `settled` says whether they agreed.
    """
    medians: list[float] = []
    candidate.fields["settled"] = False
    while len(medians) < settings.settle_blocks and not candidate.fields["settled"]:
        medians.append(median([candidate.timer.sample() for _ in range(candidate.samples_per_block)]))
        candidate.fields["settled"] = len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= 0.01
    return len(medians) * candidate.samples_per_block * candidate.timer.calls


def power_limited(job: Job, alive: list[Candidate], gpu: Any) -> bool:
    """Whether the power limit holds the clock down while one of them runs for `turn_seconds`."""
    return any(_kept_busy(candidate, job.settings.turn_seconds, gpu.power_capped, True)[0] for candidate in alive)


def sample(job: Job, alive: list[Candidate], sets: Sets, gpu: Any, guarded: Guarded, limited: bool = False) -> None:
    """Blocks of samples of all implementations, in short turns or, where they are power `limited`, in long ones.

    Where the power limit binds, an implementation that draws less power lets the card cool for the next one, and times depend on the company:
    each is then timed in a state of its own. The card rests after that, so that ceilings are those of a rested card after the samples as
    they were before.
    """
    stop = (_long_turns if limited else _rounds)(job, alive, sets, gpu, guarded)
    if limited:
        sleep(_REST_SECONDS)
    for candidate in alive:
        width = _width(candidate)
        candidate.fields |= {
            "turns": "long" if limited else "short",
            "converged": width <= job.settings.target_half_width,
            "stop_reason": f"{stop}, {f'half-width {width:.2%}' if isfinite(width) else 'no interval'}",
        }


def _rounds(job: Job, alive: list[Candidate], sets: Sets, gpu: Any, guarded: Guarded) -> str:
    """A block of each per round, in random order, until all have converged or a cap is met; says which.

    Whether they have is looked at after `min_blocks` rounds, and each time that there are twice as many: every look is a chance to stop
    at an interval that is narrow by luck. Where `max_seconds` would end before `min_blocks` rounds, blocks have fewer samples.

    Before two rounds that cannot be foreseen, every implementation is checked again: before one of the first `min_blocks`, which
    is always reached, and before a later one.
    """
    settings, order = job.settings, random.Random(job.hash)
    surprises = {secrets.randbelow(settings.min_blocks), settings.min_blocks + secrets.randbelow(settings.max_blocks)}
    clock, rounds, look, share = _SampleClock(), 0, settings.min_blocks, 1.0

    def check(entry: Candidate) -> None:
        with clock.stopped():
            verify(job, entry, sets)

    def turn(entry: Candidate, samples: int) -> None:
        with clock.stopped():
            since = leftovers.lay(entry, sets)
        _block(entry, gpu, samples)
        with clock.stopped():
            leftovers.judge(job, entry, sets, since)

    while alive:
        if rounds in surprises:
            _each(alive, _entries(alive), guarded, "checking between samples", check)
        entries, before = _entries(alive), clock.seconds()
        _each(
            alive,
            order.sample(entries, len(entries)),
            guarded,
            "sampling",
            lambda candidate, share=share: turn(candidate, max(1, int(share * candidate.samples_per_block))),
        )
        rounds += 1
        if rounds == 1 and clock.seconds() > before:
            share = min(1.0, settings.max_seconds / settings.min_blocks / (clock.seconds() - before))
        if rounds == look:
            if all(_width(candidate) <= settings.target_half_width for candidate in alive):
                return "converged"
            look = min(2 * look, settings.max_blocks)
        if rounds >= settings.max_blocks:
            return "block cap"
        if rounds >= 3 and clock.seconds() > settings.max_seconds:
            return "time cap"
    return "nothing left"


class _SampleClock:
    """The time that samples take: a cap on it is none on checks."""

    def __init__(self) -> None:
        self._start, self._stopped = perf_counter(), 0.0

    def seconds(self) -> float:
        """So far."""
        return perf_counter() - self._start - self._stopped

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the time of a block out."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._stopped += perf_counter() - begin


def _long_turns(job: Job, alive: list[Candidate], sets: Sets, gpu: Any, guarded: Guarded) -> str:
    """Six long turns of each, in three orders drawn at random, each followed by its opposite: a steady drift moves none, and what the one
    before leaves behind differs from turn to turn, so that the interval over turns sees it.

    A turn begins with untimed work. Before a block that cannot be foreseen, in one of its turns, an implementation is checked, and
    kept busy for half of that again. Blocks are long, and longer where the limit bound in that turn. The energy of a call is that of
    the second half of the untimed work: the board's counter lags by up to a tenth of a second, at the end of that half as at its
    beginning. The first turn of all begins with `turn_seconds` of work, because the card has rested.
    """
    settings, entries, generator = job.settings, _entries(alive), random.Random(job.hash)
    count, untimed = -(-settings.min_blocks // TURNS), _untimed_seconds(settings)
    surprises = {id(entry): secrets.randbelow(TURNS * count) for _, entry in entries}

    def turn(entry: Candidate, number: int) -> None:
        _kept_busy(entry, untimed / 2)  # until the heat of the one before is gone
        before = gpu.energy_mj()
        limited, samples = _kept_busy(entry, untimed / 2, gpu.power_capped)
        if before is not None:
            entry.energies.append((gpu.energy_mj() - before) / (samples * entry.timer.calls))
        since = leftovers.lay(entry, sets)
        for _ in range(count):
            if len(entry.blocks) == surprises[id(entry)]:
                leftovers.judge(job, entry, sets, since)
                verify(job, entry, sets)
                _kept_busy(entry, untimed / 2)
                since = leftovers.lay(entry, sets)
            _block(entry, gpu, 1, _LIMITED_BLOCK_US if limited else _LONG_BLOCK_US)
            entry.turns.append(number)
        leftovers.judge(job, entry, sets, since)

    order: list[tuple[Candidate, Candidate]] = []
    for number in range(TURNS):
        order = order[::-1] if number % 2 else generator.sample(entries, len(entries))
        if number == 0:
            first = functools.partial(_kept_busy, seconds=settings.turn_seconds)
            _each(alive, order[:1], guarded, "sampling", first)
        _each(alive, order, guarded, "sampling", functools.partial(turn, number=number))
    return f"{TURNS} long turns"


def _untimed_seconds(settings: Settings) -> float:
    """Work before the blocks of a long turn: over all turns twice `turn_seconds`, unless a turn is too short to settle in."""
    return min(settings.turn_seconds, max(2 * settings.turn_seconds / TURNS, _SETTLING_SECONDS))


def _entries(alive: list[Candidate]) -> list[tuple[Candidate, Candidate]]:
    """Each candidate with each of its entries."""
    return [(candidate, entry) for candidate in alive for entry in candidate.entries]


def _each(
    alive: list[Candidate],
    entries: list[tuple[Candidate, Candidate]],
    guarded: Guarded,
    step: str,
    action: Callable[[Candidate], object],
) -> None:
    """Do something with each entry; a candidate with an entry that fails is out."""
    for candidate, entry in entries:
        if candidate in alive and not guarded(candidate.name, step, functools.partial(action, entry)):
            alive.remove(candidate)


def _kept_busy(
    candidate: Candidate, seconds: float, seen: Callable[[], bool] = lambda: False, stop: bool = False
) -> tuple[bool, int]:
    """Sample untimed for so long, with `stop` until `seen` at most; returns whether it was seen, and how many samples there were.

    `seen` asks the driver, during which the card may rest: rarely, and not in the last moments before samples that count.
    """
    begin, ever, count = perf_counter(), False, 0
    end, ask = begin + seconds, begin + min(_ASK_SECONDS, seconds / 3)
    while perf_counter() < end and not (stop and ever):
        candidate.timer.sample()
        count += 1
        if ask <= perf_counter() < end - min(_ASK_SECONDS, seconds / 3):
            ever, ask = seen() or ever, perf_counter() + _ASK_SECONDS
    return ever, count


def _block(entry: Candidate, gpu: Any, least: int, least_us: float = 0.0) -> None:
    """One more block of at least so many samples that take at least so long together, and the state of the GPU after it."""
    samples: list[float] = []
    timer, begin = entry.timer, perf_counter()
    while len(samples) < least or sum(samples) * timer.calls < least_us:
        samples.append(timer.sample())
    entry.spans.append((perf_counter() - begin) * 1e6)
    entry.blocks.append(samples)
    entry.clocks.append(gpu.sm_clock_mhz() if gpu else None)
    entry.powers.append(gpu.power_w() if gpu else None)
    entry.slow.append(gpu.slowdown_bits() if gpu else 0)


def _width(candidate: Candidate) -> float:
    """The wider half-width of the published intervals of a candidate and of its twin."""
    return max(half_width(entry) for entry in candidate.entries)
