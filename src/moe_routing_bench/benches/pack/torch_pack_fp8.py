"""Pack to fp8 in plain torch, eager or compiled: quantise the tokens, then gather their bytes and their scales."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.benches.pack import fp8
from moe_routing_bench.grid import Cell


def supports(cell: Cell, *, compiled: bool = False) -> str | None:
    """Why this cell cannot run, or None: eager torch converts on every device."""
    return fp8.unsupported() if compiled else None


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind x (T, H) bfloat16 and order (R,) int32; the call writes packed (R, H) float8_e4m3fn and scales float32."""
    top_k, padding = cell.top_k or 1, cell.capacity is not None or cell.block > 1
    packed = outputs["packed"].view(torch.uint8)  # few operations take fp8
    scales = outputs["scales"].view(len(packed), -1)

    def pack(x: Tensor, order: Tensor) -> None:
        tokens, each = fp8.quantise(x, fp8.group(cell))
        source = (order.clamp_min(0) if padding else order) // top_k
        torch.index_select(tokens.view(torch.uint8), 0, source, out=packed)
        torch.index_select(each, 0, source, out=scales)
        if padding:
            packed.masked_fill_((order < 0).unsqueeze(1), 0)
            scales.masked_fill_((order < 0).unsqueeze(1), 1)

    def functional(x: Tensor, order: Tensor, packed: Tensor, scales: Tensor) -> None:
        tokens, each = fp8.quantise(x, fp8.group(cell))
        source, empty = order.clamp_min(0) // top_k, (order < 0).unsqueeze(1)
        rows, row_scales = tokens.view(torch.uint8)[source], each[source]
        packed.copy_(torch.where(empty, 0, rows) if padding else rows)
        scales.copy_(torch.where(empty, 1, row_scales) if padding else row_scales)

    if not compiled:
        return lambda: pack(inputs["x"], inputs["order"])
    run = torch.compile(functional, dynamic=False)
    return lambda: run(inputs["x"], inputs["order"], packed, scales)
