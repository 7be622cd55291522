"""Inputs that hold a row per token, or per assignment: which these are, and copies in which some rows are of another draw."""

import torch
from torch import Tensor

from moe_routing_bench.measure import memory


def mixed(base: dict[str, Tensor], fresh: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Inputs that hold a row per token, or per assignment, with an eighth of the rows of `fresh`: numbers, or where there are none, what
    there is."""
    row_inputs = names(base, tokens)
    count = len(base[row_inputs[0]]) if row_inputs else tokens
    clones = {name: base[name].clone(memory_format=torch.contiguous_format) for name in row_inputs}
    chosen = memory.some(max(1, count // 8), count)
    for name, clone in clones.items():
        rows = torch.tensor(chosen, device=clone.device)
        memory.as_bytes(clone).view(count, -1)[rows] = memory.as_bytes(fresh[name]).view(count, -1)[rows]
    return clones


def names(inputs: dict[str, Tensor], tokens: int) -> list[str]:
    """Names of inputs that hold a row per token, or per assignment: those of numbers, or where there are none, what there is."""
    numbers = {
        name: len(tensor)
        for name, tensor in inputs.items()
        if tensor.ndim and tensor.is_floating_point() and len(tensor) >= tokens
    }
    count = tokens if tokens in numbers.values() else max(numbers.values(), default=tokens)
    return [
        name
        for name, tensor in inputs.items()
        if tensor.ndim and len(tensor) == count and (not numbers or name in numbers)
    ]
