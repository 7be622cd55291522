"""Floats of 4 bits, e2m1: codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and 8 to 15 their negatives.

``mxfp4`` has powers of two as scales: the scale that brings the largest magnitude of a group to 4 or more, so that values above 6 are
saturated (OCP microscaling formats 1.0, section 6.3). ``nvfp4`` has e4m3 scales, which a float32 scale per expert brings into
their range: the largest of them becomes 448.
"""

import functools

import torch
from torch import Tensor

from moe_routing_kernels.formats import groups
from moe_routing_kernels.formats.groups import pack
from moe_routing_kernels.formats.weights import WeightFormat

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponent that e8m0 stores


def quantise(w: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """w (N, K), float32 or float64 -> elements, scales and the global scale (), in the layout of `formats.weights`."""
    low, high = groups.ranges(w, weight_format)
    amax = torch.maximum(high, -low)
    parts = _with_global(amax) if weight_format.global_scale else {"scales": _power_of_two(amax)}
    wide = parts["scales"].float().to(w.dtype) * parts.get("global", 1.0)
    codes = torch.empty_like(w, dtype=torch.uint8)
    for (source, where), (target, _) in zip(
        groups.views(w, weight_format), groups.views(codes, weight_format), strict=True
    ):
        target.copy_(_nearest(source / wide[:, where, None]))
    return {"elements": pack(codes, weight_format.bits)} | parts


def decode(elements: Tensor, weight_format: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Codes as numbers -> out (..., N, K), exact in every format. A table has the two numbers of each byte."""
    out.copy_(_pairs(out.dtype, out.device)[elements.int()].flatten(-2))


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers (256, 2) of every byte. Kept, because a CUDA graph cannot hold a copy from the host."""
    numbers = [*_SIZES, *(-size for size in _SIZES)]
    return torch.tensor([(low, high) for high in numbers for low in numbers], dtype=dtype, device=device)


def _power_of_two(amax: Tensor) -> Tensor:
    """The scale 2 ** (floor(log2 amax) - 2), e8m0."""
    exponent = torch.frexp(amax).exponent - 1 - 2
    return (exponent + _BIAS).clamp(0, 2 * _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _with_global(amax: Tensor) -> dict[str, Tensor]:
    """Scales e4m3 whose largest is 448, and the float32 scale () of them all."""
    top = torch.finfo(torch.float8_e4m3fn).max
    whole = groups.rounded(groups.divided(amax.max(), _SIZES[-1] * top), torch.float32)
    return {
        "scales": groups.rounded((groups.divided(amax, _SIZES[-1]) / whole).clamp_max(top), torch.float8_e4m3fn),
        "global": whole,
    }


def _nearest(x: Tensor) -> Tensor:
    """The code whose number is nearest to x; the even code for a tie; the code of 6 beyond 6."""
    sizes = torch.tensor(_SIZES, dtype=x.dtype, device=x.device)
    middles = (sizes[:-1] + sizes[1:]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], middles.new_zeros(()))  # a tie below an even code goes up to it
    return torch.bucketize(x.abs(), middles) + 8 * x.signbit()
