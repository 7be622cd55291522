"""Floats of 8 bits, e4m3 and e5m2: the largest size of a group becomes the largest number (arXiv 2209.05433, section 3)."""

import torch
from torch import Tensor

from moe_routing_kernels.formats import groups
from moe_routing_kernels.formats.weights import WeightFormat


def quantise(w: Tensor, form: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """w (N, K), float32 or float64 -> elements and scales of `dtype` or the format's own, as `formats.weights` lays them."""
    element = getattr(torch, form.element)
    largest = torch.finfo(element).max
    low, high = groups.ranges(w, form)
    scales = groups.divided(torch.maximum(high, -low), largest)
    scales = groups.rounded(scales, getattr(torch, form.scale) if form.scale else dtype)
    wide = groups.of_rows(scales, form, len(w)).to(w.dtype)
    elements = torch.empty_like(w, dtype=element)
    for (given, where), (found, _) in zip(groups.views(w, form), groups.views(elements, form), strict=True):
        found.copy_((given / wide[:, where, None]).float().clamp(-largest, largest))
    return {"elements": elements, "scales": scales}


def decode(elements: Tensor, form: WeightFormat, zeros: Tensor | None, out: Tensor) -> None:
    """Elements as numbers -> out (..., N, K), exact in every format of 16 bits and more."""
    out.copy_(elements)
