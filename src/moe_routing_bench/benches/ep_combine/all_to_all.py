"""Rows back by `torch.distributed.all_to_all_single`, a row per assignment, or per token and rank. The host waits for the counts.

A row per assignment: weighted, put in the order of tokens' ranks, sent, and summed in float32 by the token's rank.

`deduplicated`: the experts' rank first adds up its rows of a token, weighted, in float32, and sends the sum.

No counts travel: a rank counts its experts' rows by the rank of their token, and its tokens' rows by their ids.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.ranks import Exchange, by_expert, goes


def send_back(
    rows: Tensor, splits: tuple[list[int], list[int]], tokens: Tensor, weights: Tensor | None, combined: Tensor
) -> None:
    """Send rows (m, H), by rank, and add up those that come, of `tokens` (n,), times `weights` (n,); `splits` are the rows of each rank that
    come and go. Writes combined (T_r, H)."""
    come = rows.new_empty(len(tokens), rows.shape[1])
    dist.all_to_all_single(come, rows, *splits)
    terms = come.float() if weights is None else come.float() * weights[:, None]
    combined.copy_(torch.zeros_like(combined, dtype=terms.dtype).index_add_(0, tokens, terms))


def bind(
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


def bind_deduplicated(
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
