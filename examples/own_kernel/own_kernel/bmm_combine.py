"""Combine as one matrix product per token: its k weights (1, k) times its k rows (k, H)."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.combine import Combine


def unsupported(problem: Combine) -> str | None:
    """Why this problem cannot run, or None."""
    return "takes no dropped assignments" if problem.dropping else None


def bind(
    problem: Combine,
    *,
    y: Tensor,
    inverse: Tensor,
    topk_weights: Tensor,
    combined: Tensor,
    residual: Tensor | None = None,
) -> Callable[[], object]:
    """Bind y (R, H), inverse (T, k) int32, topk_weights (T, k) float32; the call writes combined (T, H)."""

    def combine() -> None:
        rows = y.index_select(0, inverse.reshape(-1)).view(*inverse.shape, -1).float()
        total = torch.bmm(topk_weights.unsqueeze(1), rows).squeeze(1)
        combined.copy_(total if residual is None else total + residual)

    return combine
