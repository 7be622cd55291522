"""What `ep_training` computes, on what, and when an answer is right: `training`, with tokens and experts on ranks as `benches.ranks` says.

Inputs of each rank: those of `ep_layer`, and d_combined (T_r, H), the gradient of its result. Outputs of each rank: combined and d_x (T_r, H),
d_logits (T_r, E) float32, and d_w13 and d_w2 of its experts, of the tokens of all ranks.

A token's gradient, like its result, is a sum of one term per rank, each of which is rounded before it travels: `rounded_sums` of `training`.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost
from moe_routing_bench.benches.ep_layer import definition as ep_layer
from moe_routing_bench.benches.ranks import exchange, joined, split
from moe_routing_bench.benches.training import definition as training
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels import training as _  # noqa: F401  (which the list of `benches.training` reads by name)

Tensors = dict[str, Tensor]

problem = ep_layer.problem
shared = ep_layer.shared
assignment = ep_layer.assignment


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed: those of `training`, cut into the ranks' tokens."""
    return split(training.build(cell, seed, device), exchange(cell).shares)


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    found = ep_layer.empty_outputs(cell, inputs)
    for name in ("x", "logits", "w13", "w2"):
        found |= {f"d_{name}@{rank}": torch.empty_like(inputs[f"{name}@{rank}"]) for rank in range(cell.ranks)}
    return found


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """All ranks in one process, as the reference of `training`."""
    return training.reference(cell, joined(inputs))


def check(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Check:
    """The check of `training`, with its roundings of sums."""
    return training.check(cell, joined(inputs), joined(outputs), expected, rounded_sums=True)


def cost(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Cost:
    """What `training` reads, writes and multiplies, over all ranks."""
    return training.cost(cell, joined(inputs), joined(outputs), expected)


def traffic(cell: Cell, inputs: Tensors, expected: Tensors) -> dict[str, list[int]]:
    """Row fields: what ranks have and send both ways, forward and backward, as `row_traffic` counts it."""
    return ep_layer.traffic(cell, inputs, expected, passes=2)
