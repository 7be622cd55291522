"""What `combine` computes, on what, and when an answer is right.

Inputs: y (R, H) N(0, 1) in the cell's dtype, inverse (T, k) int32 (row or -1), weights (T, k) float32.
Output: combined (T, H), the sum over kept assignments of weight times row, accumulated in float32, rounded once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, close, nbytes, rounded, tolerance
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator, randn
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.formats import FORMATS


def problem(cell: Cell) -> Combine:
    """The sizes and formats of a cell."""
    return Combine(cell.tokens, cell.hidden, cell.top_k, cell.dtype, row_layout(cell).dropping)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng = generator(seed, device)
    ids = draw_ids(cell, rng).contiguous()
    known = row_map(row_layout(cell), ids.cpu().numpy())
    return {
        "y": randn((len(known.order), cell.hidden), cell.dtype, rng),
        "inverse": torch.from_numpy(known.inverse).to(device),
        "topk_weights": torch.randn(ids.shape, generator=rng, device=device).softmax(1),
        "topk_ids": ids,
    }


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    return {"combined": inputs["y"].new_empty(cell.tokens, cell.hidden)}


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """One expert choice at a time in float32 (float64 for float32 inputs)."""
    return {"combined": _sum(cell, inputs, lambda term: term)}


def _sum(cell: Cell, inputs: dict[str, Tensor], made: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum (T, H) of what is made of each kept assignment's weight times its row."""
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    y, inverse = inputs["y"], inputs["inverse"].long()
    total = torch.zeros(cell.tokens, cell.hidden, dtype=wide, device=y.device)
    for j in range(cell.top_k):
        terms = inputs["topk_weights"][:, j, None].to(wide) * y[inverse[:, j].clamp_min(0)].to(wide)
        total += made(terms.masked_fill(inverse[:, j, None] < 0, 0))
    return total


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    rounded_weights: bool = False,
) -> Check:
    """One rounding to the cell's dtype; in float32 also the k roundings of the sum. No element may be off by more than these can
    make of its terms: a sum that is rounded on the way, or lacks a term of one token, differs by little on the whole.

    An implementation may declare that it rounds weights to the cell's dtype (`rounded_weights`), which is one more.
    """
    roundings = 1 + (2 * cell.top_k if cell.dtype == "fp32" else 0) + rounded_weights
    want, terms = expected["combined"], _sum(cell, inputs, torch.abs)
    if "residual" in inputs:  # where the sums start
        terms += inputs["residual"].abs()
    of_terms = FORMATS[cell.dtype].roundoff if rounded_weights else 0.0
    bound = rounded(want, terms, cell.dtype, 2 * (cell.top_k + 1), of_terms)  # twice, as the reference is rounded too
    return close(outputs["combined"], want, tolerance(cell.dtype, roundings), "combined", bound)


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k) and weights (T, k)."""
    return Assignment(inputs["topk_ids"], inputs["topk_weights"], inputs["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read each kept row, index and weight once; write every token once."""
    kept = int((inputs["inverse"] >= 0).sum())
    read = kept * FORMATS[cell.dtype].row_bytes(cell.hidden) + nbytes(inputs["inverse"], inputs["topk_weights"])
    return Cost(read, nbytes(outputs["combined"]))
