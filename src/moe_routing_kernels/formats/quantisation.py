"""Quantising expert weights and dequantising them; `formats.weights` has the memory layout of the parts."""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS, float4, float8, groups, integers
from moe_routing_kernels.formats.weights import WeightFormat

_CODECS: Mapping[str, ModuleType] = MappingProxyType({"integers": integers, "float8": float8, "float4": float4})


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
