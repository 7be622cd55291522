"""Pack to fp8 in CuTe DSL: quantise every token once and write it to the output rows of its k assignments, in one launch.

Strategy: token-major, as in cute_pack. A group of threads reads its part of a token's row once into registers, reduces
it to largest absolute values, quantises it in registers and writes it k times: a warp a column tile where 128 elements
share a scale, a warp or a block the whole row where it has one scale. Padding rows are handled as in cute_pack; they
get scale 1. The scales of a tile are gathered into neighbouring lanes, so that a warp writes them at once.
Compulsory bytes: T * H * 2 + R * H + 4 * R * scales a row + 4 * T * k, and 4 * R more with padding; floor: a stream of
that mix.

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

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.benches.pack import fp8
from moe_routing_bench.cute_support import WARP, RowTiling

ENOUGH_BLOCKS = 132 * 12  # fewer leave a large GPU partly idle: threads then take fewer vectors each
THREADS, MOST_THREADS = 128, 1024
MOST_VECTORS, MOST_ELEMENTS = 8, 32  # of a row with one scale that a thread holds: more would not fit the registers


@dataclass(frozen=True)
class Scales:
    """How a thread's vectors fall into groups of one scale; compile-time constants."""

    span: int  # vectors of a thread, one after the other, that share a scale
    side: int  # scales side by side among the lanes of a warp
    of_row: int  # scales of a row

    def of_tile(self, tiling: RowTiling) -> int:
        """Scales of a column tile."""
        return tiling.vectors // self.span * self.side


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


@cute.kernel
def pack_fp8_kernel(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    scales: cute.Tensor,
    tiling: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    slab: cutlass.Constexpr,
):
    """A group of `tiling.lanes` threads: a column tile of one token, and of the `slab` rows it checks for padding."""
    token, column = support.position(tiling)
    lane = cute.arch.thread_idx()[0] % tiling.lanes
    top_k = cutlass.const_expr(inverse.shape[1])
    shape = cutlass.const_expr((tiling.width, tiling.vectors))

    fragment = cute.make_rmem_tensor(shape, x.element_type)
    rows = cute.make_rmem_tensor((top_k,), Int32)
    sources = cute.make_rmem_tensor((max(slab, 1),), Int32)
    fragment.fill(0)
    rows.fill(-1)
    sources.fill(0)
    if token < x.shape[0]:
        cute.autovec_copy(inverse[token, None], rows)
        support.load_row(x, token, column, fragment, tiling)
    for i in cutlass.range_constexpr(slab):
        if token * slab + i < order.shape[0]:
            sources[i] = order[token * slab + i]

    wide = cute.make_rmem_tensor(shape, Float32)
    wide.store(fragment.load().to(Float32))
    own = Float32(1.0)  # the scale that this lane writes
    for first in cutlass.range_constexpr(0, tiling.vectors, kind.span):
        amax = over_lanes(largest(fragment, first, kind.span), WARP // kind.side)
        if cutlass.const_expr(tiling.lanes > WARP):
            amax = over_warps(amax, tiling.lanes // WARP)
        small = amax < fp8.LEAST_AMAX
        scale = cutlass.select_(small, Float32(1.0), amax * Float32(1 / fp8.LARGEST))
        factor = cutlass.select_(small, Float32(1.0), fp8.LARGEST * cute.arch.rcp_approx(amax))
        for v in cutlass.range_constexpr(first, first + kind.span):
            wide[None, v].store(wide[None, v].load() * factor)
        if cutlass.const_expr(kind.side > 1):
            scale = cute.arch.shuffle_sync(scale, lane % kind.side * (WARP // kind.side))
        own = cutlass.select_(lane // kind.side == first // kind.span, scale, own)
    quantised = cute.make_rmem_tensor(shape, cutlass.Float8E4M3FN)
    quantised.store(wide.load().to(cutlass.Float8E4M3FN))
    result = cute.recast_tensor(quantised, Uint8)

    count = cutlass.const_expr(kind.of_tile(tiling))
    place = (column - lane) // (tiling.lanes * tiling.vectors) * count + lane  # of the lane's scale among the row's
    writes = lane < count and place < scales.shape[1]
    for j in cutlass.range_constexpr(top_k):
        if rows[j] >= 0:
            support.store_row(result, packed, rows[j], column, tiling)
            if writes:
                scales[Int64(rows[j]), place] = own
    if cutlass.const_expr(slab > 0):
        result.fill(0)
        for i in cutlass.range_constexpr(slab):
            if sources[i] < 0:
                support.store_row(result, packed, token * slab + i, column, tiling)
                if writes:
                    scales[Int64(token * slab + i), place] = Float32(1.0)


@cute.jit
def pack_fp8_host(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    scales: cute.Tensor,
    tiling: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    slab: cutlass.Constexpr,
    stream: Any,
):
    steps = support.slabs(x.shape[0], order.shape[0], slab)
    pack_fp8_kernel(x, order, inverse, packed, scales, tiling, kind, slab).launch(
        grid=(tiling.blocks(steps), 1, 1), block=(tiling.threads, 1, 1), stream=stream
    )


@functools.partial(cute_cache.cached, also=(fp8.__file__,))
def compile_for(arch: str, kind: Scales, top_k: int, tiling: RowTiling, slab: int, keep: bool = False) -> Any:
    """Compile pack to fp8 for one architecture and shape class (no GPU needed).

    `slab` is the number of output rows that each group checks for padding; 0 promises that no row is padding.
    The result is called with x (T, H), order (R,), inverse (T, k), packed (R, H) as bytes, scales (R, scales a row).
    """
    tokens, rows = cute.sym_int(), cute.sym_int()
    arguments = [
        support.matrix(cutlass.BFloat16, tokens, tiling.hidden),
        support.matrix(Int32, rows),
        support.matrix(Int32, tokens, top_k),
        support.matrix(Uint8, rows, tiling.hidden),
        support.matrix(Float32, rows, kind.of_row),
        tiling,
        kind,
        slab,
    ]
    return support.compile_kernel(pack_fp8_host, arguments, arch, keep)


def scales_of(tiling: RowTiling, group: int) -> Scales:
    """How a tiling of `choose_tiling` falls into groups of `group` elements."""
    if group == tiling.hidden:
        return Scales(tiling.vectors, 1, 1)
    across = WARP * tiling.width  # elements of a vector of each lane
    return Scales(max(1, group // across), max(1, across // group), math.ceil(tiling.hidden / group))


def choose_tiling(tokens: int, hidden: int, group: int) -> RowTiling:
    """A tile is a warp's, and whole groups of 128 elements; or it is a row, which a warp or a block holds."""
    width = math.gcd(hidden, support.VECTOR_BYTES // 2)
    count = hidden // width
    if group == hidden:
        return _row_tiling(tokens, hidden, width, count)
    least = max(1, group // (WARP * width))
    tilings = [RowTiling(hidden, width, max(least, vectors), WARP, THREADS, True) for vectors in (4, 2, 1)]
    tightest = min(tiling.tiles * tiling.vectors for tiling in tilings)
    fitting = [tiling for tiling in tilings if tiling.tiles * tiling.vectors == tightest]
    return next((tiling for tiling in fitting if tiling.blocks(tokens) >= ENOUGH_BLOCKS), fitting[-1])


def _row_tiling(tokens: int, hidden: int, width: int, count: int) -> RowTiling:
    """One tile of at most four vectors a thread where it can be; fewer where tokens are few. Exact where it can be."""
    fewest = math.ceil(count / MOST_THREADS)
    most = max(fewest, min(4 if tokens >= ENOUGH_BLOCKS else 1, math.ceil(count / WARP)))
    exact = [v for v in range(most, fewest - 1, -1) if count % (v * WARP) == 0]
    vectors = exact[0] if exact else most
    lanes = math.ceil(count / (vectors * WARP)) * WARP
    return RowTiling(hidden, width, vectors, lanes, THREADS if lanes == WARP else lanes, True)


def supports(cell: Any) -> str | None:
    """Why the kernel cannot run a cell, or None."""
    width = math.gcd(cell.hidden, support.VECTOR_BYTES // 2)
    most = MOST_THREADS * min(MOST_ELEMENTS, MOST_VECTORS * width)
    if fp8.group(cell) > most:
        return f"the cute pack holds rows with one scale of up to {most} elements (in vectors of {width}), not {cell.hidden}"
    return fp8.unsupported()


def precompile(cell: Any, arch: str, slab: int) -> None:
    """Put the kernel of a cell into the cache; needs no GPU. Nothing for an architecture that `supports` refuses."""
    if int(arch.strip("sm_a")) < 89:
        return
    tiling = choose_tiling(cell.tokens, cell.hidden, fp8.group(cell))
    compile_for(arch, scales_of(tiling, fp8.group(cell)), cell.top_k, tiling, slab)


def prepare(
    cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], slab: int
) -> Callable[[], None]:
    """Bind pack: x (T, H) bfloat16, order (R,) int32, inverse (T, k) int32 -> packed (R, H) float8_e4m3fn and scales."""
    x, order, inverse = inputs["x"], inputs["order"], inputs["inverse"]
    tiling = choose_tiling(len(x), cell.hidden, fp8.group(cell))
    kernel = compile_for(support.current_arch(), scales_of(tiling, fp8.group(cell)), cell.top_k, tiling, slab)
    packed, scales = outputs["packed"].view(torch.uint8), outputs["scales"].view(len(order), -1)
    return functools.partial(kernel, x, order, inverse, packed, scales)
