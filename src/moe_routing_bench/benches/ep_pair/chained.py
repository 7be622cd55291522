"""`dispatch` by `torch.distributed.all_to_all_single`, and back by the same splits: rows by assignment, or summed by token and rank.

Back by assignment a row is multiplied by its weight where its token is; summed, where its expert is, so that weights travel with the token.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.dispatch.all_to_all import send, send_once
from moe_routing_bench.benches.ep_combine.all_to_all import send_back, sums
from moe_routing_bench.benches.ranks import Exchange


def bind(
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
