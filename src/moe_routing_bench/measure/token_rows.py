"""Inputs that hold a row per token, or per assignment: which these are, and copies in which some rows are of another draw, or all in
another order.
"""

import secrets

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


def moved(known: dict[str, tuple[Tensor, Tensor]], tokens: int) -> dict[str, Tensor]:
    """The same numbers of all sets in other places, which cannot be foreseen: columns move on in a ring, and two of them change places; tokens
    move on in a ring where a row is a token's. `known` has bytes (sets, n) and a tensor of one set; returns bytes."""
    of_tokens = all(len(like) == tokens for _, like in known.values())
    along = secrets.randbelow(tokens) if of_tokens else 0
    return {name: _moved(rows, like, along) for name, (rows, like) in known.items()}


def _moved(rows: Tensor, like: Tensor, along: int) -> Tensor:
    """Tokens move on by `along`, and by one at least where there are too few columns to tell."""
    columns = like[0].numel()
    values = rows.view(memory.INTEGERS[like.element_size()]).unflatten(1, (len(like), columns))
    if columns < 3:
        along = along or min(1, len(like) - 1)
    found = values.roll((along, 1 + secrets.randbelow(max(1, columns - 1))), (1, 2))
    if columns > 2:
        pair = torch.tensor(memory.some(2, columns), device=rows.device)
        found[..., pair] = found[..., pair.flip(0)]
    return found.flatten(1).view(torch.uint8)
