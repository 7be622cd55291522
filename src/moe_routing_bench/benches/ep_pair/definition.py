"""What `ep_pair` computes, on what, and when an answer is right: `dispatch`, then `ep_combine`, in one call.

Inputs of each rank: x (T_r, H) N(0, 1), topk_ids (T_r, k) int32 and topk_weights (T_r, k) float32 of its tokens; y (R, H) N(0, 1), what its
experts make of the rows that they receive: it has nothing to do with x, so that neither way can be left out. Outputs of each rank: received
and counts as of `dispatch`, and combined (T_r, H) as of `ep_combine`, of rows of y in the order of received. Weights and row order travel
in the call. As in a layer, rows go back after those of the rank have come: an implementation that sends both ways at once measures
something else.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, both, nbytes
from moe_routing_bench.benches.dispatch import definition as dispatch
from moe_routing_bench.benches.ep_combine import definition as combine
from moe_routing_bench.benches.ranks import exchange, parts, row_traffic, split
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_routing, generator, randn

Tensors = dict[str, Tensor]

problem = exchange
assignment = combine.assignment


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed."""
    known, drawn, rng = problem(cell), draw_routing(cell, seed, device), generator(seed, device)
    x = randn((cell.tokens, cell.hidden), cell.dtype, rng)
    y = randn((known.ranks * known.rows, cell.hidden), cell.dtype, rng)
    batch = {"x": x, "topk_ids": drawn.ids, "topk_weights": drawn.weights}
    return split(batch, known.shares) | split({"y": y}, [known.rows] * known.ranks)


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    return dispatch.empty_outputs(cell, inputs) | combine.empty_outputs(cell, inputs)


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """Those of `dispatch` and of `ep_combine`, whose row order and weights follow from ids and weights."""
    ids, weights = (torch.cat(parts(inputs, name)) for name in ("topk_ids", "topk_weights"))
    return dispatch.reference(cell, inputs) | combine.reference(cell, inputs | combine.handle(cell, ids, weights))


def check(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Check:
    """Received and counts to the bit, combined within its two roundings."""
    copied = {name: want for name, want in expected.items() if name.startswith(("received@", "counts@"))}
    return both(dispatch.check(cell, inputs, outputs, copied), combine.check(cell, inputs, outputs, expected))


def cost(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Cost:
    """Tokens, ids, weights and rows of y in use read once; rows that are received, counts and sums written once."""
    received, counts = (nbytes(*parts(expected, name)) for name in ("received", "counts"))
    read = received + sum(nbytes(*parts(inputs, name)) for name in ("x", "topk_ids", "topk_weights"))
    return Cost(read, received + counts + nbytes(*parts(outputs, "combined")))


def traffic(cell: Cell, inputs: Tensors, expected: Tensors) -> dict[str, list[int]]:
    """Row fields: what ranks have and send both ways, as `row_traffic` counts it."""
    row_bytes = cell.hidden * inputs["x@0"].element_size()
    return row_traffic(parts(inputs, "topk_ids"), problem(cell).local, row_bytes, out=1, back=1)
