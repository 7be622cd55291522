"""What `ep_combine` computes, on what, and when an answer is right: the way back of `dispatch`.

Tokens and experts lie on ranks as `benches.ranks` says. Inputs of each rank, for its experts: y (R, H) N(0, 1), whose first rows are in the
order of `dispatch`, R = T min(k, E / N); and what came with them: row_tokens (R,) int32, the token of the batch that each row is of, -1
beyond the last; row_weights (R,) float32, its gate weight. For its tokens: topk_ids (T_r, k) int32, of which those outside
0 .. E - 1 have no row. Output of each rank: combined (T_r, H), the sum of weight times row over a token's rows.

A row, or the sum of a token's rows on one rank, is rounded to the cell's dtype once before it travels, and the sum once: two roundings.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, close, nbytes, rounded, tolerance
from moe_routing_bench.benches.ranks import by_expert, by_rank, exchange, parts, row_traffic, split
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_routing, generator, randn
from moe_routing_kernels.formats import FORMATS

Tensors = dict[str, Tensor]

problem = exchange


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed."""
    known, drawn = problem(cell), draw_routing(cell, seed, device)
    y = randn((known.ranks * known.rows, known.hidden), known.dtype, generator(seed, device))
    handles = handle(cell, drawn.ids, drawn.weights)
    return split({"y": y}, [known.rows] * known.ranks) | handles | split({"topk_ids": drawn.ids}, known.shares)


def handle(cell: Cell, ids: Tensor, weights: Tensor) -> Tensors:
    """Ids (T, k) and weights (T, k) of the batch -> row_tokens and row_weights of each rank."""
    known = problem(cell)
    order, counts = by_expert(ids, known.experts)
    rows = counts.view(known.ranks, known.local).sum(1).tolist()
    tokens, row_weights = (order // known.top_k).int().split(rows), weights.flatten()[order].split(rows)
    beyond = [known.rows - count for count in rows]
    padded = [torch.cat([t, t.new_full((n,), -1)]) for t, n in zip(tokens, beyond, strict=True)]
    more = [torch.cat([w, w.new_zeros(n)]) for w, n in zip(row_weights, beyond, strict=True)]
    return by_rank("row_tokens", padded) | by_rank("row_weights", more)


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    return by_rank("combined", [inputs["y@0"].new_empty(share, cell.hidden) for share in problem(cell).shares])


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """All ranks in one process, in float32 (float64 for float32 inputs); `terms` are the sums of the terms' sizes."""
    shares, names = problem(cell).shares, ("y", "row_tokens", "row_weights")
    y, tokens, weights = (torch.cat(parts(inputs, name)) for name in names)
    used = tokens >= 0
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    terms = weights[used, None].to(wide) * y[used].to(wide)
    sums = [
        terms.new_zeros(cell.tokens, cell.hidden).index_add_(0, tokens[used].long(), t) for t in (terms, terms.abs())
    ]
    return split({"combined": sums[0], "terms": sums[1]}, shares)


def check(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Check:
    """Every sum within the rounding of what travels and its own; in float32 also those of the sum. No element may be off by more than
    these can make of its terms; a token without a row is exactly zero."""
    return compared(cell, parts(outputs, "combined"), parts(expected, "combined"), parts(expected, "terms"))


def compared(cell: Cell, outputs: list[Tensor], wanted: list[Tensor], terms: list[Tensor]) -> Check:
    """`check` of combined, in the parts of ranks."""
    limit = tolerance(cell.dtype, 2 + (2 * cell.top_k if cell.dtype == "fp32" else 0))
    result = Check()
    for rank, (got, want, size) in enumerate(zip(outputs, wanted, terms, strict=True)):
        bound = rounded(want, size, cell.dtype, 2 * (cell.top_k + 1), FORMATS[cell.dtype].roundoff)
        result = both(result, close(got, want, limit, f"combined@{rank}", bound))
    return result


def assignment(cell: Cell, inputs: Tensors, expected: Tensors) -> Assignment:
    """Expert ids (T, k) of the batch."""
    return Assignment(torch.cat(parts(inputs, "topk_ids")))


def cost(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Cost:
    """Rows in use and what came with them, and ids, of all ranks read once, every token written once."""
    rows = sum(int((tokens >= 0).sum()) for tokens in parts(inputs, "row_tokens"))
    handles = 8 * rows + nbytes(*parts(inputs, "topk_ids"))
    return Cost(rows * cell.hidden * inputs["y@0"].element_size() + handles, nbytes(*outputs.values()))


def traffic(cell: Cell, inputs: Tensors, expected: Tensors) -> dict[str, list[int]]:
    """Row fields: what ranks have and send, as `row_traffic` counts it."""
    row_bytes = cell.hidden * inputs["y@0"].element_size()
    return row_traffic(parts(inputs, "topk_ids"), problem(cell).local, row_bytes, out=0, back=1)
