"""Experts of e4m3 rows and e4m3 weights with a scale per 128 numbers, in CuTe DSL for Hopper: the tensor cores multiply 8-bit floats.

Strategy: the first GEMM activates its accumulators and quantises them as rows were, with a scale per 128 of them (`fp8_quantise`), or
writes them in bf16, of which `cute_pack_fp8` makes the same bits; the second GEMM reads those. GEMMs of 16 bits do not have this rounding:
it is declared (`rounded_inner`). Weights lie as the format has them.

FLOPs: 6 R H I for R rows, at twice the rate of 16 bits. Floor: those, or weights of every expert that has a row and 2 R H + 6 R I bytes of rows,
at the bandwidth of a copy. Threads scale the accumulators of each 128 along K: with few rows by two instructions per accumulator, with many by
one, which takes a quarter of the cycles of the tensor cores, at the same time.

`Variant` also keeps an unfused one that was 4 to 6 % slower at T=16384 (notebook.md), and tiles across the warpgroups (`fp8_across`), which no
GPU has run yet and nothing chooses; tests compare the variants.

Invariant: a row is written by the tiles of its own expert alone; rows of no expert are read, but never written by the GEMMs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.cute.cache import current_arch, per_problem
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import between
from moe_routing_kernels.experts.cute_experts import MOST_EXPERTS
from moe_routing_kernels.formats import empty_rows
from moe_routing_kernels.gemm.sm90 import ARCH
from moe_routing_kernels.gemm.sm90.fp8 import compile_for
from moe_routing_kernels.gemm.sm90.fp8_mainloop import Fp8Gemm, stands
from moe_routing_kernels.gemm.sm90.tile import FEW_ROWS, Tile, choose_low
from moe_routing_kernels.pack import cute_pack_fp8
from moe_routing_kernels.target import MEASURED, Target, written_for

_FORMATS = ("bf16", "fp8_block128", "e4m3_block128")  # of activations, packed rows and weights
_LEAST = 32
_WIDE_SIZES = (64, 80, 96, 112, 128)  # tokens of a wide tile
_UPRIGHT = Tile(2, 2, 64), Tile(2, 2, 128)
_TALL_ROWS = 512  # per expert, from which the second, which reads weights half as often, is faster (notebook.md)
_ROUNDS = 4  # tiles per multiprocessor, from which larger ones do not leave some of them idle


@dataclass(frozen=True)
class Variant:
    """How upright GEMMs run; the default was the fastest."""

    fused: bool = True  # the first GEMM quantises its results, and nothing runs between both
    # Of tall tiles: MMAs of 64 rows of weights that each warpgroup of the first, and of the second, GEMM has with half of the tokens (4, or 3
    # if it has no gates); 0: the warpgroups divide the weights instead. And the sums that the first warpgroup is ahead.
    across: tuple[int, int] = (0, 0)
    lead: int = 0


FASTEST = Variant()


def unsupported(problem: Experts, target: Target | None = None) -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    given = (problem.dtype, problem.packed, problem.weights)
    if given != _FORMATS:
        return f"takes activations, rows and weights of {', '.join(_FORMATS)}, not {', '.join(given)}"
    if problem.hidden % 16 or problem.intermediate % 16:
        return "the kernel needs hidden and intermediate that are multiples of 16 (16 bytes)"
    if min(problem.hidden, problem.intermediate) < _LEAST or not 2 <= problem.experts <= MOST_EXPERTS:
        return f"needs 2 to {MOST_EXPERTS} experts, and hidden and intermediate of {_LEAST}, at least"
    return written_for(ARCH, target)


def choose_tile(rows: float, experts: int, wide: int, multiprocessors: int = MEASURED.multiprocessors) -> Tile:
    """The tile with tokens on the N side for `rows` rows and `wide` rows of weights per expert: lower with few, so that every SM gets work."""
    mean = max(1.0, rows / experts)
    if mean > FEW_ROWS:
        return Tile(2, 2, choose_low(mean, _WIDE_SIZES))
    enough = min(experts, rows) * wide >= _ROUNDS * 256 * multiprocessors
    return Tile(2 if enough else 1, 2, choose_low(mean))


def gemms(problem: Experts, variant: Variant = FASTEST, target: Target = MEASURED) -> tuple[Fp8Gemm, Fp8Gemm]:
    """Both GEMMs of a problem for a target: with many rows tokens are on the M side where possible, in this variant."""
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    pair = []
    for columns, depth, activation in ((inner, hidden, problem.activation), (hidden, inner, "")):
        gated = problem.gated and bool(activation)
        quantises, tall = variant.fused and bool(activation), problem.mean_rows >= _TALL_ROWS * experts
        tile, m_atoms = _UPRIGHT[tall], variant.across[len(pair)]
        if tall and m_atoms and (gated or not quantises):
            tile = Tile(m_atoms, 2, tile.tokens, across=True)
        upright = problem.mean_rows > FEW_ROWS * experts and stands(columns, gated, problem.biased, tile)
        if not upright:
            tile = choose_tile(problem.mean_rows, experts, columns * (2 if gated else 1), target.multiprocessors)
        gemm = Fp8Gemm(columns, depth // 2, experts, activation, tile, biased=problem.biased, upright=upright)
        if upright:
            gemm = replace(gemm, quantises=quantises)
            gemm = replace(gemm, lead=variant.lead if tall and gemm.k_tiles >= gemm.stages else 0)
        pair.append(gemm)
    first, second = pair
    return first, second


def precompile(problem: Experts, arch: str, variant: Variant = FASTEST) -> None:
    """Put the kernels of a problem into the cache; needs no GPU."""
    _compiled(problem, arch, variant)
    cute_pack_fp8.precompile(between(problem), arch, checked_rows=0)


@per_problem
def _compiled(problem: Experts, arch: str, variant: Variant) -> list[tuple[Fp8Gemm, Any]]:
    return [(gemm, compile_for(arch, problem.dtype, gemm)) for gemm in gemms(problem, variant, Target.named(arch))]


def launch(
    gemm: Fp8Gemm,
    kernel: Any,
    x: Tensor,
    scales: Tensor,
    offsets: Tensor,
    w: Tensor,
    w_scales: Tensor,
    biases: Tensor | None,
    out: Tensor,
    out_scales: Tensor | None = None,
) -> Callable[[], object]:
    """The launch of one GEMM: e4m3 x (R, K) and w (E, N, K), their scales, offsets (E + 1,) int32, biases (E, N) -> out (R, columns).

    If the GEMM quantises, out is e4m3 with out_scales (R, columns / 128).
    """
    if gemm.quantises:
        out = out.view(torch.uint8)
    multiprocessors = torch.cuda.get_device_properties(out.device).multi_processor_count
    blocks = max(1, min(multiprocessors, gemm.most_tiles(len(out))))
    numbers = x.view(torch.uint8), scales, offsets, w.view(torch.uint8), w_scales
    return functools.partial(kernel, *numbers, biases, out, out_scales, blocks)


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scales: Tensor,
    w2_scales: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    variant: Variant = FASTEST,
) -> Callable[[], None]:
    """Bind packed (R, H) e4m3 with scales (R, H / 128) float32, offsets (E + 1,) int32, w13 (E, N, H) and w2 (E, H, I) e4m3 with scales
    of 128 x 128, biases b13 (E, N) and b2 (E, H) of activations that have them, all contiguous -> y (R, H) bf16."""
    (first, up_kernel), (second, down_kernel) = _compiled(problem, current_arch(), variant)
    inner = empty_rows(problem.packed_format, len(y), problem.intermediate, y.device)
    rows = (packed, scales, offsets, w13, w13_scales, b13)
    down = launch(second, down_kernel, *inner.values(), offsets, w2, w2_scales, b2, y)
    if first.quantises:
        return in_turn([launch(first, up_kernel, *rows, *inner.values()), down])
    activated = torch.empty((len(y), problem.intermediate), dtype=y.dtype, device=y.device)
    itself = torch.arange(len(y), dtype=torch.int32, device=y.device)
    quantise = cute_pack_fp8.bind(
        between(problem), x=activated, order=itself, inverse=itself[:, None], **inner, checked_rows=0
    )
    return in_turn([launch(first, up_kernel, *rows, activated), quantise, down])


def in_turn(steps: list[Callable[[], object]]) -> Callable[[], None]:
    """All steps, one after the other."""

    def run() -> None:
        for step in steps:
            step()

    return run
