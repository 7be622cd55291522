"""permute, pack, experts and combine by the fused MoE of FlagGems (flag-gems 5.0.2), with the tiles that it picks by a rule.

Strategy: assignments are sorted into blocks of rows; one Triton kernel gathers tokens and multiplies, a pointwise one applies
the activation, the kernel again multiplies down and weighs rows that it stores by assignment, and another sums them. The kernels
descend from vLLM's; what vLLM itself runs is `vllm_triton`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers import common as peers
from moe_routing_kernels.layer import Layer


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return peers.layer_unsupported(problem, "FlagGems", ("swiglu",))


def bind(
    problem: Layer, *, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, combined: Tensor
) -> Callable[[], dict[str, Tensor]]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, 2 I, H), w2 (E, H, I); returns combined (T, H).

    The library allocates its result, so a bound `combined` is not written.
    """
    from flag_gems.fused.fused_moe import (  # pyright: ignore[reportMissingImports]
        fused_experts_impl,  # asks for the device
    )

    def run() -> dict[str, Tensor]:
        with torch.no_grad():
            return {"combined": fused_experts_impl(x, w13, w2, topk_weights, topk_ids)}

    return run
