"""The seeds' index-select pack in plain torch, eager or compiled."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.pack import Pack, torch_pack_fp8


def unsupported(problem: Pack, *, compiled: bool = False) -> str | None:
    """Why this problem cannot run, or None."""
    return torch_pack_fp8.unsupported(problem, compiled=compiled) if problem.packed_format.quantised else None


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
        return torch_pack_fp8.bind(problem, x=x, order=order, packed=packed, scales=scales, compiled=compiled)
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
