"""Gather, multiply, sum in plain torch (the seeds' baseline), eager or compiled."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.combine import Combine


def bind(
    problem: Combine,
    *,
    y: Tensor,
    inverse: Tensor,
    topk_weights: Tensor,
    combined: Tensor,
    residual: Tensor | None = None,
    compiled: bool = False,
) -> Callable[[], None]:
    """Bind y (R, H), inverse (T, k) int32 and topk_weights (T, k) float32; the call writes combined (T, H).

    A `residual` (T, H) is added to each token's sum.
    """

    def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None, combined: Tensor) -> None:
        known = inverse.clamp_min(0) if problem.dropping else inverse
        terms = y.index_select(0, known.reshape(-1)).view(*inverse.shape, -1) * weights.unsqueeze(-1)
        if problem.dropping:  # a row and a weight of no assignment may hold anything
            terms.masked_fill_((inverse < 0).unsqueeze(-1), 0)
        total = terms.sum(1)
        combined.copy_(total if residual is None else total + residual)

    run = torch.compile(combine, dynamic=False) if compiled else combine
    return lambda: run(y, inverse, topk_weights, residual, combined)
