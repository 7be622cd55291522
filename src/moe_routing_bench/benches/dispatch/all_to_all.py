"""By `torch.distributed.all_to_all_single`, with a row per assignment, or per token and rank. The host waits for the counts.

A row per assignment: counts, then rows, then their order by expert. Rows arrive by source rank and, of each, by expert; a second pass puts
those of an expert together.

`deduplicated`: a row per token and rank, with the token's ids; the rank that receives it copies it to the rows of its experts. With k experts
on N ranks up to k / N times fewer bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.ranks import Exchange, by_expert, goes


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


class SentOnce(NamedTuple):
    """Which rows went where, a row per token and rank: what brings their sums back."""

    tokens: Tensor  # (n,) the token of each row that this rank has sent
    assignment: Tensor  # (m,) the place among (rows that arrived, k) of each row by expert
    to_ranks: list[int]  # rows for each rank
    from_ranks: list[int]  # rows of each rank


def send_once(problem: Exchange, x: Tensor, topk_ids: Tensor, received: Tensor, counts: Tensor) -> SentOnce:
    """Send x (T_r, H) by topk_ids (T_r, k), each token once to a rank; writes the first rows of received (R, H) and counts (E / N,)."""
    to = goes(topk_ids, problem.ranks, problem.local).t() > 0
    sent, tokens = to.sum(1), to.nonzero()[:, 1]
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent)
    splits = come.tolist(), sent.tolist()
    rows = x.new_empty(sum(splits[0]), problem.hidden)
    ids = topk_ids.new_empty(len(rows), problem.top_k)
    dist.all_to_all_single(ids, topk_ids[tokens], *splits)
    dist.all_to_all_single(rows, x[tokens], *splits)
    expert = ids.flatten() - dist.get_rank() * problem.local
    here = ((expert >= 0) & (expert < problem.local)).nonzero()[:, 0]
    expert, order = expert[here].sort(stable=True)
    assignment = here[order]
    torch.index_select(rows, 0, assignment // problem.top_k, out=received[: len(order)])
    counts.copy_(torch.bincount(expert, minlength=problem.local))
    return SentOnce(tokens, assignment, splits[1], splits[0])


def bind_deduplicated(
    problem: Exchange, *, x: Tensor, topk_ids: Tensor, received: Tensor, counts: Tensor
) -> Callable[[], object]:
    """Bind x (T_r, H) and topk_ids (T_r, k) int32; the call writes counts (E / N,) int32 and the first rows of received (R, H). All ranks of
    the default process group call together."""

    def dispatch() -> None:
        send_once(problem, x, topk_ids, received, counts)

    return dispatch
