"""The order in which vLLM's Marlin kernels (vllm 0.33.0) have quantised weights, as its `marlin_utils` and `marlin_utils_test` define it.

Codes lie in tiles of 16 columns and 64 rows of weights, in each of which a thread has what it needs of four products m16n8k16, and
the codes of an int32 are in the order in which two at a time become 16-bit numbers. Scales and zero points of 64 rows lie as the
threads read them, and those of whole rows, like biases, in another order of 32 rows. vLLM's `gptq_marlin_repack` does the same on
the GPU, but is in a library of 92 MB that no other peer needs.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_routing_kernels.experts.dequant import Parts
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
