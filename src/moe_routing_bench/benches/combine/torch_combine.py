"""Gather, multiply, sum in plain torch (the seeds' baseline), eager or compiled."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.grid import Cell


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind y (R, H), inverse (T, k) int32 and weights (T, k) float32; the call writes combined (T, H)."""
    dropping = cell.capacity is not None

    def combine(y: Tensor, inverse: Tensor, weights: Tensor, combined: Tensor) -> None:
        if dropping:
            weights = torch.where(inverse >= 0, weights, 0.0)
            inverse = inverse.clamp_min(0)
        rows = y.index_select(0, inverse.reshape(-1)).view(*inverse.shape, -1)
        combined.copy_((rows * weights.unsqueeze(-1)).sum(1))

    run = torch.compile(combine, dynamic=False) if compiled else combine
    return lambda: run(inputs["y"], inputs["inverse"], inputs["weights"], outputs["combined"])
