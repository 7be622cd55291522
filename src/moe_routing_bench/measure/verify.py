"""Whether an implementation is right: its outputs are poisoned first, compared with the reference, and its inputs looked at after."""

import torch
from torch import Tensor

from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.checks import both
from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure.candidate import Candidate, Failure
from moe_routing_bench.measure.inputs import InputSet

_POISON_INT = 2**30  # far out of range of every index, and far below overflow when added to


def verify(job: Job, one: Candidate, sets: list[InputSet]) -> None:
    """Run on every checked set with poisoned outputs, compare with the reference, and see that inputs are untouched."""
    bench = find(job.cell.bench)
    definition, shared = bench.definition(), bench.shared
    for one_set, call in zip(sets[: job.settings.check_seeds], one.calls, strict=False):
        known = {n: t.clone() for n, t in one_set.inputs.items() if n not in shared}
        sums = {n: _checksum(one_set.inputs[n]) for n in shared}
        for tensor in one_set.outputs.values():
            _poison(tensor)
        returned = call()
        own = returned if isinstance(returned, dict) else {}  # outputs that it allocates itself
        changed = [n for n, t in known.items() if not torch.equal(_bits(t), _bits(one_set.inputs[n]))]
        for name in changed:  # the others get what was drawn
            one_set.inputs[name].copy_(known[name])
        changed += [n for n, total in sums.items() if _checksum(one_set.inputs[n]) != total]
        result = definition.check(job.cell, one_set.inputs, one_set.outputs | own, one_set.expected)
        one.check = both(one.check, result)
        if result.error:
            raise Failure("incorrect", result.error)
        if changed:
            raise Failure("incorrect", f"inputs were changed: {', '.join(changed)}")


def _poison(tensor: Tensor) -> None:
    """Fill an output with what no right answer holds."""
    if not tensor.is_floating_point():
        tensor.fill_(_POISON_INT)
    elif tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in every 8-bit float of the table
    else:
        tensor.fill_(float("nan"))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, because NaN equals nothing and few operations take fp8."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _checksum(tensor: Tensor) -> int:
    """A sum over the bits: what all input sets share is too large for a copy."""
    return int(_bits(tensor).sum(dtype=torch.int64))
