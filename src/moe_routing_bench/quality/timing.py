"""How long a training step takes with the machine to itself, whole and by stage: a short phase of its own.

A model this small is launched more slowly than a GPU computes it, and that by a factor which depends on the host. So on a
GPU the step is replayed as a CUDA graph; what it takes when launched from Python is stored beside it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.quality import runs
from moe_routing_bench.quality.clock import STAGES, Clock, StageClock
from moe_routing_bench.quality.compare import half_width
from moe_routing_bench.quality.run import Run
from moe_routing_bench.quality.train import Training, weights

WARMUP, BLOCKS, BLOCK, PROFILED = 5, 6, 5, 10  # steps; blocks of steps that are timed whole
Batch = tuple[Tensor, Tensor]


def measure(run: Run, trained: Path, out: Path, device: str) -> dict[str, Any]:
    """Time steps of a run from its last weights (`trained` is the run's Parquet), which route as training did at its end.

    Medians: the whole step without marks, then its stages with them, scaled to sum to the whole; and half of the 95 %
    interval of a block. Writes one row to `out`.
    """
    first = max(0, run.steps - WARMUP - BLOCKS * BLOCK - PROFILED)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    blocks, stages = _eager(_trained(run, trained, device), itertools.count(first))
    row: dict[str, Any] = {"step_mode": runs.EAGER, "eager_step_ms": median(blocks)}
    if device == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        try:
            blocks, stages = _replayed(run, trained, first)
            row["step_mode"] = runs.GRAPH
        except RuntimeError as error:  # the row says that, and why, its step was launched from Python
            row["step_mode"] = f"{runs.EAGER}: no CUDA graph, {str(error).splitlines()[0]}"
    whole = median(blocks)
    scale = whole / sum(stages.values())
    row |= {
        "schema_version": runs.SCHEMA_VERSION, "run": run.name, "step_ms": whole, "step_half_width_ms": half_width(np.array(blocks)), "train_tokens_per_s": 1e3 * run.tokens_per_step / whole,
        **{f"{stage}_ms": ms * scale for stage, ms in stages.items()}, "timed_alone": True,
    }  # fmt: skip
    runs.write(out, [row], run.spec)
    return row


def _trained(run: Run, trained: Path, device: str) -> Training:
    training = Training(run, device)
    training.load(torch.load(weights(trained), map_location=device, weights_only=True))
    return training


def _medians(profiles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {stage: median(one[stage] for one in profiles) for stage in STAGES}


def _eager(training: Training, steps: Iterator[int]) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of a step in each block, and by stage, launched from Python; every step draws its batch."""
    for _ in range(WARMUP):
        training.step(next(steps))
    blocks = [sum(_timed(training, steps, BLOCK).values()) / BLOCK for _ in range(BLOCKS)]
    clock = StageClock(training.device)
    _mark(training, clock)
    profiles = [_timed(training, steps, 1, clock) for _ in range(PROFILED)]
    return blocks, _medians(profiles)


def _timed(training: Training, steps: Iterator[int], count: int, clock: StageClock | None = None) -> dict[str, float]:
    """Milliseconds by stage of the next `count` steps; all of it is `rest` without marks."""
    clock = clock or StageClock(training.device)
    clock.begin("rest")
    for step in itertools.islice(steps, count):
        training.step(step)
    return clock.stop()


def _mark(training: Training, clock: Clock) -> None:
    """Let all layers tell this clock where their stages begin."""
    for layer in training.model.ffns:
        layer.clock = clock


def _replayed(run: Run, trained: Path, first: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of a step in each block, and by stage, as a CUDA graph; batches lie on the GPU before the clock starts.

    Everything happens on one side stream from the start: a gradient that was once accumulated on another stream would
    break the capture.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        training = _trained(run, trained, "cuda")
        for group in training.optimizer.param_groups:
            group["capturable"] = True
        steps = itertools.count(first)
        batch = training.begin(next(steps))
        for _ in range(WARMUP):
            training.learn(*batch)
        replay = _captured(training, batch, stream)
        blocks = [_block(training, steps, batch, replay) for _ in range(BLOCKS)]
        clock = StageClock("cuda")
        _mark(training, clock)
        replay = _captured(training, batch, stream, clock)
        profiles = []
        for _ in range(PROFILED):
            _fill(batch, training.begin(next(steps)))
            replay()
            profiles.append(clock.read())
    return blocks, _medians(profiles)


def _captured(training: Training, batch: Batch, stream: torch.cuda.Stream, clock: StageClock | None = None) -> Callable[[], None]:  # fmt: skip
    """What replays a step on whatever lies in `batch`, with the marks of a clock where there is one."""
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=stream):
        if clock:
            clock.begin("rest")
        training.learn(*batch)
        if clock:
            clock.begin("")
    return graph.replay


def _block(training: Training, steps: Iterator[int], batch: Batch, replay: Callable[[], None]) -> float:
    """Milliseconds of a step, from a block of them."""
    batches = [training.begin(step) for step in itertools.islice(steps, BLOCK)]
    clock = StageClock("cuda")
    clock.begin("rest")
    for one in batches:
        _fill(batch, one)
        replay()
    return clock.stop()["rest"] / BLOCK


def _fill(batch: Batch, values: Batch) -> None:
    for target, source in zip(batch, values, strict=True):
        target.copy_(source)
