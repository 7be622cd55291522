"""The seeds' index-select pack in plain torch, eager or compiled."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.grid import Cell


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H)."""
    top_k, padding = cell.top_k or 1, cell.capacity is not None or cell.block > 1

    def pack(x: Tensor, order: Tensor, packed: Tensor) -> None:
        if not padding:
            torch.index_select(x, 0, order // top_k, out=packed)
            return
        torch.index_select(x, 0, order.clamp_min(0) // top_k, out=packed)
        packed.masked_fill_((order < 0).unsqueeze(1), 0)

    def functional(x: Tensor, order: Tensor, packed: Tensor) -> None:
        rows = x[order.clamp_min(0) // top_k]
        packed.copy_(torch.where((order < 0).unsqueeze(1), 0, rows) if padding else rows)

    run = torch.compile(functional, dynamic=False) if compiled else pack
    return lambda: run(inputs["x"], inputs["order"], outputs["packed"])
