"""Pack to fp8 in CuTe DSL: quantise every token once and write it to the rows of its k assignments, in one launch.

Strategy: token-major, as in cute_pack. A group of threads reads its part of a token's row once into registers, reduces
it to largest absolute values, quantises it in registers and writes it k times. A group is a warp with a column tile
where a row has several scales, and a warp or a block with the whole row where it has one. Padding rows are handled as
in cute_pack; they get scale 1. The scales of a tile are gathered into neighbouring lanes, so that a warp writes them at
once.

Compulsory bytes: T * H * 2 + R * H + 4 * R * scales of a row + 4 * T * k, and 4 * R more with padding; floor: a stream
of that mix.

Invariant: every output row and scale is written by exactly one group: `inverse` names the kept rows, `order` < 0 the
others. Elements past the row are zero in registers, so they change no scale.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.cute import rows as cute_rows
from moe_routing_kernels.cute.cache import cached, compile_kernel, current_arch, fake_tensor, per_problem
from moe_routing_kernels.cute.rows import RowTiling, load_token, token_groups
from moe_routing_kernels.formats import LEAST_AMAX
from moe_routing_kernels.pack import LARGEST, Pack, no_conversion, other_element
from moe_routing_kernels.target import MEASURED, Target

ENOUGH_BLOCKS = 12  # per multiprocessor: fewer leave it partly idle, and threads then take fewer vectors each
THREADS, MOST_THREADS = 128, 1024
MOST_VECTORS, MOST_ELEMENTS = 8, 32  # per thread of a group of one scale: more would not fit the registers


@dataclass(frozen=True)
class ScaleLayout:
    """How a thread's vectors fall into groups of one scale; compile-time constants."""

    vectors_per_scale: int  # consecutive vectors of a thread that share a scale
    scales_per_access: int  # scales among the lanes of a warp, per access of the warp
    scales_per_row: int

    def scales_per_tile(self, tiling: RowTiling) -> int:
        """Scales of a column tile."""
        return tiling.vectors // self.vectors_per_scale * self.scales_per_access


@cute.jit
def largest(fragment: cute.Tensor, first: cutlass.Constexpr, span: cutlass.Constexpr) -> Float32:
    """The largest absolute value of `span` vectors of a thread."""
    values = fragment.load().to(Float32)
    amax = Float32(0.0)
    for v in cutlass.range_constexpr(first, first + span):
        for i in cutlass.range_constexpr(fragment.shape[0]):
            amax = cute.arch.fmax(amax, cute.math.absf(values[i, v]))
    return amax


@cute.jit
def over_lanes(amax: Float32, lanes: cutlass.Constexpr) -> Float32:
    """The largest value of `lanes` neighbouring lanes, a power of two, in each of them."""
    for step in cutlass.range_constexpr(int(math.log2(lanes))):
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
    return amax


@cute.jit
def over_warps(amax: Float32, warps: cutlass.Constexpr) -> Float32:
    """The largest value of a block's warps, in each of its threads."""
    shared = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), byte_alignment=16)
    thread = cute.arch.thread_idx()[0]
    if thread % WARP == 0:
        shared[thread // WARP] = amax
    cute.arch.sync_threads()
    for w in cutlass.range_constexpr(warps):
        amax = cute.arch.fmax(amax, shared[w])
    return amax


@cute.jit
def quantise(fragment: cute.Tensor, lane: Any, tiling: cutlass.Constexpr, layout: cutlass.Constexpr):
    """The thread's elements as bytes of e4m3, in the shape of `fragment`, and the scale that this lane writes."""
    wide = cute.make_rmem_tensor(fragment.shape, Float32)
    wide.store(fragment.load().to(Float32))
    lane_scale = Float32(1.0)  # the scale that this lane writes
    for first in cutlass.range_constexpr(0, tiling.vectors, layout.vectors_per_scale):
        amax = over_lanes(largest(fragment, first, layout.vectors_per_scale), WARP // layout.scales_per_access)
        if cutlass.const_expr(tiling.lanes > WARP):
            amax = over_warps(amax, tiling.lanes // WARP)
        small = amax < LEAST_AMAX
        scale = cutlass.select_(small, Float32(1.0), amax * Float32(1 / LARGEST))
        factor = cutlass.select_(small, Float32(1.0), LARGEST * cute.arch.rcp_approx(amax))
        for v in cutlass.range_constexpr(first, first + layout.vectors_per_scale):
            wide[None, v].store(wide[None, v].load() * factor)
        if cutlass.const_expr(layout.scales_per_access > 1):
            scale = cute.arch.shuffle_sync(scale, lane % layout.scales_per_access * (WARP // layout.scales_per_access))
        lane_scale = cutlass.select_(
            lane // layout.scales_per_access == first // layout.vectors_per_scale, scale, lane_scale
        )
    quantised = cute.make_rmem_tensor(fragment.shape, cutlass.Float8E4M3FN)
    quantised.store(wide.load().to(cutlass.Float8E4M3FN))
    return cute.recast_tensor(quantised, Uint8), lane_scale


@cute.kernel
def pack_fp8_kernel(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    scales: cute.Tensor,
    tiling: cutlass.Constexpr,
    layout: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
):
    """A group of `tiling.lanes` threads: a column tile of one token, and of the rows that it checks for padding."""
    # load
    token, column = cute_rows.position(tiling)
    lane = cute.arch.thread_idx()[0] % tiling.lanes
    fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), x.element_type)
    fragment.fill(0)
    rows, sources = load_token(x, order, inverse, token, column, fragment, tiling, checked_rows)

    # quantise
    result, lane_scale = quantise(fragment, lane, tiling, layout)
    count = cutlass.const_expr(layout.scales_per_tile(tiling))
    place = (column - lane) // (tiling.lanes * tiling.vectors) * count + lane  # the lane's scale among the row's scales
    writes = lane < count and place < scales.shape[1]
    # store
    for j in cutlass.range_constexpr(rows.shape[0]):
        if rows[j] >= 0:
            cute_rows.store_row(result, packed, rows[j], column, tiling)
            if writes:
                scales[Int64(rows[j]), place] = lane_scale
    if cutlass.const_expr(checked_rows > 0):
        result.fill(0)
        for i in cutlass.range_constexpr(checked_rows):
            if sources[i] < 0:
                cute_rows.store_row(result, packed, token * checked_rows + i, column, tiling)
                if writes:
                    scales[Int64(token * checked_rows + i), place] = Float32(1.0)


@cute.jit
def pack_fp8_host(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    scales: cute.Tensor,
    tiling: cutlass.Constexpr,
    layout: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
    stream: Any,
):
    groups = token_groups(x.shape[0], order.shape[0], checked_rows)
    pack_fp8_kernel(x, order, inverse, packed, scales, tiling, layout, checked_rows).launch(
        grid=(tiling.blocks(groups), 1, 1), block=(tiling.threads, 1, 1), stream=stream
    )


@cached
def compile_for(
    arch: str, layout: ScaleLayout, top_k: int, tiling: RowTiling, checked_rows: int, keep: bool = False
) -> Any:
    """Compile pack to fp8 for one architecture and shape class (no GPU needed).

    `checked_rows` is the number of output rows that each group checks for padding; 0 promises that no row is padding.
    The result is called with x (T, H), order (R,), inverse (T, k), packed (R, H) as bytes, scales (R, scales of a row).
    """
    tokens, rows = cute.sym_int(), cute.sym_int()
    arguments = [
        fake_tensor(cutlass.BFloat16, tokens, tiling.hidden),
        fake_tensor(Int32, rows),
        fake_tensor(Int32, tokens, top_k),
        fake_tensor(Uint8, rows, tiling.hidden),
        fake_tensor(Float32, rows, layout.scales_per_row),
        tiling,
        layout,
        checked_rows,
    ]
    return compile_kernel(pack_fp8_host, arguments, arch, keep)


def scale_layout(tiling: RowTiling, group: int) -> ScaleLayout:
    """How a tiling of `choose_tiling` is divided into groups of `group` elements."""
    if group == tiling.hidden:
        return ScaleLayout(tiling.vectors, 1, 1)
    across = WARP * tiling.width  # elements of one vector per lane
    return ScaleLayout(max(1, group // across), max(1, across // group), math.ceil(tiling.hidden / group))


def choose_tiling(tokens: int, hidden: int, group: int, multiprocessors: int = MEASURED.multiprocessors) -> RowTiling:
    """A tile belongs to a warp and holds whole groups; or it is a row, which a warp or a block holds."""
    width, enough = math.gcd(hidden, VECTOR_BYTES // 2), multiprocessors * ENOUGH_BLOCKS
    count = hidden // width
    if group == hidden:
        return _row_tiling(tokens >= enough, hidden, width, count)
    span = max(1, group // (WARP * width))  # vectors of a thread that share a scale
    tilings = [RowTiling(hidden, width, max(1, most // span) * span, WARP, THREADS, True) for most in (4, 2, 1)]
    # A lane writes one scale of a tile.
    tilings = [tiling for tiling in tilings if scale_layout(tiling, group).scales_per_tile(tiling) <= WARP]
    tightest = min(tiling.tiles * tiling.vectors for tiling in tilings)
    fitting = [tiling for tiling in tilings if tiling.tiles * tiling.vectors == tightest]
    return next((tiling for tiling in fitting if tiling.blocks(tokens) >= enough), fitting[-1])


def _row_tiling(many: bool, hidden: int, width: int, count: int) -> RowTiling:
    """One tile of at most four vectors per thread where it can be; one unless tokens are `many`. Exact if it can be."""
    fewest = math.ceil(count / MOST_THREADS)
    most = max(fewest, min(4 if many else 1, math.ceil(count / WARP)))
    exact = [v for v in range(most, fewest - 1, -1) if count % (v * WARP) == 0]
    vectors = exact[0] if exact else most
    lanes = math.ceil(count / (vectors * WARP)) * WARP
    return RowTiling(hidden, width, vectors, lanes, THREADS if lanes == WARP else lanes, True)


def unsupported(problem: Pack) -> str | None:
    """Why the kernel cannot run a problem, or None.

    A group is a whole row, or `width` times a power of two elements, or several whole accesses of a warp: only then do
    neighbouring lanes hold whole groups.
    """
    if problem.dtype != "bf16":
        return f"the cute pack quantises bf16 tokens, not {problem.dtype}"
    hidden, group = problem.hidden, problem.group
    width = math.gcd(hidden, VECTOR_BYTES // 2)
    per_thread, access = (
        min(MOST_ELEMENTS, MOST_VECTORS * width),
        WARP * width,
    )  # most elements of a thread; elements of a warp's access
    if group == hidden and group > MOST_THREADS * per_thread:
        most = MOST_THREADS * per_thread
        return f"the cute pack holds rows with one scale of up to {most} elements (in vectors of {width}), not {hidden}"
    if group != hidden and (group % width or (access % group and group % access) or group > WARP * per_thread):
        sizes = f"a power of two from {width} to {access} elements or a multiple of {access} up to {WARP * per_thread}"
        return f"the cute pack takes groups of {sizes} (in vectors of {width}), not {group}"
    return other_element(problem.packed_format) or no_conversion(problem.packed_format)


def precompile(problem: Pack, arch: str, *, checked_rows: int) -> None:
    """Put the kernel of a problem into the cache; needs no GPU. Nothing where there is no conversion to e4m3."""
    if int(arch.strip("sm_a")) >= 89:
        _compiled(problem, arch, checked_rows)


@per_problem
def _compiled(problem: Pack, arch: str, checked_rows: int) -> Any:
    tiling = choose_tiling(problem.tokens, problem.hidden, problem.group, Target.named(arch).multiprocessors)
    return compile_for(arch, scale_layout(tiling, problem.group), problem.top_k, tiling, checked_rows)


def bind(
    problem: Pack,
    *,
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    checked_rows: int,
) -> Callable[[], None]:
    """Bind pack: x (T, H) bfloat16, order (R,) int32, inverse (T, k) int32 -> packed (R, H) float8_e4m3fn and scales.

    `checked_rows` is the number of output rows per token that are checked for padding, 0 where none can be.
    """
    kernel = _compiled(problem, current_arch(), checked_rows)
    return functools.partial(kernel, x, order, inverse, packed.view(torch.uint8), scales.view(len(order), -1))
