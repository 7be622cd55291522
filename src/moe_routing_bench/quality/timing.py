"""How long a training step takes with the machine to itself, whole and by stage, in a short phase of its own.

Launching a model this small takes longer than a GPU needs to compute it, by a factor that depends on the host. On a GPU
the step is therefore replayed as a CUDA graph, and its time when launched from Python is stored too.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import engine, run_rows
from moe_routing_bench.quality.engine import Engine
from moe_routing_bench.quality.loop import Training, saved
from moe_routing_bench.quality.stage_clock import STAGES, Clock, StageClock
from moe_routing_bench.statistics import mean_half_width
from moe_routing_bench.store import paths

WARMUP, PROFILED = 5, 10  # steps
BLOCKS, BLOCK = 6, 5  # blocks that are timed whole, and the steps of each
Batch = tuple[Tensor, Tensor]


def measure(run: Run, trained: Path, out: Path, device: str) -> dict[str, Any]:
    """Time steps of a run from its last weights, which route as training did at its end; write one row to `out`.

    `trained` is the run's Parquet. The row has medians in milliseconds: of the whole step without marks, and of its
    stages with marks, scaled to sum to the whole; and half the width of the 95 % interval over blocks.
    """
    first = max(0, run.steps - WARMUP - BLOCKS * BLOCK - PROFILED)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    blocks, stages = _eager(_trained(run, trained, device), itertools.count(first))
    row: dict[str, Any] = {"step_mode": run_rows.EAGER, "eager_step_ms": median(blocks)}
    if device == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        try:
            blocks, stages = _replayed(run, trained, first)
            row["step_mode"] = run_rows.GRAPH
        except RuntimeError as error:  # the row says that its step was launched from Python, and why
            row["step_mode"] = f"{run_rows.EAGER}: no CUDA graph, {str(error).splitlines()[0]}"
    whole = median(blocks)
    scale = whole / sum(stages.values())
    row |= {
        "schema_version": run_rows.SCHEMA_VERSION,
        "run": run.name,
        "step_ms": whole,
        "step_half_width_ms": mean_half_width(np.array(blocks)),
        "train_tokens_per_s": 1e3 * run.tokens_per_step / whole,
        **{f"{stage}_ms": ms * scale for stage, ms in stages.items()},
        "timed_alone": True,
    }
    run_rows.write(out, [row], run.spec)
    return row


def _trained(run: Run, trained: Path, device: str) -> Training:
    """A training with a run's last weights, whose steps are launched from Python."""
    training = Training(run, device, replace(Engine.of(device), graph=False))
    training.load(saved(paths.weights_file(trained), device))
    return training


def _medians(profiles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {stage: median(timed[stage] for timed in profiles) for stage in STAGES}


def _eager(training: Training, steps: Iterator[int]) -> tuple[list[float], dict[str, float]]:
    """Milliseconds per step in each block, and by stage; steps are launched from Python, and each draws its batch."""
    for _ in range(WARMUP):
        training.step(next(steps))
    blocks = [sum(_timed(training, steps, BLOCK).values()) / BLOCK for _ in range(BLOCKS)]
    clock = StageClock(training.device)
    _mark(training, clock)
    profiles = [_timed(training, steps, 1, clock) for _ in range(PROFILED)]
    return blocks, _medians(profiles)


def _timed(training: Training, steps: Iterator[int], count: int, clock: StageClock | None = None) -> dict[str, float]:
    """Milliseconds by stage of the next `count` steps; without marks all of it is `rest`."""
    clock = clock or StageClock(training.device)
    clock.begin("rest")
    for step in itertools.islice(steps, count):
        training.step(step)
    return clock.stop()


def _mark(training: Training, clock: Clock) -> None:
    """Make all layers tell this clock where their stages begin."""
    for layer in training.model.ffns:
        layer.clock = clock


def _replayed(run: Run, trained: Path, first: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds per step in each block, and by stage, as a CUDA graph.

    Batches are on the GPU before the clock starts.
    """
    with engine.stream("cuda"):
        training = _trained(run, trained, "cuda")
        steps = itertools.count(first)
        batch = training.begin(next(steps))
        for _ in range(WARMUP):
            training.learn(*batch)
        replay = _captured(training, batch)
        blocks = [_block(training, steps, batch, replay) for _ in range(BLOCKS)]
        clock = StageClock("cuda")
        _mark(training, clock)
        replay = _captured(training, batch, clock)
        profiles = []
        for _ in range(PROFILED):
            _fill(batch, training.begin(next(steps)))
            replay()
            profiles.append(clock.read())
    return blocks, _medians(profiles)


def _captured(training: Training, batch: Batch, clock: StageClock | None = None) -> Callable[[], engine.Outputs]:
    """A function that replays a step on what `batch` then holds, with the marks of a clock where there is one."""
    training.optimizer.zero_grad(set_to_none=True)

    def step() -> engine.Outputs:
        if clock:
            clock.begin("rest")
        outputs = training.learn(*batch)
        if clock:
            clock.begin("")
        return outputs

    return engine.captured(step)


def _block(training: Training, steps: Iterator[int], batch: Batch, replay: Callable[[], object]) -> float:
    """Milliseconds per step over one block."""
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
