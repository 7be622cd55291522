"""Packing token rows and combining expert rows in plain torch, for autograd to differentiate; nothing is read on the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_routing_kernels.layer import Layer
from moe_routing_kernels.permute import torch_permute


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
