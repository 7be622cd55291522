"""The seeds' index-select pack in plain torch, eager or compiled."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.benches.pack import torch_pack_fp8
from moe_routing_bench.grid import FP8, Cell


def supports(cell: Cell, *, compiled: bool = False) -> str | None:
    """Why this cell cannot run, or None."""
    return torch_pack_fp8.supports(cell, compiled=compiled) if cell.dtype in FP8 else None


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H)."""
    if cell.dtype in FP8:
        return torch_pack_fp8.prepare(cell, inputs, outputs, compiled=compiled)
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
