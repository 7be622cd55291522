"""Integers of 8, 4 and 2 bits: the range of a group is cut into 2 ** bits levels.

Without zero points the range is that of the largest size to either side. So the largest positive number is half a step beyond the
last level, which costs no more than rounding does, and 2 bits have four levels, not three (as GPTQ's, arXiv 2210.17323, does it).
"""

import torch
from torch import Tensor

from moe_routing_kernels.formats import groups
from moe_routing_kernels.formats.packing import pack, unpack
from moe_routing_kernels.formats.weights import WeightFormat


def quantise(w: Tensor, form: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """w (N, K), float32 or float64 -> elements, scales of `dtype` and zeros, as `formats.weights` lays them."""
    low, high = groups.ranges(w, form)
    top = 2**form.bits - 1
    span = high - low if form.zero_points else 2 * torch.maximum(high, -low)
    scales = groups.rounded(groups.divided(span, top), dtype)
    wide = scales.to(w.dtype)
    zeros = (-low / wide).round().clamp(0, top) if form.zero_points else torch.full_like(wide, 2 ** (form.bits - 1))
    codes = torch.empty_like(w, dtype=torch.uint8)
    for (given, where), (found, _) in zip(groups.views(w, form), groups.views(codes, form), strict=True):
        found.copy_((given / wide[:, where, None] + zeros[:, where, None]).round().clamp(0, top))
    parts = {"elements": pack(codes, form.bits), "scales": scales}
    return parts | {"zeros": zeros.to(torch.uint8)} if form.zero_points else parts


def decode(elements: Tensor, form: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Codes less their zero points -> out (..., N, K): whole numbers below 2 ** 8 in size, exact in every format."""
    unpack(elements, form.bits, out)
    if zeros is None:
        out.sub_(2 ** (form.bits - 1))
        return
    for view, where in groups.views(out, form):
        view.sub_(zeros[..., where, None])
