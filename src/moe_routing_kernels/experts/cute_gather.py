"""pack and experts fused, in CuTe DSL for Hopper: the first GEMM gathers token rows as it loads them; no packed copy is written or read.

Strategy: that of `cute_experts`, except that the rows of the first GEMM come by asynchronous copies of a whole warpgroup
(`loads.load_gathered`), since a box of a tensor map holds neighbouring rows. Saves 2 R H elements of traffic, at T=16384, k=8,
H=2048 in bf16 1.07 GB, 0.25 ms at 4.25 TB/s; each tile of weights gathers its rows anew, mostly from the L2 cache.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_kernels.experts import cute_experts
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.target import Target


def unsupported(problem: Layer, target: Target | None = None) -> str | None:
    """Why it cannot run on a target (None: on any), or None."""
    return problem.repacked or cute_experts.unsupported(problem.experts, target)


def precompile(problem: Layer, arch: str) -> None:
    """Put the kernels of a problem into the cache; needs no GPU."""
    cute_experts.precompile(problem.experts, arch, problem.layout.top_k)


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
    """Bind x (T, H), order (R,) int32, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of
    activations that have them -> y (R, H)."""
    return cute_experts.launches(problem.experts, x, order, problem.layout.top_k, offsets, w13, w2, b13, b2, y)
