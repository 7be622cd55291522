"""Experts in plain torch, one after the other: two GEMMs per expert that has rows."""

import itertools
from collections.abc import Callable

from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import feed_forward, plain_rows
from moe_routing_kernels.experts.common import mixed_formats as unsupported

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
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind packed (R, H) and its scales, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I) and biases; the call writes y (R, H).

    The call reads the offsets on the host: its true cost is the wall time, and a CUDA graph cannot hold it.
    """

    def run() -> None:
        for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                rows = plain_rows(problem, packed[first:end], None if scales is None else scales[first:end])
                feed_forward(problem.activation, rows, e, w13, w2, b13, b2, out=y[first:end])

    return run
