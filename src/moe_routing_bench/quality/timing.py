"""How long a training step takes with the machine to itself, whole and by stage: a short phase of its own."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_routing_bench.quality import runs
from moe_routing_bench.quality.clock import NO_CLOCK, STAGES, StageClock
from moe_routing_bench.quality.run import Run
from moe_routing_bench.quality.train import Training, weights

WARMUP, BLOCKS, BLOCK, PROFILED = 5, 6, 5, 10  # steps; blocks of steps that are timed whole


def measure(run: Run, trained: Path, out: Path, device: str) -> dict[str, Any]:
    """Time steps of a run from its last weights (`trained` is the run's Parquet), which route as training did at its end.

    Medians: the whole step without marks, then its stages with them, scaled to sum to the whole. Writes one row to `out`.
    """
    training = Training(run, device)
    training.load(torch.load(weights(trained), map_location=device, weights_only=True))
    first = max(0, run.steps - WARMUP - BLOCKS * BLOCK - PROFILED)
    steps = itertools.count(first)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP):
        training.step(next(steps))
    whole = median(sum(_timed(training, steps, BLOCK).values()) / BLOCK for _ in range(BLOCKS))
    clock = StageClock(device)
    for layer in training.model.ffns:
        layer.clock = clock
    profiles = [_timed(training, steps, 1, clock) for _ in range(PROFILED)]
    for layer in training.model.ffns:
        layer.clock = NO_CLOCK
    stages = {stage: median(one[stage] for one in profiles) for stage in STAGES}
    scale = whole / sum(stages.values())
    row = {
        "schema_version": runs.SCHEMA_VERSION, "run": run.name, "step_ms": whole, "train_tokens_per_s": 1e3 * run.tokens_per_step / whole,
        **{f"{stage}_ms": ms * scale for stage, ms in stages.items()}, "timed_alone": True,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }  # fmt: skip
    runs.write(out, [row], run.spec)
    return row


def _timed(training: Training, steps: Iterator[int], count: int, clock: StageClock | None = None) -> dict[str, float]:
    """Milliseconds by stage of the next `count` steps; all of it is `rest` without marks."""
    clock = clock or StageClock(training.device)
    clock.begin("rest")
    for step in itertools.islice(steps, count):
        training.step(step)
    return clock.stop()
