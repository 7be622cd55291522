"""What `dispatch` computes, on what, and when an answer is right.

The tokens of the batch are split evenly among the ranks, and so are the experts, both in order. Inputs of each rank: x (T_r, H) N(0, 1)
and topk_ids (T_r, k) int32, of all experts. Outputs of each rank, of its E / N experts: counts (E / N,) int32, and received
(T min(k, E / N), H), whose first rows are those of its experts one after the other, each expert's in the order of the batch; nothing
is asked of rows beyond them. So the rows of all ranks together are the compact rows of `pack`. Compared bit by bit.

A call knows its own rank's ids alone: what the others send is part of the call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, exact, nbytes
from moe_routing_bench.benches.ranks import by_rank, parts, shares
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator, randn

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Dispatch:
    """Tensors of a rank: x (T_r, H) of `dtype`, topk_ids (T_r, k) int32; received (rows, H), counts (E / ranks,) int32."""

    hidden: int
    experts: int  # of all ranks
    top_k: int
    ranks: int
    rows: int  # most rows that a rank may receive
    dtype: str

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks


def problem(cell: Cell) -> Dispatch:
    """The sizes of a cell."""
    rows = cell.tokens * min(cell.top_k, cell.experts // cell.ranks)
    return Dispatch(cell.hidden, cell.experts, cell.top_k, cell.ranks, rows, cell.dtype)


def build(cell: Cell, seed: int, device: str) -> Tensors:
    """Draw the inputs of one seed."""
    rng, sizes = generator(seed, device), shares(cell.tokens, cell.ranks)
    ids, x = draw_ids(cell, rng).contiguous(), randn((cell.tokens, cell.hidden), cell.dtype, rng)
    return by_rank("x", x.split(sizes)) | by_rank("topk_ids", ids.split(sizes))


def empty_outputs(cell: Cell, inputs: Tensors) -> Tensors:
    """Outputs of the right shape, not initialised."""
    known, x = problem(cell), inputs["x@0"]
    received = [x.new_empty(known.rows, known.hidden) for _ in range(known.ranks)]
    counts = [x.new_empty(known.local, dtype=torch.int32) for _ in range(known.ranks)]
    return by_rank("received", received) | by_rank("counts", counts)


def reference(cell: Cell, inputs: Tensors) -> Tensors:
    """All ranks in one process: sort the assignments of the batch by expert, and cut where a rank's experts end."""
    known, ids, x = problem(cell), torch.cat(parts(inputs, "topk_ids")), torch.cat(parts(inputs, "x"))
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=known.experts).view(known.ranks, known.local)
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
    """Row fields, a number per rank: tokens that it has, rows that it receives, and bytes of token rows that it sends, counted in three ways.

    `rank_all_bytes` are of a row per assignment, those for itself included; `rank_wire_bytes` of those for other ranks; and
    `rank_deduplicated_bytes` of a row per token and other rank.
    """
    known, ids = problem(cell), parts(inputs, "topk_ids")
    row = nbytes(inputs["x@0"].new_empty(known.hidden))
    fields = {
        "rank_tokens": [len(each) for each in ids],
        "rank_rows": [len(each) for each in parts(expected, "received")],
        "rank_all_bytes": [each.numel() * row for each in ids],
        "rank_wire_bytes": [],
        "rank_deduplicated_bytes": [],
    }
    for rank, each in enumerate(ids):
        sent = torch.zeros(len(each), known.ranks, dtype=torch.long, device=each.device)
        sent.scatter_add_(1, each.long() // known.local, torch.ones_like(each, dtype=torch.long))
        sent[:, rank] = 0
        fields["rank_wire_bytes"].append(int(sent.sum()) * row)
        fields["rank_deduplicated_bytes"].append(int((sent > 0).sum()) * row)
    return fields
