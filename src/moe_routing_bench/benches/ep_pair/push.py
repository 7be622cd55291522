"""`dispatch` and back by stores into the memory of the other GPUs (`exchange.mailbox`), a row per token and rank; permute, pack and combine in CuTe DSL
turn what came into the rows of experts, and their rows into sums. The host waits for nothing.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moe_routing_bench.benches.mailboxes import captured, mailbox
from moe_routing_bench.benches.ranks import Exchange
from moe_routing_kernels.combine import Combine, cute_combine
from moe_routing_kernels.exchange import cute_exchange
from moe_routing_kernels.pack import Pack, cute_pack
from moe_routing_kernels.permute import Permute, cute_permute
from moe_routing_kernels.target import Target


class Steps(NamedTuple):
    """What a rank does with what came."""

    permute: Permute
    pack: Pack
    combine: Combine


def steps(problem: Exchange) -> Steps:
    """The problems of a rank, which gets as many rows from each rank as the largest has tokens; most ids are of none of its experts."""
    rows, hidden, top_k, dtype = max(problem.shares) * problem.ranks, problem.hidden, problem.top_k, problem.dtype
    most = rows * min(top_k, problem.local)
    return Steps(
        Permute(rows, problem.local, top_k, most, outside=True),
        Pack(rows, hidden, top_k, problem.rows, dtype, dtype, padding=False),
        Combine(rows, hidden, top_k, dtype, dropping=True),
    )


def precompile(problem: Exchange, arch: str, *, graph: bool = False) -> None:
    """Put the kernels of a rank into the cache; needs no GPU."""
    known, target = steps(problem), Target.named(arch)
    sizes = (problem.ranks, problem.local, max(problem.shares), problem.hidden, problem.top_k, problem.dtype)
    cute_exchange.precompile(*sizes, target)
    cute_permute.precompile(known.permute, arch)
    cute_pack.precompile(known.pack, arch)
    cute_combine.precompile(known.combine, arch)


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
    graph: bool = False,
) -> Callable[[], object]:
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (R, H); the call writes counts (E / N,) int32, the first rows
    of received (R, H), and combined (T_r, H). All ranks of the default process group call together; with `graph` it is captured."""
    known, box = steps(problem), mailbox(problem)
    order, inverse = counts.new_empty(known.permute.rows), counts.new_empty(box.ids.shape)
    offsets, sums = counts.new_empty(problem.local + 1), box.rows.new_empty(box.rows.shape)
    calls = (
        functools.partial(box.out, x, topk_ids, topk_weights),
        cute_permute.bind(
            known.permute, topk_ids=box.ids, counts=counts, offsets=offsets, order=order, inverse=inverse
        ),
        cute_pack.bind(known.pack, x=box.rows, order=order[: len(received)], inverse=inverse, packed=received),
        cute_combine.bind(known.combine, y=y, inverse=inverse, topk_weights=box.weights, combined=sums),
        functools.partial(box.back, sums, topk_ids, None, combined),
    )

    def pair() -> None:
        for call in calls:
            call()

    return captured(pair) if graph else pair
