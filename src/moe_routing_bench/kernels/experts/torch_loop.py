"""Experts in plain torch, one after the other: two matrix products per expert that has rows."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.kernels.experts import Experts
from moe_routing_bench.kernels.experts.swiglu import mixed_formats as unsupported
from moe_routing_bench.kernels.experts.swiglu import plain_rows, swiglu

__all__ = ["bind", "unsupported"]


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    scales: Tensor | None = None,
) -> Callable[[], None]:
    """Bind packed (R, H) and its scales, offsets (E + 1,) int32, w13 (E, 2 I, H), w2 (E, H, I); the call writes y (R, H).

    The call reads the offsets on the host: its true cost is the wall time, and a CUDA graph cannot hold it.
    """

    def run() -> None:
        for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                rows = plain_rows(problem, packed[first:end], None if scales is None else scales[first:end])
                torch.mm(swiglu(rows @ w13[e].T), w2[e].T, out=y[first:end])

    return run
