"""A row per assignment by `torch.distributed.all_to_all_single`: counts, then rows, then their order by expert.

Rows arrive by source rank and, of each, by expert; a second pass puts those of an expert together. The host waits for the counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.ranks import Exchange, by_expert


class Sent(NamedTuple):
    """Which rows went where: what brings rows back."""

    order: Tensor  # (n,) the assignment of each row that this rank has sent, by expert
    by_expert: Tensor  # (m,) the place among the rows that arrived of each row by expert
    to_ranks: list[int]  # rows for each rank
    from_ranks: list[int]  # rows of each rank


def send(problem: Exchange, x: Tensor, topk_ids: Tensor, received: Tensor, counts: Tensor) -> Sent:
    """Send x (T_r, H) by topk_ids (T_r, k); writes the first rows of received (R, H) and counts (E / N,)."""
    order, loads = by_expert(topk_ids, problem.experts)
    sent = loads.view(problem.ranks, problem.local)
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent)
    to_ranks, from_ranks = sent.sum(1).tolist(), come.sum(1).tolist()
    rows = x.new_empty(sum(from_ranks), problem.hidden)
    dist.all_to_all_single(rows, x[order // problem.top_k], from_ranks, to_ranks)
    arriving = torch.arange(problem.local, device=x.device).repeat(problem.ranks)  # the expert of each piece, by source
    places = arriving.repeat_interleave(come.flatten()).argsort(stable=True)
    torch.index_select(rows, 0, places, out=received[: len(rows)])
    counts.copy_(come.sum(0))
    return Sent(order, places, to_ranks, from_ranks)


def bind(problem: Exchange, *, x: Tensor, topk_ids: Tensor, received: Tensor, counts: Tensor) -> Callable[[], object]:
    """Bind x (T_r, H) and topk_ids (T_r, k) int32; the call writes counts (E / N,) int32 and the first rows of received (R, H). All ranks of
    the default process group call together."""

    def dispatch() -> None:
        send(problem, x, topk_ids, received, counts)

    return dispatch
