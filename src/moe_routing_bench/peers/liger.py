"""permute, pack, experts and combine by Liger's fused MoE function (liger-kernel 0.8.5), in Triton.

It reads the number of tiles on the host, so it cannot be captured. Its tuner takes one to two minutes per shape: each kernel is
pinned to its one default configuration instead (`LIGER_FUSED_MOE_AUTOTUNE=0`), so this is Liger untuned.

In training it saves the sums of the first product and multiplies the gradient by w2 before it weighs it, so it needs no expert rows. The
gradient of a weight is added up by atomics in the activations' format, from tiles of 128 elements of I.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers import common as peers
from moe_routing_kernels.layer import Layer

_AUTOTUNE = "LIGER_FUSED_MOE_AUTOTUNE"


def untuned() -> Any:
    """Liger's autograd function, imported with its tuner off; the environment, which all implementations share, is as before."""
    was = os.environ.get(_AUTOTUNE)
    os.environ[_AUTOTUNE] = was or "0"  # read when the module is imported
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]
    finally:
        if was is None:
            del os.environ[_AUTOTUNE]
    return LigerFusedMoEFunction


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return peers.layer_unsupported(problem, "Liger", ("swiglu",))


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
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, 2 I, H), w2 (E, H, I); returns combined (T, H).

    The library allocates its result, so a bound `combined` is not written. A `residual` (T, H) is added by torch.
    """
    layer = untuned()

    def run() -> dict[str, Tensor]:
        with torch.no_grad():
            total = layer.apply(x, w13, w2, topk_ids, topk_weights)
            return peers.returned(total, residual)

    return run


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""
    function = untuned()

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return function.apply(x, w13, w2, topk_ids, topk_weights)

    return run
