"""What `ep_exchange` computes, on what, and when an answer is right: a row per token and rank goes out, and one comes back.

Inputs of each rank: x (T_r, H) N(0, 1), topk_ids (T_r, k) int32 and topk_weights (T_r, k) float32 of its tokens; and y (N M, H) N(0, 1), M the
most tokens of a rank: a row for each one that comes, which stands for the weighted sum of its experts. It has nothing to do with x, so that
neither way can be left out. An id outside 0 .. E - 1 goes nowhere.

Outputs of each rank, in the order of source ranks and of each one's tokens: received (N M, H), a row for each token that has some of its
experts; received_ids (N M, k) int32, counted from its first expert, -1 elsewhere; received_weights (N M, k) float32, of which those of
other ids hold anything; and combined (T_r, H), the sum over ranks of the row of y that answers the token's row.

Rows that come are the first ones, and nothing is asked of those beyond. An implementation that declares `by_place` has the row of token t of
rank s at s M + t, in received as in y; rows where none came have ids -1, and hold anything else.

There is no order by expert, no row per assignment and no sum over experts: `ep_pair` has these. As in a layer, rows go back after those of
the rank have come. What comes is compared bit by bit. A sum is rounded once.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, both, close, exact, nbytes, rounded, tolerance
from moe_routing_bench.benches.ep_combine import definition as combine
from moe_routing_bench.benches.ranks import by_rank, exchange, goes, parts, row_traffic, split
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_routing, generator, randn

Tensors = dict[str, Tensor]

problem = exchange
assignment = combine.assignment


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed."""
    known, drawn, rng = problem(cell), draw_routing(cell, seed, device), generator(seed, device)
    x = randn((cell.tokens, cell.hidden), cell.dtype, rng)
    most = known.ranks * max(known.shares)
    y = randn((known.ranks * most, cell.hidden), cell.dtype, rng)
    batch = {"x": x, "topk_ids": drawn.ids, "topk_weights": drawn.weights}
    return split(batch, known.shares) | split({"y": y}, [most] * known.ranks)


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    y = parts(inputs, "y")
    choices = [(len(each), cell.top_k) for each in y]
    return (
        by_rank("received", [torch.empty_like(each) for each in y])
        | by_rank("received_ids", [y[0].new_empty(shape, dtype=torch.int32) for shape in choices])
        | by_rank("received_weights", [y[0].new_empty(shape, dtype=torch.float32) for shape in choices])
        | by_rank("combined", [torch.empty_like(each) for each in parts(inputs, "x")])
    )


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """All ranks in one process. `places` are s M + t of the rows that come; `combined` and `terms`, the sums of the terms' sizes, are of rows one
    after the other, `combined_by_place` and `terms_by_place` of rows by place."""
    known = problem(cell)
    names = ("x", "topk_ids", "topk_weights")
    x, ids, weights = (torch.cat(parts(inputs, name)) for name in names)
    tokens = [goes(ids, known.ranks, known.local)[:, rank].nonzero()[:, 0] for rank in range(known.ranks)]
    found: Tensors = {}
    for rank, of_rank in enumerate(tokens):
        local = ids[of_rank] - rank * known.local
        here = (local >= 0) & (local < known.local)
        found[f"received@{rank}"] = x[of_rank]
        found[f"received_ids@{rank}"] = torch.where(here, local, -1).int()
        found[f"received_weights@{rank}"] = torch.where(here, weights[of_rank], 0.0)
        found[f"places@{rank}"] = _places(known.shares, x.device)[of_rank]
    y, places = parts(inputs, "y"), parts(found, "places")
    one_by_one = [rows[: len(of_rank)] for rows, of_rank in zip(y, tokens, strict=True)]
    by_place = [rows[where] for rows, where in zip(y, places, strict=True)]
    for suffix, rows in (("", one_by_one), ("_by_place", by_place)):
        sums = _sums(cell, tokens, rows)
        named = {f"{name}{suffix}": total for name, total in zip(("combined", "terms"), sums, strict=True)}
        found |= split(named, known.shares)
    return found


def _places(shares: list[int], device: torch.device) -> Tensor:
    """s M + t for each token (T,) of the batch."""
    most = max(shares)
    return torch.cat([rank * most + torch.arange(share, device=device) for rank, share in enumerate(shares)])


def _sums(cell: Cell, tokens: list[Tensor], rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of each rank, of these tokens, added up in float32 (float64 for float32 rows), and their sizes: (T, H) each."""
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    total, sizes = (torch.zeros(cell.tokens, cell.hidden, dtype=wide, device=rows[0].device) for _ in range(2))
    for of_rank, each in zip(tokens, rows, strict=True):
        total.index_add_(0, of_rank, each.to(wide))
        sizes.index_add_(0, of_rank, each.to(wide).abs())
    return total, sizes


def check(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors, *, by_place: bool = False) -> Check:
    """What came equal, no other row with ids where rows have places, and every sum within its rounding; a token that went nowhere is zero."""
    result, suffix = Check(), "_by_place" if by_place else ""
    for rank in range(cell.ranks):
        result = both(result, _came(outputs, expected, rank, by_place))
        name = f"combined@{rank}"
        want, terms = (expected[f"{part}{suffix}@{rank}"] for part in ("combined", "terms"))
        limit = tolerance(cell.dtype, 1 + (cell.ranks if cell.dtype == "fp32" else 0))
        result = both(result, close(outputs[name], want, limit, name, rounded(want, terms, cell.dtype, cell.ranks + 1)))
    return result


def _came(outputs: Tensors, expected: Tensors, rank: int, by_place: bool) -> Check:
    """`check` of what came to a rank."""
    places = expected[f"places@{rank}"]
    rows = places if by_place else torch.arange(len(places), device=places.device)
    known_ids = expected[f"received_ids@{rank}"]
    received, ids, weights = (outputs[f"{name}@{rank}"] for name in ("received", "received_ids", "received_weights"))
    result = exact(received[rows], expected[f"received@{rank}"], f"received@{rank}")
    result = both(result, exact(ids[rows], known_ids, f"received_ids@{rank}"))
    used = torch.where(known_ids >= 0, weights[rows], 0.0)
    result = both(result, exact(used, expected[f"received_weights@{rank}"], f"received_weights@{rank}"))
    if by_place:
        empty = torch.ones(len(ids), dtype=torch.bool, device=ids.device).index_fill_(0, places, False)
        others = ids[empty]
        what = f"received_ids@{rank} of rows that no token has"
        result = both(result, exact(others, torch.full_like(others, -1), what))
    return result


def cost(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Cost:
    """Tokens, ids, weights and the rows of y in use read once; what comes and sums written once."""
    came = nbytes(*parts(expected, "received"))
    choices = nbytes(*parts(expected, "received_ids"), *parts(expected, "received_weights"))
    read = came + sum(nbytes(*parts(inputs, name)) for name in ("x", "topk_ids", "topk_weights"))
    return Cost(read, came + choices + nbytes(*parts(outputs, "combined")))


def traffic(cell: Cell, inputs: Tensors, expected: Tensors) -> dict[str, list[int]]:
    """Row fields: what ranks have and send both ways, as `row_traffic` counts it. This exchange sends `rank_deduplicated_bytes`."""
    row_bytes = cell.hidden * inputs["x@0"].element_size()
    return row_traffic(parts(inputs, "topk_ids"), problem(cell).local, row_bytes, out=1, back=1)
