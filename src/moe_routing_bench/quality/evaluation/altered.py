"""What a trained model loses where its experts are quantised or its layers have another capacity, without learning to live with it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moe_routing_bench.quality.corpora.batches import Windows
from moe_routing_bench.quality.evaluation.evaluate import bits, loss_of, with_capacity
from moe_routing_bench.quality.model.language_model import TinyLM
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import WEIGHTS, WeightFormat

# those of the seed document 003, and two of 4-bit floats
FORMATS = (
    *("int8_g128", "int8z_g128", "int4_g128", "int4z_g128", "int2_g128", "int2z_g128", "e4m3_g128", "e5m2_g128"),
    *("mxfp4", "nvfp4"),
)
CAPACITIES = (1.0, 1.25, 1.5, 2.0)


def fields(model: TinyLM, windows: Windows, batch: int) -> dict[str, dict[str, float] | None]:
    """Row fields: bits per byte by format of the experts' weights, without a capacity, and by capacity factor; None for a dense model.

    Each is a pass over all windows. The model is afterwards what it was.
    """
    if not model.layers:
        return {"bits_by_format": None, "bits_by_capacity": None}
    by_format, by_capacity = {}, {}
    for name in FORMATS:
        with with_capacity(model, None), quantised(model, WEIGHTS[name]) as whole:
            if whole:
                by_format[name] = bits(loss_of(model, windows, batch)[0])
    for factor in CAPACITIES:
        with with_capacity(model, factor):
            by_capacity[f"{factor:g}"] = bits(loss_of(model, windows, batch)[0])
    return {"bits_by_format": by_format, "bits_by_capacity": by_capacity}


@contextlib.contextmanager
def quantised(model: TinyLM, form: WeightFormat) -> Iterator[bool]:
    """Inside, the experts' weights are what their codes in `form` stand for.

    Gives False, and changes nothing, where the sizes of the experts do not fill whole bytes. Scales are of the format that experts
    compute in: bfloat16 on a GPU, else float32.
    """
    weights: list[nn.Parameter] = [
        weight for layer in model.layers for weight in (layer.experts.w13_EDH, layer.experts.w2_EHD)
    ]
    before = [weight.detach().clone() for weight in weights]
    whole = all(form.packs(weight.shape[1]) for weight in weights)
    try:
        if whole:
            for weight in weights:
                _round(weight.data, form, "bf16" if weight.is_cuda else "fp32")
        yield whole
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)


def _round(weight: Tensor, form: WeightFormat, dtype: str) -> None:
    """Replace weight (E, K, N) by what its codes stand for; products sum over K, whose neighbours share a scale."""
    rows = weight.transpose(1, 2).contiguous()
    parts, out = quantise(rows, form, dtype), torch.empty_like(rows)
    dequantise(parts, form, out)
    weight.copy_(out.transpose(1, 2))
