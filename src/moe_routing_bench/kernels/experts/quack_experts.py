"""Experts by QuACK's grouped matrix products, as a peer: the activation in the epilogue of the first, rows optionally gathered by it.

Strategy (quack-kernels 0.6.5): persistent warp-specialised kernels in CuTe DSL for Hopper, tiles of 128 x 192 in ping-pong over
clusters of two, rows of an expert from `offsets`; the weights' gate and up halves are read side by side although w13 holds
one above the other (`concat_layout`). This is QuACK's default configuration: its tuner compiles and times 18 of them for
every shape, which is not done here. Its SiLU is made of `tanh.approx`. Its form of gpt-oss's activation does not clamp.

FLOPs: 6 R H I; floor: as in `triton_experts`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.kernels.experts import Experts
from moe_routing_bench.kernels.experts.common import mixed_formats, unaligned

_ACTIVATIONS = {"swiglu": "swiglu", "geglu": "geglu", "relu2": "relu_sq"}  # QuACK's names


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.packed not in ("bf16", "fp16"):
        return f"QuACK's experts take bf16 and fp16 rows here, not {problem.packed}"
    if problem.activation not in _ACTIVATIONS:
        return f"QuACK has no {problem.activation} with a clamp"
    return unaligned(problem, "QuACK") or mixed_formats(problem)


def bind(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), all contiguous -> y (R, H)."""
    return products(problem, packed, None, offsets, w13, w2, y)


def products(
    problem: Experts, x: Tensor, tokens: Tensor | None, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Both products -> y (R, H). Row r is x[r], or x[tokens[r]] with `tokens` (R,) int32."""
    from quack.gemm_interface import gemm, gemm_act  # imports initialise CUDA, which a server may not do

    activated = torch.empty((len(y), problem.intermediate), dtype=y.dtype, device=y.device)

    def run() -> None:
        gemm_act(
            x,
            w13.mT,
            activation=_ACTIVATIONS[problem.activation],
            postact_out=activated,
            store_preact=False,
            cu_seqlens_m=offsets,
            A_idx=tokens,
            tuned=False,
            concat_layout=("B",) if problem.gated else None,
        )
        gemm(activated, w2.mT, out=y, cu_seqlens_m=offsets, tuned=False)

    return run
