"""Floats of 8 bits, e4m3 and e5m2: the largest magnitude of a group becomes the largest number (arXiv 2209.05433, section 3)."""

import torch
from torch import Tensor

from moe_routing_kernels.formats import groups
from moe_routing_kernels.formats.weights import WeightFormat


def quantise(w: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
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


def decode(elements: Tensor, weight_format: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Elements as numbers -> out (..., N, K), exact in every format of 16 bits and more."""
    out.copy_(elements)
