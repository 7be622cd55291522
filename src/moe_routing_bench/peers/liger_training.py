"""permute, pack, experts and combine by Liger's fused MoE function (liger-kernel 0.8.5), in Triton, and its backward.

It saves the sums of the first product and multiplies the gradient by w2 before it weighs it, so it needs no expert rows. The
gradient of a weight is added up by atomics in the activations' format, from tiles of 128 elements of I. Its kernels are pinned to
their one default configuration, as in `layer`: Liger untuned. It reads the number of tiles on the host, so it cannot be captured.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers import whole_layers as peers
from moe_routing_bench.peers.liger_layer import untuned
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return peers.unsupported(problem, "Liger", ("swiglu",))


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""
    function = untuned()

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return function.apply(x, w13, w2, topk_ids, topk_weights)

    return run
