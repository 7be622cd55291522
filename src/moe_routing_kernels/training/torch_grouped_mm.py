"""A layer in plain torch: sort, gather, two grouped GEMMs, weighted sum; nothing is read on the host."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import torch_grouped_mm
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.training.rows import combine, pack


def unsupported(problem: Layer) -> str | None:
    """Why this problem cannot run, or None."""
    return torch_grouped_mm.unsupported(problem.experts)


def layer(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        packed = pack(problem, x, topk_ids)
        ends = packed.offsets[1:]
        inner = activate(problem.activation, F.grouped_mm(packed.rows, w13.transpose(1, 2), offs=ends))
        return combine(F.grouped_mm(inner, w2.transpose(1, 2), offs=ends), packed.inverse, topk_weights)

    return run
