"""`ep_exchange` by `torch.distributed.all_to_all_single`.

With counts: each rank sends the rows that others need, one after the other; the host waits for the counts. `static`: every rank sends all its
tokens, and the rows of y, to every rank, whether it has the experts or not, so that rows have fixed places and the host waits for nothing;
with `graph` it is captured. With N far below k that is hardly more bytes.

Ids and weights travel as one message of 32-bit words.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.mailboxes import captured
from moe_routing_bench.benches.ranks import Exchange, goes


def bind(
    problem: Exchange,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    y: Tensor,
    received: Tensor,
    received_ids: Tensor,
    received_weights: Tensor,
    combined: Tensor,
) -> Callable[[], object]:
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (N M, H); the call writes the first rows of received (N M, H),
    received_ids (N M, k) int32 and received_weights (N M, k) float32, and combined (T_r, H). All ranks of the default process group call
    together."""

    def exchange() -> None:
        to = goes(topk_ids, problem.ranks, problem.local).t() > 0
        sent, tokens = to.sum(1), to.nonzero()[:, 1]
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        to_ranks, from_ranks = torch.stack([sent, come]).tolist()
        count = sum(from_ranks)
        dist.all_to_all_single(received[:count], x[tokens], from_ranks, to_ranks)
        words = topk_ids.new_empty(count, 2 * problem.top_k)
        dist.all_to_all_single(words, packed(topk_ids, topk_weights)[tokens], from_ranks, to_ranks)
        unpack(problem, words, received_ids[:count], received_weights[:count])
        back = x.new_empty(len(tokens), problem.hidden)
        dist.all_to_all_single(back, y[:count], to_ranks, from_ranks)
        combined.copy_(torch.zeros_like(combined, dtype=torch.float32).index_add_(0, tokens, back.float()))

    return exchange


def packed(ids: Tensor, weights: Tensor) -> Tensor:
    """Ids (n, k) int32 and weights (n, k) float32 -> (n, 2 k) int32."""
    return torch.cat([ids, weights.view(torch.int32)], 1)


def unpack(problem: Exchange, words: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Write the ids (n, k) of words (n, 2 k), counted from this rank's first expert, -1 elsewhere, and the weights (n, k)."""
    here = words[:, : problem.top_k] - dist.get_rank() * problem.local
    ids.copy_(here.masked_fill_((here < 0) | (here >= problem.local), -1))
    weights.view(torch.int32).copy_(words[:, problem.top_k :])


def bind_static(
    problem: Exchange,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    y: Tensor,
    received: Tensor,
    received_ids: Tensor,
    received_weights: Tensor,
    combined: Tensor,
    graph: bool = False,
) -> Callable[[], object]:
    """The same with rows by place: the call writes all rows of received, received_ids and received_weights."""
    ranks, most, count = problem.ranks, max(problem.shares), len(x)
    rows = x.new_zeros(ranks, most, problem.hidden)
    words = topk_ids.new_full((ranks, most, 2 * problem.top_k), -1)
    come, back = words.new_empty(ranks * most, 2 * problem.top_k), torch.empty_like(y)

    def exchange() -> None:
        rows[:, :count] = x
        words[:, :count] = packed(topk_ids, topk_weights)
        dist.all_to_all_single(received, rows.flatten(0, 1))
        dist.all_to_all_single(come, words.flatten(0, 1))
        unpack(problem, come, received_ids, received_weights)
        dist.all_to_all_single(back, y)
        none = goes(topk_ids, ranks, problem.local).t() == 0
        terms = back.view(ranks, most, -1)[:, :count].masked_fill(none.unsqueeze(2), 0)
        combined.copy_(terms.sum(0, dtype=torch.float32))

    return captured(exchange) if graph else exchange
