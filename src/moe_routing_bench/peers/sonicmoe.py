"""permute, pack, experts and combine as SonicMoE does them (sonic-moe 0.1.2, arXiv 2512.14080), for ids and weights that are given.

Its Triton kernels sort the assignments; QuACK's grouped product gathers tokens and applies the activation, another multiplies down;
a Triton kernel sums every token's rows. The parts are those of its own layer after the router, in inference mode. QuACK's tuner
picks the configuration of both products when they first run with these sizes, which is part of binding here.

In training, its autograd functions save the sums of the first product, and neither packed nor expert
rows: one grouped product gathers the gradient, multiplies it by w2, computes the activation again and the gradient of the weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers import common as peers
from moe_routing_bench.peers.quack_tuner import tuner_choices
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return peers.layer_unsupported(problem, "SonicMoE", ("swiglu", "geglu")) or unaligned(problem, "SonicMoE")


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
) -> Callable[[], None]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, 2 I, H), w2 (E, H, I) -> combined (T, H).

    A `residual` (T, H) is added by torch.
    """
    from sonicmoe.functional.forward import (  # pyright: ignore[reportMissingImports]
        _down_projection_forward,
        _router_forward,
        _up_projection_forward,
    )
    from sonicmoe.functional.triton_kernels import (  # pyright: ignore[reportMissingImports]
        TC_topk_router_metadata_triton,
    )

    experts, (tokens, top_k) = len(w2), topk_ids.shape
    rows, integers = tokens * top_k, {"dtype": torch.int32, "device": x.device}
    counts, offsets = torch.empty(experts, **integers), torch.empty(experts + 1, **integers)
    gathered, order, inverse = (torch.empty(rows, **integers) for _ in range(3))
    activated = torch.empty((rows, problem.intermediate), dtype=x.dtype, device=x.device)
    y = torch.empty((rows, problem.hidden), dtype=x.dtype, device=x.device)
    w1, w2 = w13.permute(1, 2, 0), w2.permute(1, 2, 0)  # as its module holds them

    def run() -> None:
        TC_topk_router_metadata_triton(topk_ids, experts, counts, offsets, gathered, order, inverse)
        _up_projection_forward(x, w1, None, activated, None, offsets, gathered, problem.activation, True, True)
        _down_projection_forward(w2, activated, y, None, offsets)
        _router_forward(y, combined, topk_weights.view(-1), inverse, None, top_k, problem.hidden, False)
        if residual is not None:
            combined.add_(residual)

    run.configuration = tuner_choices()
    return run


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
