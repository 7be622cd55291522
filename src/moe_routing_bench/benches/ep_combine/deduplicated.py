"""A row per token and expert's rank back: a rank adds up its rows of a token, weighted, in float32, sends the sum by
`torch.distributed.all_to_all_single`, and the token's rank adds up those of all ranks. The host waits for the counts, which do not travel.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.benches.ep_combine.all_to_all import send_back
from moe_routing_bench.benches.ranks import Exchange, goes


def sums(y: Tensor, weights: Tensor, places: Tensor, count: int) -> Tensor:
    """Rows y (m, H) times weights (m,), added up in float32 to row `places` (m,) of so many, of y's dtype."""
    total = torch.zeros(count, y.shape[1], device=y.device)
    return total.index_add_(0, places, y.float() * weights[:, None]).to(y.dtype)


def bind(
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
