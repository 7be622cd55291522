"""permute, pack, experts and combine by the autograd functions of SonicMoE (sonic-moe 0.1.2, arXiv 2512.14080).

Those of its own layer after the router, in training mode. They save the sums of the first product, and neither packed nor expert
rows: one grouped product gathers the gradient, multiplies it by w2, computes the activation again and the gradient of the weights.
QuACK's tuner picks the configurations when the products first run with these sizes.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers import whole_layers as peers
from moe_routing_bench.peers.quack_tuner import tuner_choices
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return peers.unsupported(problem, "SonicMoE", ("swiglu", "geglu")) or unaligned(problem, "SonicMoE")


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2; its `configuration` says what the tuner chose."""
    from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]
    from sonicmoe.functional import _DownProjection, _UpProjection  # pyright: ignore[reportMissingImports]
    from sonicmoe.functional.triton_kernels import (  # pyright: ignore[reportMissingImports]
        TC_topk_router_metadata_triton,
    )

    activation = ActivationType(problem.activation)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        experts, (tokens, top_k) = len(w2), topk_ids.shape
        rows = tokens * top_k
        counts, offsets = topk_ids.new_empty(experts), topk_ids.new_empty(experts + 1)
        gathered, order, inverse = (topk_ids.new_empty(rows) for _ in range(3))
        TC_topk_router_metadata_triton(topk_ids, experts, counts, offsets, gathered, order, inverse)
        w1, w2 = w13.permute(1, 2, 0), w2.permute(1, 2, 0)  # as its module holds them
        indices, fixed_k = (gathered, order, inverse), (None, False)
        inner, sums = _UpProjection.apply(
            x, w1, None, offsets, rows, top_k, *indices, *fixed_k, activation, False, True
        )
        return _DownProjection.apply(
            inner, sums, w2, None, topk_weights, offsets, tokens, top_k, *indices, *fixed_k, activation
        )

    run.configuration = tuner_choices()
    return run
