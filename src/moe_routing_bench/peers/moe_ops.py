"""permute, pack, experts and combine by moe-ops (0.1.0), in Triton: counting sort with copied rows, grouped products by TMA, sum.

It has no activation, so torch's stands between the products. Its counting sort is by atomic additions, so rows of an expert lie in
another order in each call; their sum does not depend on it but for rounding. Triton tunes its products once.

In training its grouped products save their operands. The gradients of weights are sums over the rows of an expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers import common as peers
from moe_routing_kernels.experts.common import activate, unaligned
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    activations = ("swiglu", "geglu", "relu2")  # torch's, without biases between the products
    if reason := peers.layer_unsupported(problem, "moe-ops", activations) or unaligned(problem, "moe-ops"):
        return reason
    experts = problem.layout.experts
    if experts & (experts - 1):
        return f"moe-ops counts rows by experts whose number is a power of two, not {experts}"
    return None


def bind(
    problem: Layer,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    residual: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, N, H), w2 (E, H, I); returns combined (T, H).

    The library allocates its result, so a bound `combined` is not written. A `residual` (T, H) is added by torch.
    """
    from moe_ops import grouped_gemm, permute, unpermute  # pyright: ignore  (this module has the same name)

    tokens, top_k = topk_ids.shape

    def run() -> dict[str, Tensor]:
        with torch.no_grad():
            packed, row_map, offsets = permute(x, topk_ids, tokens * top_k, len(w2))
            inner = activate(problem.activation, grouped_gemm(packed, w13, offsets))
            y = grouped_gemm(inner, w2, offsets)
            total = unpermute(y, row_map, topk_weights, tokens, top_k)
            return peers.returned(total, residual)

    return run


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""
    from moe_ops import grouped_gemm, permute, unpermute  # pyright: ignore  (this module has the same name)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        tokens, top_k = topk_ids.shape
        packed, row_map, offsets = permute(x, topk_ids, tokens * top_k, len(w2))
        inner = activate(problem.activation, grouped_gemm(packed, w13, offsets))
        y = grouped_gemm(inner, w2, offsets)
        return unpermute(y, row_map, topk_weights, tokens, top_k)

    return run
