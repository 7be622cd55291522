"""pack and experts fused, by QuACK: the first product gathers token rows as it loads them; no packed copy is written or read.

QuACK takes token numbers where ours are numbers of assignments, so each call divides them (R int32, read and written).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers import quack_experts
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return problem.repacked or quack_experts.unsupported(problem.experts)


def bind(
    problem: Layer, *, x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Bind x (T, H), order (R,) int32, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I) -> y (R, H).

    Rows lie in the compact layout, in which every row of an expert is an assignment.
    """
    tokens = torch.empty_like(order)
    products = quack_experts.products(problem.experts, x, tokens, offsets, w13, w2, y)

    def run() -> None:
        torch.div(order, problem.layout.top_k, rounding_mode="floor", out=tokens)
        products()

    run.configuration = products.configuration
    return run
