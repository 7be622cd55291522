"""What benches over ranks with a GPU each share: a mailbox per problem, and calls as CUDA graphs."""

import functools
from collections.abc import Callable

import torch

from moe_routing_bench.benches.ranks import Exchange
from moe_routing_kernels.exchange.mailbox import Mailbox
from moe_routing_kernels.formats import FORMATS

_WARMUP = 3  # calls


@functools.cache
def mailbox(problem: Exchange) -> Mailbox:
    """Memory that the ranks of the default group share, one for all calls of a process."""
    most, dtype = max(problem.shares), FORMATS[problem.dtype].torch_dtype
    return Mailbox(most, problem.hidden, problem.top_k, problem.local, dtype)


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of a call. All ranks capture together, after calls that compile kernels and open NCCL's channels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
