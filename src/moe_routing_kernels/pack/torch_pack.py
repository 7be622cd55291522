"""The seeds' index-select pack in plain torch, eager or compiled; to fp8 the tokens are quantised, then their bytes and scales are gathered."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.formats import quantise
from moe_routing_kernels.pack import Pack, no_conversion


def unsupported_fp8(problem: Pack, *, compiled: bool = False) -> str | None:
    """Why this problem cannot run, or None: eager torch converts on every device."""
    return no_conversion(problem.packed_format) if compiled else None


def bind_fp8(
    problem: Pack, *, x: Tensor, order: Tensor, packed: Tensor, scales: Tensor, compiled: bool = False
) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H) of the format's elements and scales float32."""
    target, top_k, padding = problem.packed_format, problem.top_k, problem.padding
    packed = packed.view(torch.uint8)  # few operations take fp8
    scales = scales.view(len(packed), -1)

    def pack(x: Tensor, order: Tensor) -> None:
        tokens, each = quantise(x, target)
        source = (order.clamp_min(0) if padding else order) // top_k
        torch.index_select(tokens.view(torch.uint8), 0, source, out=packed)
        torch.index_select(each, 0, source, out=scales)
        if padding:
            packed.masked_fill_((order < 0).unsqueeze(1), 0)
            scales.masked_fill_((order < 0).unsqueeze(1), 1)

    def functional(x: Tensor, order: Tensor, packed: Tensor, scales: Tensor) -> None:
        tokens, each = quantise(x, target)
        source, empty = order.clamp_min(0) // top_k, (order < 0).unsqueeze(1)
        rows, row_scales = tokens.view(torch.uint8)[source], each[source]
        packed.copy_(torch.where(empty, 0, rows) if padding else rows)
        scales.copy_(torch.where(empty, 1, row_scales) if padding else row_scales)

    if not compiled:
        return lambda: pack(x, order)
    run = torch.compile(functional, dynamic=False)
    return lambda: run(x, order, packed, scales)


def unsupported(problem: Pack, *, compiled: bool = False) -> str | None:
    """Why this problem cannot run, or None."""
    return unsupported_fp8(problem, compiled=compiled) if problem.packed_format.quantised else None


def bind(
    problem: Pack,
    *,
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    packed: Tensor,
    scales: Tensor | None = None,
    compiled: bool = False,
) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H) of x's dtype, or quantised with its scales."""
    if problem.packed_format.quantised:
        assert scales is not None, f"{problem.packed} has scales"
        return bind_fp8(problem, x=x, order=order, packed=packed, scales=scales, compiled=compiled)
    top_k, padding = problem.top_k, problem.padding

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
    return lambda: run(x, order, packed)
