"""`ep_exchange` by DeepEP's kernels for the GPUs of one host (tokenspeed-deepep 1.2.1, the first version of deepseek-ai/DeepEP).

A kernel counts what each rank gets, one sends a row per token and rank with ids and weights through a ring of each channel, and another brings a
row back and adds up. `num_worst_tokens` is set, so that the host waits for nothing; with `graph` the call is captured. Settings are
the package's own for so many ranks: 20 multiprocessors, and its chunks. Ids become 64-bit on the way out and 32-bit afterwards,
which is part of the cost.

Rows, weights and sums stay in the tensors that the package returns.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.mailboxes import captured
from moe_routing_bench.benches.ranks import Exchange

_RANKS = (2, 4, 8)  # that the kernels are compiled for, on one host
_STEP = 16  # elements: a row is stored in two halves of whole 16-byte vectors
_MOST_HIDDEN = 8176  # half of a row and a barrier lie in the 8 KiB that a warp has


def unsupported(problem: Exchange, *, graph: bool = False) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.ranks not in _RANKS:
        return f"DeepEP's kernels for one host take 2, 4 or 8 ranks, not {problem.ranks}"
    if problem.dtype != "bf16":
        return f"DeepEP adds up bf16 rows, not {problem.dtype}"
    if problem.hidden % _STEP or problem.hidden > _MOST_HIDDEN:
        return f"DeepEP takes a hidden size of whole {_STEP}s up to {_MOST_HIDDEN}, not {problem.hidden}"
    return None


@functools.cache
def _buffer(hidden: int) -> Any:
    """The memory that all calls of a process share, for rows of so many elements; all ranks of the default group make it together."""
    from deep_ep import Buffer  # pyright: ignore[reportMissingImports]

    group = dist.distributed_c10d._get_default_group()
    configs = Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
    return Buffer(group, max(each.get_nvl_buffer_size_hint(2 * hidden, group.size()) for each in configs))


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
    graph: bool = False,
) -> Callable[[], dict[str, Tensor]]:
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (N M, H); the call writes received_ids (N M, k) int32, and
    returns received (N M, H), received_weights (N M, k) float32 and combined (T_r, H). All ranks of the default process group call together."""
    buffer = _buffer(problem.hidden)

    def both_ways() -> dict[str, Tensor]:
        ids = topk_ids.long()
        to_ranks, _, to_experts, goes, _ = buffer.get_dispatch_layout(ids, problem.experts)
        rows, row_ids, weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=to_ranks,
            num_tokens_per_expert=to_experts,
            is_token_in_rank=goes,
            topk_idx=ids,
            topk_weights=topk_weights,
            num_worst_tokens=len(y),
        )
        received_ids.copy_(row_ids)
        sums, _, _ = buffer.combine(y, handle)
        return {"received": rows, "received_weights": weights, "combined": sums}

    return captured(both_ways) if graph else both_ways
