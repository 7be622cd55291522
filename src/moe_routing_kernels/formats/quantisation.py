"""Quantising expert weights and dequantising them, by kinds of elements; `formats.weights` has the memory layout of the parts.

Integers of 8, 4 and 2 bits: the range of a group is cut into 2 ** bits levels. Without zero points the range is the largest magnitude to
either side of 0. So the largest positive number is half a step beyond the last level, which costs no more than rounding does, and 2 bits
have four levels, not three (as in GPTQ, arXiv 2210.17323).

Floats of 8 bits, e4m3 and e5m2: the largest magnitude of a group becomes the largest number (arXiv 2209.05433, section 3).

Floats of 4 bits, e2m1: codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and 8 to 15 their negatives. ``mxfp4`` has powers of two as scales: the
scale that brings the largest magnitude of a group to 4 or more, so that values above 6 are saturated (OCP microscaling formats 1.0, section
6.3). ``nvfp4`` has e4m3 scales, which a float32 scale per expert brings into their range: the largest of them becomes 448.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS, groups
from moe_routing_kernels.formats.groups import pack, unpack
from moe_routing_kernels.formats.weights import WeightFormat


def _quantise_integers(w: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
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


def _decode_integers(elements: Tensor, weight_format: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Codes minus their zero points -> out (..., N, K): whole numbers below 2 ** 8 in magnitude, exact in every format."""
    unpack(elements, weight_format.bits, out)
    if zeros is None:
        out.sub_(2 ** (weight_format.bits - 1))
        return
    for view, where in groups.views(out, weight_format):
        view.sub_(zeros[..., where, None])


def _quantise_float8(w: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """w (N, K), float32 or float64 -> elements and scales of `dtype` or the format's own, in the layout of `formats.weights`."""
    element = getattr(torch, weight_format.element)
    largest = torch.finfo(element).max
    low, high = groups.ranges(w, weight_format)
    scales = groups.divided(torch.maximum(high, -low), largest)
    scales = groups.rounded(scales, getattr(torch, weight_format.scale) if weight_format.scale else dtype)
    wide = groups.of_rows(scales, weight_format, len(w)).to(w.dtype)
    elements = torch.empty_like(w, dtype=element)
    for (source, where), (target, _) in zip(
        groups.views(w, weight_format), groups.views(elements, weight_format), strict=True
    ):
        target.copy_((source / wide[:, where, None]).float().clamp(-largest, largest))
    return {"elements": elements, "scales": scales}


def _decode_float8(elements: Tensor, weight_format: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Elements as numbers -> out (..., N, K), exact in every format of 16 bits and more."""
    out.copy_(elements)


_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponent that e8m0 stores


def _quantise_float4(w: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
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


def _decode_float4(elements: Tensor, weight_format: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
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


class Codec(NamedTuple):
    """How elements of one kind are made of weights, and numbers of elements."""

    quantise: Callable[[Tensor, WeightFormat, torch.dtype], dict[str, Tensor]]
    decode: Callable[[Tensor, WeightFormat, Tensor | None, Tensor], None]


_CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "integers": Codec(_quantise_integers, _decode_integers),
        "float8": Codec(_quantise_float8, _decode_float8),
        "float4": Codec(_quantise_float4, _decode_float4),
    }
)


def quantise(w: Tensor, weight_format: WeightFormat, dtype: str) -> dict[str, Tensor]:
    """w (E, N, K) -> its parts by name, ``elements`` and ``scales`` and, where the format has them, ``zeros`` and ``global``.

    `dtype` is the format of the activations, and of scales where the weight format does not name one. Computes expert by expert, in
    at least float32. The format must pack rows of K (`WeightFormat.packs`).
    """
    assert weight_format.packs(w.shape[-1]), f"{weight_format.name} packs no rows of {w.shape[-1]}"
    codec, stacked = _CODECS[weight_format.codec], dict[str, Tensor]()
    for expert, matrix in enumerate(w):
        wide = matrix if matrix.dtype == torch.float64 else matrix.float()
        parts = codec.quantise(wide, weight_format, FORMATS[dtype].torch_dtype)
        if not stacked:
            stacked = {name: part.new_empty((len(w), *part.shape)) for name, part in parts.items()}
        for name, part in parts.items():
            stacked[name][expert] = part
    return stacked


def dequantise(parts: Mapping[str, Tensor], weight_format: WeightFormat, out: Tensor) -> None:
    """The weights of `parts` -> out (..., N, K) of any float dtype, each rounded to it once.

    `parts` have the same leading dimensions: all experts, or a single one. So has ``global``.
    """
    _CODECS[weight_format.codec].decode(parts["elements"], weight_format, parts.get("zeros"), out)
    scales = parts["scales"]
    if weight_format.scale:  # the product is computed in at least this format
        scales = scales.float()
    if weight_format.global_scale:
        scales = scales * parts["global"][..., None, None]
    scales = groups.of_rows(scales, weight_format, out.shape[-2])
    for view, where in groups.views(out, weight_format):
        view.mul_(scales[..., where, None])
