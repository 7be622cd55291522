"""How samples are taken: warm-up, then blocks in random order until the interval is narrow enough or a limit is reached."""

import functools
import random
import secrets
from collections.abc import Callable
from statistics import median
from time import perf_counter  # by its own name, as in `timers`
from typing import Any

import torch

from moe_routing_bench.grid.job import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.measure import statistics
from moe_routing_bench.measure.candidate import Candidate
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.verify import verify

Guarded = Callable[[str, str, Callable[[], object]], bool]  # (implementation, step, action) -> whether it went well


def warm_up(one: Candidate, milliseconds: float, device: str) -> int:
    """Call for at least that long and 3 times; returns the number of calls."""
    end, count = perf_counter() + milliseconds / 1e3, 0
    while count < 3 or perf_counter() < end:
        one.calls[count % len(one.calls)]()
        count += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return count


def settle(one: Candidate, settings: Settings) -> int:
    """Take blocks until the medians of two in a row agree within 1 %, or the block limit; returns the number of calls.

    The row field `settled` says whether they agreed.
    """
    medians: list[float] = []
    one.fields["settled"] = False
    while len(medians) < settings.settle_blocks and not one.fields["settled"]:
        medians.append(median([one.timer.sample() for _ in range(one.samples_per_block)]))
        one.fields["settled"] = len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= 0.01
    return len(medians) * one.samples_per_block * one.timer.calls


def sample(job: Job, alive: list[Candidate], sets: Sets, gpu: Any, guarded: Guarded) -> None:
    """Blocks of samples, one per implementation and round, in random order, until all have converged or a cap is met.

    Before two rounds that nobody can foresee, every implementation is checked again: before one of the first `min_blocks`, which
    is always reached, and before a later one.
    """
    settings, order = job.settings, random.Random(job.hash)
    surprises = {secrets.randbelow(settings.min_blocks), settings.min_blocks + secrets.randbelow(settings.max_blocks)}
    start, stop, rounds = perf_counter(), "", 0
    while alive and not stop:
        if rounds in surprises:
            begin = perf_counter()
            for one in list(alive):
                for entry in one.entries:
                    if one in alive and not guarded(
                        one.name, "checking between samples", lambda entry=entry: verify(job, entry, sets)
                    ):
                        alive.remove(one)
            start += perf_counter() - begin  # the time cap is on samples
        entries = [(one, entry) for one in alive for entry in one.entries]
        for one, entry in order.sample(entries, len(entries)):
            if one in alive and not guarded(one.name, "sampling", functools.partial(_block, entry, gpu)):
                alive.remove(one)
        rounds += 1
        if rounds >= settings.min_blocks and rounds % 5 == 0:
            if all(_width(one) <= settings.target_half_width for one in alive):
                stop = "converged"
            elif rounds >= settings.max_blocks:
                stop = "block cap"
        if not stop and rounds >= 3 and perf_counter() - start > settings.max_seconds:
            stop = "time cap"
    for one in alive:
        width = _width(one)
        one.fields |= {
            "converged": width <= settings.target_half_width,
            "stop_reason": f"{stop}, half-width {width:.2%}",
        }


def _block(entry: Candidate, gpu: Any) -> None:
    """One more block of samples, and the state of the GPU after it."""
    entry.blocks.append([entry.timer.sample() for _ in range(entry.samples_per_block)])
    entry.clocks.append(gpu.sm_clock_mhz() if gpu else None)
    entry.powers.append(gpu.power_w() if gpu else None)
    entry.slow.append(gpu.slowdown_bits() if gpu else 0)


def _width(one: Candidate) -> float:
    return statistics.half_width([sorted(b)[len(b) // 2] for b in one.blocks])


def kept(one: Candidate) -> list[bool]:
    """Which blocks count: not those with a slowdown bit, unless that would leave none.

    A low clock alone is no reason: under the power limit it is the state that such work is in.
    """
    good = [not slow for slow in one.slow]
    return good if any(good) else [True] * len(good)
