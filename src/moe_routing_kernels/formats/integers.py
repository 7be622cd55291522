"""Integers of 8, 4 and 2 bits: the range of a group is cut into 2 ** bits levels.

Without zero points the range is the largest magnitude to either side of 0. So the largest positive number is half a step beyond the
last level, which costs no more than rounding does, and 2 bits have four levels, not three (as in GPTQ, arXiv 2210.17323).
"""

import torch
from torch import Tensor

from moe_routing_kernels.formats import groups
from moe_routing_kernels.formats.groups import pack, unpack
from moe_routing_kernels.formats.weights import WeightFormat


def quantise(w: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """w (N, K), float32 or float64 -> elements, scales of `dtype` and zeros, in the layout of `formats.weights`."""
    low, high = groups.ranges(w, weight_format)
    top = 2**weight_format.bits - 1
    span = high - low if weight_format.zero_points else 2 * torch.maximum(high, -low)
    scales = groups.rounded(groups.divided(span, top), dtype)
    wide = scales.to(w.dtype)
    zeros = (
        (-low / wide).round().clamp(0, top)
        if weight_format.zero_points
        else torch.full_like(wide, 2 ** (weight_format.bits - 1))
    )
    codes = torch.empty_like(w, dtype=torch.uint8)
    for (source, where), (target, _) in zip(
        groups.views(w, weight_format), groups.views(codes, weight_format), strict=True
    ):
        target.copy_((source / wide[:, where, None] + zeros[:, where, None]).round().clamp(0, top))
    parts = {"elements": pack(codes, weight_format.bits), "scales": scales}
    return parts | {"zeros": zeros.to(torch.uint8)} if weight_format.zero_points else parts


def decode(elements: Tensor, weight_format: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Codes minus their zero points -> out (..., N, K): whole numbers below 2 ** 8 in magnitude, exact in every format."""
    unpack(elements, weight_format.bits, out)
    if zeros is None:
        out.sub_(2 ** (weight_format.bits - 1))
        return
    for view, where in groups.views(out, weight_format):
        view.sub_(zeros[..., where, None])
