"""A layer in plain torch: sort, gather, GEMMs of experts, weighted sum.

`loop`: expert after expert; rows are counted on the host, so a CUDA graph cannot hold it. `grouped_mm`: two grouped GEMMs; nothing is read on
the host. `pack` and `combine` are those of both. Autograd differentiates all of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import torch_experts
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.permute import torch_permute


def unsupported_loop(problem: Layer) -> str | None:
    """Nothing: torch multiplies rows of every format."""
    return None


def layer_loop(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        packed = pack(problem, x, topk_ids)
        sizes = packed.counts.tolist()
        expert_rows = packed.rows[: sum(sizes)].split(sizes)
        y = [activate(problem.activation, x @ up.T) @ down.T for x, up, down in zip(expert_rows, w13, w2, strict=True)]
        return combine(torch.cat(y), packed.inverse, topk_weights)

    return run


class Packed(NamedTuple):
    """Token rows grouped by expert."""

    rows: Tensor  # (R, H), zeros where a row is of no expert
    counts: Tensor  # (E,) kept rows of each expert
    offsets: Tensor  # (E + 1,) int32
    inverse: Tensor  # (T, k) row of each assignment, -1 where it was dropped


def pack(problem: Layer, x: Tensor, topk_ids: Tensor) -> Packed:
    """Sort the assignments and copy their tokens' rows; the gradient of x is a sum by index_add, in the format of x."""
    counts, offsets, order, inverse = torch_permute.permute(problem.layout.problem, topk_ids)
    rows = x.index_select(0, order.clamp_min(0) // problem.layout.top_k)
    if problem.layout.padding:  # also keeps rows of no expert, whose gradient is undefined, from flowing back
        rows = rows.masked_fill((order < 0).unsqueeze(1), 0)
    return Packed(rows, counts, offsets.int(), inverse)


def combine(y: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """Expert rows y (R, H), inverse (T, k) and weights (T, k) float32 -> their sum for each token (T, H), in float32, rounded once."""
    rows = y.index_select(0, inverse.clamp_min(0).reshape(-1)).view(*inverse.shape, -1)
    return (rows * torch.where(inverse < 0, 0.0, weights).unsqueeze(-1)).sum(1).to(y.dtype)


def unsupported_grouped_mm(problem: Layer) -> str | None:
    """Why this problem cannot run, or None."""
    return torch_experts.unsupported_grouped_mm(problem.experts)


def layer_grouped_mm(problem: Layer) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2."""

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        packed = pack(problem, x, topk_ids)
        ends = packed.offsets[1:]
        inner = activate(problem.activation, F.grouped_mm(packed.rows, w13.transpose(1, 2), offs=ends))
        return combine(F.grouped_mm(inner, w2.transpose(1, 2), offs=ends), packed.inverse, topk_weights)

    return run
