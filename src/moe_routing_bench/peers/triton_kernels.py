"""Experts by OpenAI's triton_kernels, as sglang-kernel 0.4.3 carries them: `matmul_ogs` over ragged rows, plain weights and mxfp4.

Strategy: Triton kernels with tiles picked from the sizes by a heuristic, for plain weights persistent ones that load by TMA. Weights of mxfp4 are
brought into the library's order for Hopper when bound, as servers do when they load gpt-oss, and are dequantised in registers. gpt-oss's
activation is in the first product's epilogue, with gate and up in turns as its checkpoints have them; others are torch's. A table of which
tile has which rows of which expert, for each height of tiles, is made of the rows per expert in each call: all are part of the cost.

FLOPs: 6 R H I; floor: as in `triton_experts`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.peers.common import in_turns
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats, other_activations, other_rows, unaligned
from moe_routing_kernels.experts.dequant import Parts, once, parts

_WARPS = 8  # for which scales are ordered
_TILE = 128  # columns whose scales are loaded together, without a mask
_GROUP, _ONE = 32, 127  # elements per scale, and the exponent of 1


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.quantised_weights is None:
        return other_rows(problem) or unaligned(problem, "triton_kernels") or mixed_formats(problem)
    if (problem.weights, problem.dtype) != ("mxfp4", "bf16"):
        return f"triton_kernels takes weights of mxfp4 with bf16, not {problem.weights} with {problem.dtype}"
    if problem.hidden % _GROUP or problem.intermediate % _GROUP:
        return f"triton_kernels takes mxfp4 with hidden and intermediate that are multiples of {_GROUP}"
    return other_activations(problem)


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **scales: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of activations that have
    them, and the parts `scales` of quantised weights by name, all contiguous -> y (R, H)."""
    from triton_kernels.matmul_ogs import RoutingData, matmul_ogs  # pyright: ignore[reportMissingImports]
    from triton_kernels.tensor_details.ragged_tensor import (  # pyright: ignore[reportMissingImports]
        make_ragged_tensor_metadata,
    )

    known, (first, second) = activation_of(problem.activation), parts(w13, w2, scales)
    fused = bool(known.shift)
    if fused:
        first = once(first, "in turns", lambda given=first: {name: in_turns(part) for name, part in given.items()})
        b13 = None if b13 is None else in_turns(b13)
    (up, how_up), (down, how_down) = (
        _operand(weights, problem.quantised_weights is not None) for weights in (first, second)
    )
    bias_up, bias_down = (None if bias is None else bias.float() for bias in (b13, b2))
    sizes = torch.empty_like(offsets[1:])
    inner = packed.new_empty(len(packed), problem.intermediate if fused else w13.shape[1])
    epilogue = {"fused_activation": _swiglu(known.alpha, known.limit)} if fused else {}

    def run() -> None:
        torch.sub(offsets[1:], offsets[:-1], out=sizes)
        tiles = RoutingData(None, sizes, problem.experts, 1, make_ragged_tensor_metadata(sizes, len(packed)))
        matmul_ogs(packed, up, bias_up, tiles, precision_config=how_up, y=inner, **epilogue)
        rows = inner if fused else activate(problem.activation, inner)
        matmul_ogs(rows, down, bias_down, tiles, precision_config=how_down, y=y)

    return run


def _operand(weights: Parts, quantised: bool) -> tuple[Any, Any]:
    """Weights (E, N, K) as the library takes them, terms by columns, and the configuration that goes with them."""
    if not quantised:
        return weights["elements"].mT, None
    return once(weights, "triton_kernels", lambda: _ordered(weights))


def _ordered(weights: Parts) -> tuple[Any, Any]:
    """Elements (E, N, K / 2) and scales (E, N, K / 32) of mxfp4 -> both in the order for this GPU, and their configuration."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig  # pyright: ignore[reportMissingImports]
    from triton_kernels.numerics import InFlexData  # pyright: ignore[reportMissingImports]
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor  # pyright: ignore[reportMissingImports]
    from triton_kernels.tensor_details import layout  # pyright: ignore[reportMissingImports]

    scales = weights["scales"].view(torch.uint8)
    scales = F.pad(scales, (0, -scales.shape[2] % (_TILE // _GROUP)), value=_ONE)
    kind, how = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    elements = convert_layout(wrap_torch_tensor(weights["elements"].mT, dtype=FP4), kind, **how)
    kind, how = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=_WARPS)
    scaled = convert_layout(wrap_torch_tensor(scales.mT), kind, **how)
    return elements, PrecisionConfig(weight_scale=scaled, flex_ctx=FlexCtx(rhs_data=InFlexData()))


def _swiglu(alpha: float, limit: float | None) -> Any:
    """gpt-oss's activation as an epilogue."""
    from triton_kernels.matmul_ogs import FusedActivation  # pyright: ignore[reportMissingImports]
    from triton_kernels.specialize import FnSpecs  # pyright: ignore[reportMissingImports]
    from triton_kernels.swiglu import swiglu_fn  # pyright: ignore[reportMissingImports]

    return FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (alpha, limit))
