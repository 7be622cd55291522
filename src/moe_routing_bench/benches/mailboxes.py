"""Token rows by stores into the memory of other GPUs (`exchange.mailbox`), a row per token and rank, and calls as CUDA graphs. The host waits for nothing.

`ep_pair`: permute, pack and combine in CuTe DSL turn what came into the rows of experts, and their rows into sums. `ep_exchange`: the
exchange alone. Rows stay where they came: each input set has a mailbox of its own, whose rows are its outputs.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_routing_bench.benches.ranks import Exchange
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.exchange.mailbox import Mailbox
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import Permute
from moe_routing_kernels.target import Target

T = TypeVar("T")
_WARMUP = 3  # calls
_COPIES = 8  # mailboxes that are allocated together: all ranks wait for each other to map memory


def _made(problem: Exchange, copies: int = 1) -> Mailbox:
    most, dtype = max(problem.shares), FORMATS[problem.dtype].torch_dtype
    return Mailbox(most, problem.hidden, problem.top_k, problem.local, dtype, copies=copies)


@functools.cache
def mailbox(problem: Exchange) -> Mailbox:
    """Memory that the ranks of the default group share, one for all calls of a process."""
    return _made(problem)


@functools.cache
def _mailboxes(problem: Exchange) -> Iterator[Mailbox]:
    """As many as are asked for, each in memory of its own; all ranks ask alike."""
    while True:
        made = _made(problem, _COPIES)
        yield from map(made.numbered, range(_COPIES))


def captured(run: Callable[[], T]) -> Callable[[], T]:
    """The replay of a CUDA graph of a call, which returns what the call did. All ranks capture together, after calls that compile kernels and open
    NCCL's channels. What the call holds lives as long: the graph reads it by address."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = run()
    return functools.partial(_replayed, graph, run, returned)


def _replayed(graph: torch.cuda.CUDAGraph, run: Callable[[], T], returned: T) -> T:
    graph.replay()
    return returned


class Steps(NamedTuple):
    """What a rank does with what came, in `ep_pair`."""

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


def precompile_pair(problem: Exchange, arch: str, *, graph: bool = False) -> None:
    """Put the kernels of a rank into the cache; needs no GPU."""
    from moe_routing_kernels.combine import cute_combine
    from moe_routing_kernels.pack import cute_pack
    from moe_routing_kernels.permute import cute_permute

    known = steps(problem)
    precompile_exchange(problem, arch)
    cute_permute.precompile(known.permute, arch)
    cute_pack.precompile(known.pack, arch)
    cute_combine.precompile(known.combine, arch)


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
    graph: bool = False,
) -> Callable[[], object]:
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (R, H); the call writes counts (E / N,) int32, the first rows
    of received (R, H), and combined (T_r, H). All ranks of the default process group call together; with `graph` it is captured."""
    from moe_routing_kernels.combine import cute_combine
    from moe_routing_kernels.pack import cute_pack
    from moe_routing_kernels.permute import cute_permute

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


def precompile_exchange(problem: Exchange, arch: str, *, graph: bool = False) -> None:
    """Put both kernels of a rank into the cache; needs no GPU."""
    from moe_routing_kernels.exchange import cute_exchange

    sizes = (problem.ranks, problem.local, max(problem.shares), problem.hidden, problem.top_k, problem.dtype)
    cute_exchange.precompile(*sizes, Target.named(arch))


def bind_exchange(
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
    """Bind x (T_r, H), topk_ids (T_r, k) int32, topk_weights (T_r, k) float32 and y (N M, H); the call writes combined (T_r, H), and returns what
    came in the mailbox. All ranks of the default process group call together; with `graph` it is captured."""
    box = next(_mailboxes(problem))
    came = {"received": box.rows, "received_ids": box.ids, "received_weights": box.weights}

    def both_ways() -> None:
        box.out(x, topk_ids, topk_weights)
        box.back(y, topk_ids, None, combined)

    call = captured(both_ways) if graph else both_ways

    def exchange() -> dict[str, Tensor]:
        call()
        return came

    return exchange
