"""`ep_exchange` by torch: `torch.distributed.all_to_all_single`, and `torch.ops.symm_mem.all_to_all_vdev` of NVSHMEM.

With counts: each rank sends the rows that others need, one after the other; the host waits for the counts. `static`: every rank sends all its
tokens, and the rows of y, to every rank, whether it has the experts or not, so that rows have fixed places and the host waits for nothing;
with `graph` it is captured. With N far below k that is hardly more bytes.

`symmetric`: ranks load rows from the memory of other GPUs, and counts stay on the device. Rows, one after the other in the order of ranks, must lie
in symmetric memory: they are gathered there on the way out, and y is copied there on the way back. Rows stay where they came, so each
input set has memory of its own for them; all else is shared by the sets of a process. That is free when it is written again: an exchange begins
with a barrier of all ranks, and on the way back that comes after the loads of the way out. NVLink multicast is off.

Ids and weights travel as one message of 32-bit words.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.mailboxes import captured
from moe_routing_bench.benches.ranks import Exchange, goes
from moe_routing_kernels.formats import FORMATS

# Bytes that a block of `all_to_all_vdev` sends, and blocks of a launch: those of a rank take equal parts of what comes from it.
_BLOCK_BYTES, _MOST_BLOCKS = 1 << 16, 64


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


def unsupported_symmetric(problem: Exchange, *, graph: bool = False) -> str | None:
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


def bind_symmetric(
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
        # those that go first, in the order of ranks
        token = to.flatten().logical_not().byte().argsort(stable=True) % tokens
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
