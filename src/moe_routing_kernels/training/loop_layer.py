"""A layer in plain torch, expert after expert; its rows are counted on the host, so a CUDA graph cannot hold it."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.training.grouped_mm_layer import combine, pack


def unsupported(problem: Layer) -> str | None:
    """Nothing: torch multiplies rows of every format."""
    return None


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        packed = pack(problem, x, topk_ids)
        sizes = packed.counts.tolist()
        expert_rows = packed.rows[: sum(sizes)].split(sizes)
        y = [activate(problem.activation, x @ up.T) @ down.T for x, up, down in zip(expert_rows, w13, w2, strict=True)]
        return combine(torch.cat(y), packed.inverse, topk_weights)

    return run
