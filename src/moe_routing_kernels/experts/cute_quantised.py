"""Experts with quantised weights in CuTe DSL for Hopper: the two grouped GEMMs of `cute_experts`, weights dequantised in registers.

Weights are brought into the order of `quantised_layout` when they are bound, once for all calls with the same weights: deployments do it
when they load a model. Integers of 8, 4 and 2 bits, with zero points or without, and floats of 8 and 4 bits, with bf16 and fp16 activations.

FLOPs: 6 R H I for R rows. Floor: weights of every expert that has a row, with their scales, once, and 4 R (H + I) bytes of 16-bit
rows, at the bandwidth of a copy; or the FLOPs at the rate of a large 16-bit GEMM; or the instructions that dequantise. A
multiprocessor issues 128 lanes' per cycle, of logic 64: 10 to 16 per 8 codes (`dequantise`) make 60 to 100 codes per cycle. A
copy on an H200 brings about 38 codes of 4 bits in that time, and 76 of 2 bits, so 2 bits reach the instruction floor before
the floor of bytes. With 128 tokens per tile dequantising takes a quarter of the cycles of the tensor cores, at the same time.

Invariant: a row is written by the tiles of its own expert alone; rows of no expert are read, but never written.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.cute.cache import current_arch, per_problem
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import not_quantised, other_activations, unaligned
from moe_routing_kernels.experts.cute_experts import MANY_ROWS, MOST_EXPERTS, OVERLAP_ROWS
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats.weights import WeightFormat
from moe_routing_kernels.gemm.sm90 import ARCH
from moe_routing_kernels.gemm.sm90.quantised import compile_for
from moe_routing_kernels.gemm.sm90.quantised_layout import DEPTH, GROUPS, Codes, repack
from moe_routing_kernels.gemm.sm90.quantised_tile import FEWEST_TOKENS, QuantisedGemm
from moe_routing_kernels.gemm.sm90.tile import FEW_ROWS, MMA_M, Tile, choose_low
from moe_routing_kernels.target import MEASURED, Target, written_for

_LEAST = 16
_ONE_TILE = 84  # mean rows per expert, up to which few experts have more than 96
_SPREAD = 2.5  # standard deviations of an expert's rows: one expert in 160 has more
_SHORT = Tile(2, 2, 96)
_ROOMY = Tile(2, 2, 112)  # up to _ONE_TILE few experts have more
# With more variants ptxas makes each instruction wait for the previous one.
_SHARED = Tile(1, 2, 192, narrowest=128, grain=32)
_TALL = Tile(2, 2, 128)
_KINDS = {"integers": "int", "float4": "e2m1"}  # by codec; a format of 8-bit floats begins with its kind


def takes(weight_format: WeightFormat, dtype: str) -> bool:
    """Whether the kernel multiplies weights of a format and activations of `dtype`."""
    return weight_format.group in GROUPS and not weight_format.global_scale and dtype in ("bf16", "fp16")


def codes_of(weight_format: WeightFormat, dtype: str) -> Codes:
    """The layout of codes of a format that the kernel takes, with activations of `dtype`."""
    assert takes(weight_format, dtype), f"{weight_format.name} with {dtype}"
    kind = _KINDS.get(weight_format.codec) or weight_format.name.partition("_")[0]
    return Codes(kind, weight_format.bits, weight_format.zero_points, weight_format.group, dtype)


def unsupported(problem: Experts, target: Target | None = None) -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    weight_format = problem.quantised_weights
    if weight_format and not takes(weight_format, problem.dtype):
        return f"takes integers, 8-bit floats and mxfp4 with bf16 and fp16, not {problem.weights} with {problem.dtype}"
    if reason := not_quantised(problem) or other_activations(problem) or unaligned(problem, "the kernel"):
        return reason
    if min(problem.hidden, problem.intermediate) < _LEAST or not 2 <= problem.experts <= MOST_EXPERTS:
        return f"needs 2 to {MOST_EXPERTS} experts, and hidden and intermediate of {_LEAST}, at least"
    return written_for(ARCH, target)


@dataclass(frozen=True)
class Config:
    """How a GEMM runs: its tile, and how blocks and warpgroups share an SM and K."""

    tile: Tile
    resident: int = 1  # blocks that share a multiprocessor
    splits: int = 1  # warpgroups that share a tile's K


def choose_config(
    rows: float, experts: int, wide: int, codes: Codes, first: bool, multiprocessors: int = MEASURED.multiprocessors
) -> Config:
    """The configuration of the first or second GEMM for `rows` rows and `wide` rows of weights per expert, as measured (notebook.md).

    With few rows, several blocks share a multiprocessor: while one waits for its codes, the others dequantise. With so few blocks of weights that
    each SM has hardly any, all of K would take one warpgroup longer than its codes take to come. Where all tiles fit
    one wave of blocks, a second tile of a single expert would double the time: there a tile has room for the rows of random loads.
    """
    mean = max(1.0, rows / experts)
    if mean > _ONE_TILE:
        return Config(_SHARED if mean < MANY_ROWS else _TALL)
    if mean > FEW_ROWS:
        one_wave = experts * math.ceil(wide / _SHORT.m) <= multiprocessors
        return Config(_ROOMY if one_wave and mean + _SPREAD * math.sqrt(mean) > _SHORT.tokens else _SHORT)
    tokens, m_blocks = choose_low(mean), min(experts, rows) * wide // MMA_M
    each = m_blocks / multiprocessors
    if tokens > FEWEST_TOKENS:
        if codes.bits == 2 and each >= 16:  # codes arrive faster than they are dequantised
            return Config(Tile(2, 2, tokens))
        return Config(Tile(1, 2 if each >= 2 else 1, tokens), 2)
    if codes.bits == 8 or codes.groups > 1:  # two MMAs would fill the registers
        if each > 4:
            return Config(Tile(1, 2, tokens), 2)
        return Config(Tile(1, 1, tokens), 3) if codes.groups > 2 else Config(Tile(1, 1, tokens), 2, 2)
    if first:
        return Config(Tile(2, 1, tokens), 2, 3 if each <= 4 else 2)
    return Config(Tile(1, 1, tokens), 2, 2) if each <= 2 else Config(Tile(2, 1, tokens), 4)


def gemms(
    problem: Experts, overlap: bool | None = None, target: Target = MEASURED
) -> tuple[QuantisedGemm, QuantisedGemm]:
    """Both GEMMs of a problem for a target, configured by `choose_config`; with few rows they overlap."""
    weights = problem.quantised_weights
    assert weights, f"{problem.weights} is not quantised"
    codes = codes_of(weights, problem.dtype)
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    overlap = problem.mean_rows <= OVERLAP_ROWS if overlap is None else overlap
    pair = []
    for columns, depth, activation, meets in (
        (inner, hidden, problem.activation, {"signals": "early"}),
        (hidden, inner, "", {"waits": "rows"}),
    ):
        wide = 2 * inner if activation and problem.gated else columns
        config = choose_config(problem.mean_rows, experts, wide, codes, bool(activation), target.multiprocessors)
        pair.append(
            QuantisedGemm(
                *(columns, depth, experts, activation, config.tile),
                biased=problem.biased,
                codes=codes,
                resident=config.resident,
                splits=min(config.splits, math.ceil(depth / DEPTH)),
                **(meets if overlap else {}),
            )
        )
    first, second = pair
    return first, second


def precompile(problem: Experts, arch: str) -> None:
    """Put the kernels of a problem into the cache; needs no GPU."""
    _compiled(problem, arch)


@per_problem
def _compiled(problem: Experts, arch: str) -> list[tuple[QuantisedGemm, Any]]:
    return [(gemm, compile_for(arch, problem.dtype, gemm)) for gemm in gemms(problem, target=Target.named(arch))]


def repacked(gemm: QuantisedGemm, weights: Parts) -> Tensor:
    """`repack` for a GEMM, once for the same weights."""
    parts = (weights["elements"], weights["scales"], weights.get("zeros"))
    return once(weights, (gemm.codes, gemm.gated), lambda: repack(*parts, gemm.codes, gemm.gated))


def launch(
    gemm: QuantisedGemm, kernel: Any, x: Tensor, offsets: Tensor, w: Tensor, biases: Tensor | None, out: Tensor
) -> Callable[[], object]:
    """The launch of one GEMM: x (R, inner), offsets (E + 1,) int32, repacked w, biases (E, N) -> out (R, columns)."""
    multiprocessors = torch.cuda.get_device_properties(out.device).multi_processor_count
    blocks = max(1, min(multiprocessors * gemm.resident, gemm.most_tiles(len(out))))
    return functools.partial(kernel, x, offsets, w, biases, out, blocks)


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
    **quantisation: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, the elements w13 and w2, their `quantisation` parts by name (`formats.weights`), and
    biases b13 (E, N) and b2 (E, H) of activations that have them, all contiguous -> y (R, H). Raises the errors of `repack`."""
    (first, up_kernel), (second, down_kernel) = _compiled(problem, current_arch())
    activated = torch.empty((len(y), problem.intermediate), dtype=y.dtype, device=y.device)
    up_parts, down_parts = parts(w13, w2, quantisation)
    up = launch(first, up_kernel, packed, offsets, repacked(first, up_parts), b13, activated)
    down = launch(second, down_kernel, activated, offsets, repacked(second, down_parts), b2, y)

    def run() -> None:
        up()
        down()

    return run
