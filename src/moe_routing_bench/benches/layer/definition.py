"""What `layer` computes, on what, and when an answer is right.

Inputs: those of `routing`, and the experts' weights of `experts`, which all input sets of a cell share. Output: combined (T, H).
Where a cell has shared experts, their weights are among the inputs, and what they make of every token is added to its result.
Where the packed format has scales, the rows that experts see are quantised, and the reference quantises them as well.
"""

import math

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, both, close, nbytes, tolerance
from moe_routing_bench.benches.combine import definition as combine
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.benches.routing import definition as routing
from moe_routing_bench.benches.shared_experts import definition as shared_experts
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.row_map import row_layout
from moe_routing_kernels.formats import dequantise, quantise
from moe_routing_kernels.layer import Layer

build = routing.build
empty_outputs = routing.empty_outputs
assignment = routing.assignment


def problem(cell: Cell) -> Layer:
    """The sizes and formats of a cell."""
    formats = (cell.dtype, cell.packed, cell.weights)
    return Layer(row_layout(cell), cell.hidden, cell.intermediate, *formats, cell.router, cell.activation)


def shared(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """The weights of the routed experts and of the shared ones, drawn once per cell."""
    drawn = experts.shared(cell, seed, device)
    return drawn | shared_experts.shared(cell, seed, device) if _sharing(cell) else drawn


def reference(cell: Cell, inputs: dict[str, Tensor], known: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Expert by expert in float32 (float64 for float32 inputs), TF32 off. `known` is a choice of experts, by default the rule's."""
    known, form = known or routing.routed(cell, inputs), experts.packed_format(cell)
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    x = dequantise(*quantise(inputs["x"], form), form) if form.quantised else inputs["x"]
    total = torch.zeros_like(x, dtype=wide)
    kept = known["inverse"] >= 0
    for expert in range(row_layout(cell).experts):
        token, slot = ((known["topk_ids"] == expert) & kept).nonzero(as_tuple=True)
        if len(token):
            y = experts.apply(cell, x[token].to(wide), inputs, expert)
            total.index_add_(0, token, y * known["topk_weights"][token, slot].to(wide).unsqueeze(1))
    if _sharing(cell):
        total += shared_experts.reference(cell, inputs)["residual"]
    return known | {"combined": total}


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    rounded_sums: bool = False,
    rounded_inner: bool = False,
) -> Check:
    """The roundings of the experts and of the weighted sum, one after the other; `rounded_sums` says that each of the k terms and
    sums is rounded to the activations' format, `rounded_inner` is that of `experts`. A tie that is broken otherwise is right, as in
    `routing`, where the choice is shown. What shared experts make is rounded beside it, and so is the sum of both."""
    exact_sums = 2 * cell.top_k if cell.dtype == "fp32" else 0
    roundings = experts.roundings(cell) + 1 + max(exact_sums, cell.top_k if rounded_sums else 0)
    if _sharing(cell):
        roundings = 1 + max(roundings, shared_experts.roundings(cell))
    limit = tolerance(cell.dtype, roundings)
    if experts.packed_format(cell).quantised:  # elements at a tie may be rounded to the other neighbour
        limit += 0.1 * experts.packed_format(cell).roundoff
    if rounded_inner:
        limit = math.hypot(limit, tolerance(cell.packed))
    shown = {"topk_ids", "topk_weights"} <= outputs.keys()
    known = routing.own_choice(cell, inputs, outputs, expected) if shown else None
    want = (reference(cell, inputs, known) if known else expected)["combined"]
    return close(outputs["combined"], want, limit, "combined")


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Scores, tokens that an expert has and the weights of every expert that has a token and of the shared ones read once, outputs written once; the
    experts' products."""
    kept = expected["inverse"] >= 0
    active = int(expected["topk_ids"][kept].unique().numel())
    tokens = cell.tokens if _sharing(cell) else int(kept.any(1).sum())
    read = nbytes(inputs["logits"]) + tokens * nbytes(inputs["x"][:1]) + experts.weight_bytes(cell, inputs) * active
    products, rate = experts.products(cell, int(kept.sum())), experts.rate(cell)
    routed = Cost(read, nbytes(outputs["combined"]), products, rate=rate)
    return routed + shared_experts.cost(cell, inputs) if _sharing(cell) else routed


def check_sums(cell: Cell, tensors: dict[str, Tensor], found: Check) -> Check:
    """`found`, and whether combine made what it should of the rows and the shared experts' result that it was given. A part that is
    fused with combine does not show the rows."""
    if not {"y", "topk_weights", "inverse"} <= tensors.keys():
        return found
    expected = combine.reference(cell, tensors)["combined"]
    return both(found, combine.check(cell, tensors, tensors, {"combined": expected + tensors["residual"]}))


def _sharing(cell: Cell) -> bool:
    """Whether a cell has shared experts."""
    return "shared_intermediate" in cell
