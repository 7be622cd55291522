"""pack and experts fused, in plain torch: every expert gathers its token rows as it computes them; no packed copy is kept."""

import itertools
from collections.abc import Callable

from torch import Tensor

from moe_routing_kernels.experts.common import feed_forward, mixed_formats
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return problem.repacked or mixed_formats(problem.experts)


def bind(
    problem: Layer,
    *,
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), order (R,), offsets (E + 1,), w13 (E, N, H), w2 (E, H, I) and biases; the call writes y (R, H).

    Loads are read on the host in every call, so the true cost is the wall time.
    """
    top_k = problem.layout.top_k

    def run() -> None:
        for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                rows = x[order[first:end].clamp_min(0) // top_k]
                feed_forward(problem.activation, rows, expert, w13, w2, b13, b2, out=y[first:end])

    return run
