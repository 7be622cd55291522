"""Experts by vLLM's Marlin kernel for MoE (vllm 0.33.0, `moe_wna16_marlin_gemm`), 16-bit activations times quantised weights.

Strategy: a striped partition of all tiles over the multiprocessors, weights brought by cp.async in four stages and dequantised in
registers for m16n8k16, sums of split tiles in float32. Rows are gathered by blocks of one expert: `moe_align_block_size` makes their
list of the expert of each row, in each call, as vLLM does, with vLLM's rule for the size of blocks. Torch's activation stands between the
products: all are part of the cost. Weights are repacked when bound (`marlin_layout`), as vLLM does when it loads a model.

FLOPs: 6 R H I; floor: as in `cute_quantised`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import VLLM
from moe_routing_bench.peers.marlin_layout import MarlinWeights, permute_bias, repack
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, not_quantised, other_activations
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats.weights import WeightFormat

_BLOCKS = (8, 16, 32, 48, 64)  # rows of a block
_FILLED = 0.9
_LOCKS = 1024  # no fewer than four per multiprocessor
_CHOSEN = -1  # by the library


def _type(exponent: int, mantissa: int, signed: bool, bias: int = 0, finite: bool = False, nan: int = 1) -> int:
    """The number of vLLM's `ScalarType`, which has these fields from its lowest bits on."""
    return exponent | mantissa << 8 | signed << 16 | bias << 17 | finite << 49 | nan << 50


_TYPES = {
    "int4": _type(0, 4, False, bias=8),
    "int4z": _type(0, 4, False),
    "int8": _type(0, 8, False, bias=128),
    "e4m3": _type(4, 3, True, finite=True, nan=2),
    "mxfp4": _type(2, 1, True, finite=True, nan=0),
}


def type_of(form: WeightFormat, dtype: str) -> int | None:
    """The number of the type of weights of a format beside activations of `dtype`, or None where there is no kernel."""
    kind = form.name.partition("_")[0]
    return None if (kind, dtype) == ("mxfp4", "fp16") or dtype not in ("bf16", "fp16") else _TYPES.get(kind)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block: the least that an expert's mean share of the rows leaves unfilled, or 64."""
    return next((block for block in _BLOCKS if rows / experts / block < _FILLED), _BLOCKS[-1])


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    form = problem.quantised_weights
    if form and type_of(form, problem.dtype) is None:
        return f"Marlin has no kernel for {problem.weights} beside {problem.dtype}"
    if reason := not_quantised(problem) or other_activations(problem):
        return reason
    assert form is not None
    if problem.hidden % 128 or problem.intermediate % 64:
        return (
            f"Marlin takes {problem.weights} with hidden that is a multiple of 128 and intermediate that is one of 64"
        )
    if problem.hidden % form.group_of(problem.hidden) or problem.intermediate % form.group_of(problem.intermediate):
        return f"Marlin needs whole groups, not {problem.intermediate} columns of {problem.weights}"
    if problem.experts >= 1024:
        return "vLLM's moe_align_block_size takes less than 1024 experts"
    return VLLM.missing()


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
    **beside: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, the elements w13 and w2, the parts `beside` them by name (`formats.weights`), and
    biases b13 (E, N) and b2 (E, H) of activations that have them, all contiguous -> y (R, H)."""
    operators, (up, down) = VLLM.operators(), (_repacked(problem, one) for one in parts(w13, w2, beside))
    block, device = block_rows(len(packed), problem.experts), packed.device
    rows = torch.arange(len(packed), dtype=torch.int32, device=device)
    expert_of = torch.empty_like(rows)
    blocks = -(-min(len(rows) + problem.experts * (block - 1), len(rows) * block) // block)
    plan = (rows.new_empty(blocks * block), rows.new_empty(blocks), rows.new_empty(1))
    sums = packed.new_empty(len(packed), w13.shape[1])
    locks, unweighted = rows.new_zeros(_LOCKS), torch.ones(len(rows), device=device)
    biases = permute_bias(b13), permute_bias(b2)

    def multiply(x: Tensor, weights: MarlinWeights, bias: Tensor | None, out: Tensor) -> Any:
        given = (x, out, weights.elements, bias, weights.scales, None, None, weights.zeros, locks, *plan, unweighted)
        sizes = (block, 1, False, _type_id(problem), len(x), out.shape[1], x.shape[1])
        return operators.moe_wna16_marlin_gemm(*given, *sizes, False, True, False, _CHOSEN, _CHOSEN, _CHOSEN)

    def run() -> None:
        torch.searchsorted(offsets[1:], rows, right=True, out_int32=True, out=expert_of)  # of rows of none: E
        operators.moe_align_block_size(expert_of[:, None], problem.experts, block, *plan, None, None)
        multiply(packed, up, biases[0], sums)
        multiply(activate(problem.activation, sums), down, biases[1], y)

    return run


def _type_id(problem: Experts) -> int:
    form = problem.quantised_weights
    found = form and type_of(form, problem.dtype)
    assert found is not None, f"Marlin has no kernel for {problem.weights} beside {problem.dtype}"
    return found


def _repacked(problem: Experts, weights: Parts) -> MarlinWeights:
    form = problem.quantised_weights
    assert form is not None, f"{problem.weights} is not quantised"
    return once(weights, ("Marlin", form, problem.dtype), lambda: repack(weights, form, problem.dtype))
