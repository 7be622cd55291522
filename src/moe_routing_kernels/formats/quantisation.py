"""Quantising expert weights and back; `formats.weights` says how the parts lie in memory."""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS, float4, float8, groups, integers
from moe_routing_kernels.formats.weights import WeightFormat

_CODECS: Mapping[str, ModuleType] = MappingProxyType({"integers": integers, "float8": float8, "float4": float4})


def quantise(w: Tensor, form: WeightFormat, dtype: str) -> dict[str, Tensor]:
    """w (E, N, K) -> its parts by name, ``elements`` and ``scales`` and, where the format has them, ``zeros`` and ``global``.

    `dtype` is the format of the activations, which scales take where the format has none of its own. Expert by expert, in float32
    at least. K is one that the format packs.
    """
    assert form.packs(w.shape[-1]), f"{form.name} packs no rows of {w.shape[-1]}"
    codec, found = _CODECS[form.codec], dict[str, Tensor]()
    for expert, one in enumerate(w):
        wide = one if one.dtype == torch.float64 else one.float()
        parts = codec.quantise(wide, form, FORMATS[dtype].torch_dtype)
        if not found:
            found = {name: part.new_empty((len(w), *part.shape)) for name, part in parts.items()}
        for name, part in parts.items():
            found[name][expert] = part
    return found


def dequantise(parts: Mapping[str, Tensor], form: WeightFormat, out: Tensor) -> None:
    """The weights of `parts` -> out (..., N, K) of any float dtype, each rounded to it once.

    The leading dimensions are those of `parts`: all experts, or one. ``global`` then has as many.
    """
    _CODECS[form.codec].decode(parts["elements"], form, parts.get("zeros"), out)
    scales = parts["scales"]
    if form.scale:  # a format of its own, which the product is computed in at least
        scales = scales.float()
    if form.global_scale:
        scales = scales * parts["global"][..., None, None]
    scales = groups.of_rows(scales, form, out.shape[-2])
    for view, where in groups.views(out, form):
        view.mul_(scales[..., where, None])
