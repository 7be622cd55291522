"""How samples are taken: warm-up, then blocks in random order until the interval is narrow enough or a limit is reached."""

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from moe_routing_bench.grid.job import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.measure import statistics
from moe_routing_bench.measure.candidate import Candidate

Guarded = Callable[[str, str, Callable[[], object]], bool]  # (implementation, step, action) -> whether it went well


def warm_up(one: Candidate, milliseconds: float, device: str) -> int:
    """Call for at least that long and 3 times; returns the number of calls."""
    end, count = time.perf_counter() + milliseconds / 1e3, 0
    while count < 3 or time.perf_counter() < end:
        one.calls[count % len(one.calls)]()
        count += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return count


def settle(one: Candidate, settings: Settings) -> int:
    """Take blocks until the medians of two in a row agree within 1 %, or the block limit; returns the number of calls."""
    medians: list[float] = []
    while len(medians) < settings.settle_blocks:
        medians.append(median([one.timer.sample() for _ in range(one.samples_per_block)]))
        if len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= 0.01:
            break
    return len(medians) * one.samples_per_block * one.timer.calls


def sample(job: Job, alive: list[Candidate], gpu: Any, guarded: Guarded) -> None:
    """Blocks of samples, one an implementation a round, in random order, until all have converged or a cap is met."""
    settings, order = job.settings, random.Random(job.hash)
    start, stop = time.perf_counter(), ""
    while alive and not stop:
        for one in order.sample(alive, len(alive)):

            def block(one: Candidate = one) -> None:
                one.blocks.append([one.timer.sample() for _ in range(one.samples_per_block)])
                one.clocks.append(gpu.sm_clock_mhz() if gpu else None)
                one.slow.append(gpu.slowdown_bits() if gpu else 0)

            if not guarded(one.name, "sampling", block):
                alive.remove(one)
        rounds = len(alive[0].blocks) if alive else 0
        if rounds >= settings.min_blocks and rounds % 5 == 0:
            if all(_width(one) <= settings.target_half_width for one in alive):
                stop = "converged"
            elif rounds >= settings.max_blocks:
                stop = "block cap"
        if not stop and rounds >= 3 and time.perf_counter() - start > settings.max_seconds:
            stop = "time cap"
    for one in alive:
        width = _width(one)
        one.fields |= {
            "converged": width <= settings.target_half_width,
            "stop_reason": f"{stop}, half-width {width:.2%}",
        }


def _width(one: Candidate) -> float:
    return statistics.half_width([sorted(b)[len(b) // 2] for b in one.blocks])


def kept(one: Candidate) -> list[bool]:
    """Which blocks count: not those at a low clock or with a slowdown bit, unless that would leave none."""
    clocks = sorted(c for c in one.clocks if c)
    low = 0.9 * clocks[len(clocks) // 2] if clocks else 0
    good = [not s and (c is None or c >= low) for c, s in zip(one.clocks, one.slow, strict=True)]
    return good if any(good) else [True] * len(good)
