"""`ep_exchange` by `torch.ops.symm_mem.all_to_all_vdev` of NVSHMEM: ranks load rows from the memory of other GPUs, and counts stay on the device.

Rows, one after the other in the order of ranks, must lie in symmetric memory: they are gathered there on the way out, and y is copied there on the
way back. Rows stay where they came, so each input set has memory of its own for them; all else is shared by the sets of a process. That is
free when it is written again: an exchange begins with a barrier of all ranks, and on the way back that comes after the loads of the way out.
NVLink multicast is off.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.ep_exchange.all_to_all import packed, unpack
from moe_routing_bench.benches.mailboxes import captured
from moe_routing_bench.benches.ranks import Exchange, goes
from moe_routing_kernels.formats import FORMATS

_BLOCK_BYTES, _MOST_BLOCKS = (
    1 << 16,
    64,
)  # of a launch of torch's kernel, whose blocks take equal parts of what comes from a rank


def unsupported(problem: Exchange, *, graph: bool = False) -> str | None:
    """Why this problem cannot run, or None."""
    from torch.distributed import _symmetric_memory as symmetric

    rows = problem.ranks * max(problem.shares)
    for row_bytes in (problem.hidden * FORMATS[problem.dtype].bytes, 8 * problem.top_k):
        blocks = min(_MOST_BLOCKS, problem.ranks * math.ceil(rows * row_bytes / _BLOCK_BYTES / problem.ranks))
        if row_bytes % (blocks // problem.ranks):
            return (
                f"rows of {row_bytes} bytes do not divide among the {blocks // problem.ranks} blocks of torch's kernel"
            )
    return None if symmetric.is_nvshmem_available() else "this build of torch, or this machine, has no NVSHMEM"


class Memory(NamedTuple):
    """What all sets of a process share: symmetric tensors for what goes out and comes, and the counts (N,) and (2, N) of each way."""

    rows: Tensor
    words: Tensor
    words_came: Tensor
    answers: Tensor
    answers_came: Tensor
    sent: Tensor
    out: Tensor
    out_words: Tensor
    back: Tensor


def _symmetric(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that all ranks of the default group allocate together."""
    from torch.distributed import _symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    if symmetric.get_backend(device) != "NVSHMEM":
        symmetric.set_backend("NVSHMEM")
    tensor = symmetric.empty(*shape, dtype=dtype, device=device)
    symmetric.rendezvous(tensor, dist.distributed_c10d._get_default_group())
    return tensor


def _group() -> str:
    return dist.distributed_c10d._get_default_group().group_name


@functools.cache
def _memory(problem: Exchange) -> Memory:
    count, dtype = problem.ranks * max(problem.shares), FORMATS[problem.dtype].torch_dtype
    rows, words = (count, problem.hidden), (count, 2 * problem.top_k)
    return Memory(
        _symmetric(*rows, dtype=dtype),
        _symmetric(*words, dtype=torch.int32),
        _symmetric(*words, dtype=torch.int32),
        _symmetric(*rows, dtype=dtype),
        _symmetric(*rows, dtype=dtype),
        _symmetric(problem.ranks, dtype=torch.int64),
        *(_symmetric(2, problem.ranks, dtype=torch.int64) for _ in range(3)),
    )


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
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (N M, H); the call writes received_ids (N M, k) int32,
    received_weights (N M, k) float32 and combined (T_r, H), and returns received (N M, H) in memory of its own. All ranks of the default
    process group call together."""
    shared, group, tokens = _memory(problem), _group(), max(1, len(x))
    came = _symmetric(*received.shape, dtype=received.dtype)
    count = problem.ranks * len(x)
    numbers = torch.arange(count, device=x.device)
    send = torch.ops.symm_mem.all_to_all_vdev

    def both_ways() -> None:
        to = goes(topk_ids, problem.ranks, problem.local).t() > 0
        token = (
            to.flatten().logical_not().byte().argsort(stable=True) % tokens
        )  # those that go first, in the order of ranks
        shared.sent.copy_(to.sum(1))
        torch.index_select(x, 0, token, out=shared.rows[:count])
        torch.index_select(packed(topk_ids, topk_weights), 0, token, out=shared.words[:count])
        send(shared.rows, came, shared.sent, shared.out, group)
        send(shared.words, shared.words_came, shared.sent, shared.out_words, group)
        unpack(problem, shared.words_came, received_ids, received_weights)
        shared.answers.copy_(y)
        send(shared.answers, shared.answers_came, shared.out[0], shared.back, group)
        terms = shared.answers_came[:count].float().masked_fill_((numbers >= shared.sent.sum())[:, None], 0)
        combined.copy_(torch.zeros_like(combined, dtype=torch.float32).index_add_(0, token, terms))

    call = captured(both_ways) if graph else both_ways

    def exchange() -> dict[str, Tensor]:
        call()
        return {"received": came}

    return exchange
