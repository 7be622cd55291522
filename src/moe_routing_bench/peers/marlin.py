"""Experts by vLLM's Marlin kernel for MoE (vllm 0.33.0, `moe_wna16_marlin_gemm`), 16-bit activations times quantised weights.

Strategy: a striped partition of all tiles over the multiprocessors, weights brought by cp.async in four stages and dequantised in
registers for m16n8k16, sums of split tiles in float32. Rows are gathered by blocks of one expert: `moe_align_block_size` makes their
list of the expert of each row, in each call, as vLLM does, with vLLM's rule for the size of blocks. Torch's activation stands between the
products: all are part of the cost. Weights are repacked when bound (`repack`), as vLLM does when it loads a model.

FLOPs: 6 R H I; floor: as in `cute_quantised`.

The order of quantised weights is that of vLLM's `marlin_utils` and `marlin_utils_test`. Codes lie in tiles of 16 columns and 64 rows of weights, in each of which a thread has what it needs of four products m16n8k16, and
the codes of an int32 are in the order in which two at a time become 16-bit numbers. Scales and zero points of 64 rows lie as the
threads read them, and those of whole rows, like biases, in another order of 32 rows. vLLM's `gptq_marlin_repack` does the same on
the GPU, but is in a library of 92 MB that no other peer needs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_routing_bench.peers.loading import VLLM
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, not_quantised, other_activations
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats import FORMATS, groups
from moe_routing_kernels.formats.groups import pack, unpack
from moe_routing_kernels.formats.weights import WeightFormat

TILE = 16
_INTERLEAVED = {
    4: (0, 2, 4, 6, 1, 3, 5, 7),
    8: (0, 2, 1, 3),
}  # of the codes of 4 and 8 bits that are dequantised together
_EXPONENT_BIAS = {
    "bf16": 120,
    "fp16": 8,
}  # by which the exponents of e4m3 are too small when their bits are put into 16


class MarlinWeights(NamedTuple):
    """Elements (E, K / 16, N * bits / 2) int32, scales (E, groups, N), and zeros (E, groups, N / 8) int32 of formats with zero points."""

    elements: Tensor
    scales: Tensor
    zeros: Tensor | None


def repack(weights: Parts, form: WeightFormat, dtype: str) -> MarlinWeights:
    """Parts of (E, N, K) weights of a format of integers of 4 or 8 bits, e4m3 or mxfp4 -> those of Marlin beside activations of `dtype`.

    N is a multiple of 64 and K of 16. Float32 scales are rounded to the activations' format.
    """
    bits, zeros = form.bits, weights.get("zeros")
    elements = torch.stack([_tiles(one.view(torch.uint8), bits) for one in weights["elements"]])
    rows = elements.shape[2] * 2 // bits
    scales = groups.of_rows(weights["scales"], form, rows)
    if form.codec == "float4":
        # Their bytes are dequantised four at a time, the second and third swapped.
        scales = _permuted(scales.view(torch.uint8).mT).unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].flatten(-2)
        return MarlinWeights(elements, scales.contiguous().view(torch.float8_e8m0fnu), None)
    scales = _permuted(scales.to(FORMATS[dtype].torch_dtype).mT)
    if form.codec == "float8":
        scales = scales * 2.0 ** _EXPONENT_BIAS[dtype]
    if zeros is None:
        return MarlinWeights(elements, scales, None)
    found = _in_strips(zeros.mT, _strip_order()).unflatten(-1, (-1, 8))[..., _INTERLEAVED[4]].flatten(-2)
    return MarlinWeights(elements, scales, pack(found.contiguous(), 4).view(torch.int32))


def permute_bias(bias: Tensor | None) -> Tensor | None:
    """Biases (E, N) in the order of scales of whole rows, or None."""
    return None if bias is None else _in_strips(bias, _single_order()).contiguous()


def _tiles(elements: Tensor, bits: int) -> Tensor:
    """Elements (N, K * bits / 8) of one expert -> int32 (K / 16, N * bits / 2)."""
    codes = elements.new_empty(len(elements), elements.shape[1] * 8 // bits)
    unpack(elements, bits, codes)
    tiles = codes.T.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2)  # (K / 16, N / 16, 16, 16)
    ordered = tiles.flatten(1).unflatten(1, (-1, 1024))[..., _code_order(bits).to(codes.device)]
    return pack(ordered.flatten(1), bits).view(torch.int32)


def _permuted(scales: Tensor) -> Tensor:
    """Scales (E, groups, N) in the order in which threads read them."""
    return _in_strips(scales, _single_order() if scales.shape[1] == 1 else _strip_order()).contiguous()


def _in_strips(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x (..., N), each `len(order)` neighbours in that order."""
    return x.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)


def _strip_order() -> tuple[int, ...]:
    return tuple(row + 8 * part for row in range(8) for part in range(8))


def _single_order() -> tuple[int, ...]:
    return tuple(2 * pair + at for pair in range(4) for at in (0, 1, 8, 9, 16, 17, 24, 25))


@functools.cache
def _code_order(bits: int) -> Tensor:
    """Which of the 1024 codes of four tiles of 16 columns by 16 rows of weights comes at each place."""
    order = [
        256 * tile + 16 * column + lane // 4 + 8 * half
        for lane in range(32)
        for tile in range(4)
        for half in range(2)
        for column in (2 * (lane % 4) + at for at in (0, 1, 8, 9))
    ]
    interleaved = _INTERLEAVED[bits]
    return torch.tensor(order).unflatten(0, (-1, len(interleaved)))[:, interleaved].flatten()


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
