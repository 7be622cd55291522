"""Rows to other ranks and back by `torch.distributed.all_to_all_single`: `dispatch`, `ep_combine` and `ep_pair`. The host waits for the counts.

A row per assignment: counts, then rows, then their order by expert. Rows arrive by source rank and, of each, by expert; a second pass puts
those of an expert together. On the way back they are weighted, put in the order of tokens' ranks, sent, and summed in float32 by the token's rank;
in `ep_pair` they are weighted there.

`deduplicated`: a row per token and rank, with the token's ids; the rank that receives it copies it to the rows of its experts. With k experts
on N ranks up to k / N times fewer bytes. On the way back the experts' rank first adds up its rows of a token, weighted, in float32, and sends the
sum; in `ep_pair` weights travel with the token.

No counts travel back: a rank counts its experts' rows by the rank of their token, and its tokens' rows by their ids.
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


def bind_dispatch(
    problem: Exchange,
    *,
    x: Tensor,
    topk_ids: Tensor,
    received: Tensor,
    counts: Tensor,
    deduplicated: bool = False,
) -> Callable[[], object]:
    """Bind x (T_r, H) and topk_ids (T_r, k) int32; the call writes counts (E / N,) int32 and the first rows of received (R, H). All ranks of
    the default process group call together."""
    call = send_once if deduplicated else send

    def dispatch() -> None:
        call(problem, x, topk_ids, received, counts)

    return dispatch


def send_back(
    rows: Tensor, splits: tuple[list[int], list[int]], tokens: Tensor, weights: Tensor | None, combined: Tensor
) -> None:
    """Send rows (m, H), by rank, and add up those that come, of `tokens` (n,), times `weights` (n,); `splits` are the rows of each rank that
    come and go. Writes combined (T_r, H)."""
    come = rows.new_empty(len(tokens), rows.shape[1])
    dist.all_to_all_single(come, rows, *splits)
    terms = come.float() if weights is None else come.float() * weights[:, None]
    combined.copy_(torch.zeros_like(combined, dtype=terms.dtype).index_add_(0, tokens, terms))


def bind_combine(
    problem: Exchange, *, y: Tensor, row_tokens: Tensor, row_weights: Tensor, topk_ids: Tensor, combined: Tensor
) -> Callable[[], object]:
    """Bind y (R, H), row_tokens (R,) int32, row_weights (R,) float32 and topk_ids (T_r, k) int32; the call writes combined (T_r, H). All ranks
    of the default process group call together."""
    ends = torch.tensor(problem.shares, device=y.device).cumsum(0)

    def combine() -> None:
        used = row_tokens[: int((row_tokens >= 0).sum())]
        to = torch.searchsorted(ends, used.long(), right=True)  # the rank of each row's token
        order, loads = by_expert(topk_ids, problem.experts)
        splits = loads.view(problem.ranks, problem.local).sum(1), torch.bincount(to, minlength=problem.ranks)
        by_source = to.argsort(stable=True)
        rows = (y[by_source].float() * row_weights[by_source, None]).to(y.dtype)
        send_back(rows, (splits[0].tolist(), splits[1].tolist()), order // problem.top_k, None, combined)

    return combine


def sums(y: Tensor, weights: Tensor, places: Tensor, count: int) -> Tensor:
    """Rows y (m, H) times weights (m,), added up in float32 to row `places` (m,) of so many, of y's dtype."""
    total = torch.zeros(count, y.shape[1], device=y.device)
    return total.index_add_(0, places, y.float() * weights[:, None]).to(y.dtype)


def bind_combine_deduplicated(
    problem: Exchange, *, y: Tensor, row_tokens: Tensor, row_weights: Tensor, topk_ids: Tensor, combined: Tensor
) -> Callable[[], object]:
    """Bind y (R, H), row_tokens (R,) int32, row_weights (R,) float32 and topk_ids (T_r, k) int32; the call writes combined (T_r, H). All ranks
    of the default process group call together."""
    ends = torch.tensor(problem.shares, device=y.device).cumsum(0)

    def combine() -> None:
        used = row_tokens[: int((row_tokens >= 0).sum())]
        tokens, places = used.long().unique(return_inverse=True)  # in the order of the batch, so also of ranks
        to = torch.bincount(torch.searchsorted(ends, tokens, right=True), minlength=problem.ranks)
        come = goes(topk_ids, problem.ranks, problem.local).t() > 0
        rows = sums(y[: len(used)], row_weights[: len(used)], places, len(tokens))
        send_back(rows, (come.sum(1).tolist(), to.tolist()), come.nonzero()[:, 1], None, combined)

    return combine


def bind_pair(
    problem: Exchange,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    y: Tensor,
    received: Tensor,
    counts: Tensor,
    combined: Tensor,
    deduplicated: bool = False,
) -> Callable[[], object]:
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (R, H); the call writes counts (E / N,) int32, the first rows
    of received (R, H), and combined (T_r, H). All ranks of the default process group call together."""
    call = _summed if deduplicated else _by_assignment

    def pair() -> None:
        call(problem, (x, topk_ids, received, counts), topk_weights, y, combined)

    return pair


def _by_assignment(problem: Exchange, outward: tuple[Tensor, ...], weights: Tensor, y: Tensor, out: Tensor) -> None:
    sent = send(problem, *outward)
    rows = torch.empty_like(y[: len(sent.by_expert)]).index_copy_(0, sent.by_expert, y[: len(sent.by_expert)])
    tokens, splits = sent.order // problem.top_k, (sent.to_ranks, sent.from_ranks)
    send_back(rows, splits, tokens, weights.flatten()[sent.order], out)


def _summed(problem: Exchange, outward: tuple[Tensor, ...], weights: Tensor, y: Tensor, out: Tensor) -> None:
    sent = send_once(problem, *outward)
    come = weights.new_empty(sum(sent.from_ranks), problem.top_k)
    dist.all_to_all_single(come, weights[sent.tokens], sent.from_ranks, sent.to_ranks)
    used, row_weights = y[: len(sent.assignment)], come.flatten()[sent.assignment]
    rows = sums(used, row_weights, sent.assignment // problem.top_k, len(come))
    send_back(rows, (sent.to_ranks, sent.from_ranks), sent.tokens, None, out)
