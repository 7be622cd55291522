"""What `dispatch` computes, on what, and when an answer is right.

Tokens and experts lie on ranks as `benches.ranks` says. Inputs of each rank: x (T_r, H) N(0, 1) and topk_ids (T_r, k) int32, of all experts;
an id outside them takes no row. Outputs of each rank, of its E / N experts: counts (E / N,) int32, and received (T min(k, E / N), H), whose
first rows are those of its experts one after the other, each expert's in the order of the batch; nothing is asked of rows beyond them. So
the rows of all ranks together are the compact rows of `pack`. Compared bit by bit.

A call knows its own rank's ids alone: what the others send is part of the call.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, exact, nbytes
from moe_routing_bench.benches.ranks import by_expert, by_rank, exchange, parts, row_traffic, split
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator, randn

Tensors = dict[str, Tensor]

problem = exchange


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed."""
    rng = generator(seed, device)
    ids, x = draw_ids(cell, rng).contiguous(), randn((cell.tokens, cell.hidden), cell.dtype, rng)
    return split({"x": x, "topk_ids": ids}, problem(cell).shares)


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    known, x = problem(cell), inputs["x@0"]
    received = [x.new_empty(known.rows, known.hidden) for _ in range(known.ranks)]
    counts = [x.new_empty(known.local, dtype=torch.int32) for _ in range(known.ranks)]
    return by_rank("received", received) | by_rank("counts", counts)


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """All ranks in one process: sort the assignments of the batch by expert, and cut where a rank's experts end."""
    known, x = problem(cell), torch.cat(parts(inputs, "x"))
    order, counts = by_expert(torch.cat(parts(inputs, "topk_ids")), known.experts)
    counts = counts.view(known.ranks, known.local)
    rows = x[order // known.top_k].split(counts.sum(1).tolist())
    return by_rank("received", rows) | by_rank("counts", counts.int().unbind())


def check(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Check:
    """A copy has no rounding: every element of every row that was sent equal."""
    result = Check()
    for name, want in expected.items():
        result = both(result, exact(outputs[name][: len(want)], want, name))
    return result


def assignment(cell: Cell, inputs: Tensors, expected: Tensors) -> Assignment:
    """Expert ids (T, k) of the batch; the operation has no weights."""
    return Assignment(torch.cat(parts(inputs, "topk_ids")))


def cost(cell: Cell, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Cost:
    """Tokens and ids of all ranks read once, every row and every count written once."""
    return Cost(nbytes(*inputs.values()), nbytes(*expected.values()))


def traffic(cell: Cell, inputs: Tensors, expected: Tensors) -> dict[str, list[int]]:
    """Row fields: what ranks have and send, as `row_traffic` counts it."""
    row_bytes = cell.hidden * inputs["x@0"].element_size()
    return row_traffic(parts(inputs, "topk_ids"), problem(cell).local, row_bytes)
