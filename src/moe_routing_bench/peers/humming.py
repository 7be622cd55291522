"""Experts with weights of 8, 4 and 2 bits by Humming's grouped products (humming-kernels 0.1.19), 16-bit activations.

Strategy: kernels for Hopper's warpgroup products, compiled when they first run with a format and sizes, tiles picked by all rows together from the
library's tables; weights are dequantised in registers. An expert's rows are those between two offsets (`grouped_contiguous`), which are
read as they are. Weights are brought into the library's order when bound, by its own `prepare_and_transform_humming_tensors`, as
deployments do when they load a model. Torch's activation stands between the products and is part of the cost.

FLOPs: 6 R H I; floor: as in `cute_quantised`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, not_quantised, other_activations
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats.groups import pack
from moe_routing_kernels.formats.weights import WeightFormat

_MULTIPLE = 128  # of the columns and rows of weights: whole groups and blocks of every format
_LOCKS = 2048  # as the library's own layer has them
_ROWS = {"gemm_type": "grouped_contiguous"}


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    form = problem.quantised_weights
    if form and (form.codec not in ("integers", "float8") or problem.dtype not in ("bf16", "fp16")):
        return f"takes integers and 8-bit floats beside bf16 and fp16, not {problem.weights} beside {problem.dtype}"
    if problem.hidden % _MULTIPLE or problem.intermediate % _MULTIPLE:
        return f"takes {problem.weights} with hidden and intermediate that are multiples of {_MULTIPLE}"
    if form and form.name == "e5m2_row" and problem.dtype == "fp16":  # its epilogue scales what it has narrowed
        return "rounds the sums of e5m2_row to fp16 before they are scaled, and they overflow"
    if problem.biased:
        return "is written without biases"
    return not_quantised(problem) or other_activations(problem)


def schema(form: WeightFormat) -> dict[str, Any]:
    """What `HummingWeightSchema` takes for a format. Integers are unsigned codes there as well, with the same zero points."""
    kind = f"uint{form.bits}" if form.codec == "integers" else f"float8{form.name.partition('_')[0]}"
    sizes = {
        "weight_scale_group_size": max(form.group, 0),
        "weight_scale_group_size_n": form.rows if form.rows > 1 else 0,
    }
    return {"b_dtype": kind, "has_zero_point": form.zero_points} | sizes


def tensors_of(weights: Parts, form: WeightFormat, dtype: str) -> dict[str, Tensor]:
    """Parts of (E, N, K) weights -> weight (E, N, K * bits / 32) int32, weight_scale (E, N, groups) of `dtype`, or of float32 for blocks,
    and zero_point (E, N * bits / 32, groups) int32 of formats with zero points."""
    scales = weights["scales"] if form.rows > 1 else weights["scales"].to(FORMATS[dtype].torch_dtype)
    found = {"weight": weights["elements"].view(torch.int32), "weight_scale": scales}
    if form.zero_points:
        found["zero_point"] = pack(weights["zeros"].mT.contiguous(), form.bits).view(torch.int32).mT.contiguous()
    return found


def bind(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor, **beside: Tensor
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, the elements w13 and w2 and the parts `beside` them by name (`formats.weights`), all
    contiguous -> y (R, H)."""
    from humming.forward import humming_forward  # pyright: ignore[reportMissingImports]

    up, down = (once(one, "Humming", lambda one=one: _transformed(problem, one)) for one in parts(w13, w2, beside))
    sums = packed.new_empty(len(packed), w13.shape[1])
    common = {
        "expert_layout": offsets,
        "locks": torch.zeros(_LOCKS, dtype=torch.int32, device=packed.device),
        "compute_config": _ROWS,
    }

    def run() -> None:
        humming_forward(up[0], inputs=packed, outputs=sums, **up[1], **common)
        humming_forward(down[0], inputs=activate(problem.activation, sums), outputs=y, **down[1], **common)

    return run


def _transformed(problem: Experts, weights: Parts) -> tuple[Any, dict[str, Tensor]]:
    """The library's description of a product, and its tensors by the names of `humming_forward`."""
    from humming.schema import HummingWeightSchema  # pyright: ignore[reportMissingImports]
    from humming.transform import prepare_and_transform_humming_tensors  # pyright: ignore[reportMissingImports]

    form, elements = problem.quantised_weights, weights["elements"]
    assert form is not None, f"{problem.weights} is not quantised"
    return prepare_and_transform_humming_tensors(
        tensors_of(weights, form, problem.dtype),
        shape_n=elements.shape[1],
        shape_k=elements.shape[2] * (8 * elements.element_size()) // form.bits,
        weight_schema=HummingWeightSchema(**schema(form)),
        num_experts=len(elements),
        torch_dtype=FORMATS[problem.dtype].torch_dtype,
        device=elements.device,
    )
