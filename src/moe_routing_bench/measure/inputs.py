"""The input and output sets of a cell: drawn apart, and copied until a rotation through them finds the L2 cache cold."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import nbytes
from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure import calibration


@dataclass
class InputSet:
    """One set of inputs and outputs, and what the outputs should be; copies of a set share its expectation."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    expected: dict[str, Tensor]


def input_sets(job: Job, definition: Any, device: str) -> list[InputSet]:
    """`check_seeds` sets drawn apart, then copies of them until their inputs together are 5x the L2 cache (GPU only)."""
    cell, settings = job.cell, job.settings
    shared = definition.shared(cell, cell.seed, device) if hasattr(definition, "shared") else {}
    sets = []
    for i in range(settings.check_seeds):
        inputs = definition.build(cell, cell.seed + 1000 * i, device) | shared
        sets.append(InputSet(inputs, definition.empty_outputs(cell, inputs), definition.reference(cell, inputs)))
    if device == "cpu":
        return sets
    own = [t for n, t in sets[0].inputs.items() if n not in shared]
    footprint = nbytes(*own, *sets[0].outputs.values())
    cold = calibration.cold_sets(nbytes(*own))  # outputs do not count: stores may be the first to leave the cache
    wanted = max(len(sets), min(cold, settings.set_limit, int(settings.set_bytes // footprint)))
    for i in range(len(sets), wanted):
        first = sets[i % settings.check_seeds]
        copies = {n: t if n in shared else t.clone() for n, t in first.inputs.items()}
        sets.append(InputSet(copies, {n: torch.empty_like(t) for n, t in first.outputs.items()}, first.expected))
    return sets
