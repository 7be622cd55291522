"""permute, pack, experts and combine by the differentiable functions of moe-ops (0.1.0), in Triton.

Torch's activation stands between its grouped products, which save their operands. Rows of an expert lie in another order in each
call, because its counting sort is by atomic additions; the gradients of weights are sums over them. Triton tunes its products.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers.moe_ops_layer import unsupported
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.layer import Layer

__all__ = ["layer", "unsupported"]


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""
    import moe_ops  # pyright: ignore[reportMissingImports]

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        tokens, top_k = topk_ids.shape
        packed, row_map, offsets = moe_ops.permute(x, topk_ids, tokens * top_k, len(w2))
        inner = activate(problem.activation, moe_ops.grouped_gemm(packed, w13, offsets))
        y = moe_ops.grouped_gemm(inner, w2, offsets)
        return moe_ops.unpermute(y, row_map, topk_weights, tokens, top_k)

    return run
