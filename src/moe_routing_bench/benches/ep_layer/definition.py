"""What `ep_layer` computes, on what, and when an answer is right: `layer`, with tokens and experts on ranks as `benches.ranks` says.

Inputs of each rank: x (T_r, H), logits (T_r, E) float32 of all experts, bias (E,) where the rule has one; and the weights of its experts,
w13 (E / N, N', H) and w2 (E / N, H, I), which all input sets share. Output of each rank: combined (T_r, H). An implementation rounds what a
rank's experts make of a token once more than `layer` does, before it travels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, close, tolerance
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.benches.layer import definition as layer
from moe_routing_bench.benches.ranks import Exchange, exchange, joined, row_traffic, split
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.row_map import row_layout
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.errors import bad
from moe_routing_kernels.layer import Layer

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sharded:
    """A layer over ranks: how rows travel, and the layer of all tokens and experts."""

    exchange: Exchange
    layer: Layer


def problem(cell: Cell) -> Sharded:
    """The sizes of a cell; rows and weights have the activations' format."""
    if activation_of(cell.activation).biased:
        raise bad("activation of benches over ranks", cell.activation, "one without biases")
    formats = (cell.dtype, cell.dtype, cell.dtype)
    layer = Layer(row_layout(cell), cell.hidden, cell.intermediate, *formats, cell.router, cell.activation)
    return Sharded(exchange(cell), layer)


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed: those of `layer`, cut into the ranks' tokens."""
    return split(layer.build(cell, seed, device), exchange(cell).shares)


def shared(cell: Cell, seed: int, device: str) -> Tensors:
    """The weights of all experts, drawn once per cell, cut into the ranks' experts."""
    known = exchange(cell)
    return split(experts.shared(cell, seed, device), [known.local] * known.ranks)


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    return {f"combined@{rank}": torch.empty_like(inputs[f"x@{rank}"]) for rank in range(cell.ranks)}


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """All ranks in one process, as the reference of `layer`."""
    return layer.reference(cell, joined(inputs))


def check(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Check:
    """Within the roundings of `layer`, and that of what travels; in float32 also those of the sums."""
    roundings = experts.roundings(cell) + 2 + (2 * cell.top_k if cell.dtype == "fp32" else 0)
    return close(joined(outputs)["combined"], expected["combined"], tolerance(cell.dtype, roundings), "combined")


def assignment(cell: Cell, inputs: Tensors, expected: Tensors) -> Assignment:
    """Expert ids and weights (T, k) of the batch."""
    return layer.assignment(cell, joined(inputs), expected)


def cost(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Cost:
    """What `layer` reads, writes and multiplies, over all ranks."""
    return layer.cost(cell, joined(inputs), joined(outputs), expected)


def traffic(cell: Cell, inputs: Tensors, expected: Tensors, passes: int = 1) -> dict[str, list[int]]:
    """Row fields: what ranks have and send both ways, as `row_traffic` counts it."""
    known, row_bytes = exchange(cell), cell.hidden * inputs["x@0"].element_size()
    ids = expected["topk_ids"].split(known.shares)
    return row_traffic(ids, known.local, row_bytes, out=passes, back=passes)
