"""Combine in CuTe DSL: each token's weighted sum of the expert output rows of its k assignments.

Strategy: one group of threads a token (and column tile). It reads the k row numbers and weights, issues the loads of
all k rows (in chunks that fit the registers), and only then adds them up, so that many independent 16-byte loads are
in flight; a dropped assignment causes no traffic.
Compulsory bytes: (kept + T) * H * itemsize + 8 * T * k; floor: a stream that reads k parts and writes one.

Invariant: the sum runs over j = 0 .. k-1 in fp32, whatever the tiling, so results are the same bits for every variant.
"""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.cute_support import RowTiling

LOADS_IN_FLIGHT = 16  # vectors a thread loads before the first use: 64 registers
BRANCHES = 2  # numbers of rows, in equal steps, whose loads have a branch of their own
ENOUGH_BLOCKS = 132 * 8  # fewer leave a large GPU partly idle: threads then take fewer vectors each


@cute.jit
def kept_first(
    inverse: cute.Tensor,
    weights: cute.Tensor,
    token: Int32,
    rows: cute.Tensor,
    scales: cute.Tensor,
    whole_warps: cutlass.Constexpr,
) -> Int32:
    """A token's kept assignments to the front of `rows` and `scales`, in order; behind them the last one again, or -1.

    Returns how many are kept. Where a warp handles one token, each lane reads one assignment and the warp hands them
    round; else every thread reads all of them.
    """
    top_k = cutlass.const_expr(inverse.shape[1])
    kept = Int32(0)
    if cutlass.const_expr(whole_warps):
        lane = cute.arch.lane_idx()
        row, scale = Int32(-1), Float32(0.0)
        if token < inverse.shape[0] and lane < top_k:
            row, scale = inverse[token, lane], weights[token, lane]
        mask = Uint32(cute.arch.vote_ballot_sync(row >= 0))
        kept = Int32(cute.arch.popc(mask))
        source = Int32(0)
        for j in cutlass.range_constexpr(top_k):
            source = Int32(cutlass.select_(mask != 0, Int32(cute.arch.clz(cute.arch.brev(mask))), source))
            mask = mask & (mask - 1)
            rows[j] = cute.arch.shuffle_sync(row, source)
            scales[j] = cute.arch.shuffle_sync(scale, source)
    else:
        if token < inverse.shape[0]:
            cute.autovec_copy(inverse[token, None], rows)
            cute.autovec_copy(weights[token, None], scales)
        for j in cutlass.range_constexpr(top_k):
            row, scale = rows[j], scales[j]
            for p in cutlass.range_constexpr(j):  # a kept one goes to the first free place
                if row >= 0 and p == kept:
                    rows[p], scales[p] = row, scale
            kept += Int32(cutlass.select_(row >= 0, Int32(1), Int32(0)))
        for j in cutlass.range_constexpr(1, top_k):
            rows[j] = Int32(cutlass.select_(j < kept, rows[j], rows[j - 1]))
    return kept


@cute.kernel
def combine_kernel(
    y: cute.Tensor,
    inverse: cute.Tensor,
    weights: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    tiling: cutlass.Constexpr,
    add: cutlass.Constexpr,
):
    """One group of `tiling.lanes` threads: one column tile of one token. `add`: the residual is part of the sum."""
    token, column = support.position(tiling)
    top_k = cutlass.const_expr(inverse.shape[1])
    chunk = cutlass.const_expr(min(top_k, max(1, LOADS_IN_FLIGHT // tiling.vectors)))
    step = cutlass.const_expr(-(-chunk // BRANCHES))

    rows = cute.make_rmem_tensor((top_k,), Int32)
    scales = cute.make_rmem_tensor((top_k,), Float32)
    rows.fill(-1)
    scales.fill(0.0)
    kept = kept_first(inverse, weights, token, rows, scales, cutlass.const_expr(tiling.lanes % support.WARP == 0))

    shape = cutlass.const_expr((tiling.width, tiling.vectors))
    total = cute.make_rmem_tensor(shape, Float32)
    total.fill(0.0)
    start = cute.make_rmem_tensor(shape, combined.element_type)
    start.fill(0)
    if cutlass.const_expr(add):
        if token < inverse.shape[0]:
            support.load_row(residual, token, column, start, tiling)
    for first in cutlass.range_constexpr(0, top_k, chunk):
        size = cutlass.const_expr(min(chunk, top_k - first))
        terms = cute.make_rmem_tensor((*shape, size), y.element_type)
        terms.fill(0)  # in use when no row is loaded
        # One branch for all the loads that a token needs, not one each: ptxas predicates single loads and keeps only two
        # rows in flight. Up to `step - 1` loads repeat a kept row (same cache lines, no more traffic) and count as zero.
        for end in cutlass.range_constexpr(size, 0, -step):
            if first + max(0, end - step) < kept and (kept <= first + end or end == size):
                for j in cutlass.range_constexpr(end):
                    support.load_row(y, rows[first + j], column, terms[None, None, j], tiling)
        if cutlass.const_expr(add and first == 0):
            total.store(start.load().to(Float32))
        for j in cutlass.range_constexpr(size):
            if first + j >= kept:  # the repeated row may hold inf, the weight anything
                terms[None, None, j].fill(0)
            scale = cutlass.select_(first + j < kept, scales[first + j], Float32(0.0))
            total.store(total.load() + scale * terms[None, None, j].load().to(Float32))

    result = cute.make_rmem_tensor(shape, combined.element_type)
    result.store(total.load().to(combined.element_type))
    if token < inverse.shape[0]:
        support.store_row(result, combined, token, column, tiling)


@cute.jit
def combine_host(
    y: cute.Tensor,
    inverse: cute.Tensor,
    weights: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    tiling: cutlass.Constexpr,
    add: cutlass.Constexpr,
    stream: Any,
):
    combine_kernel(y, inverse, weights, residual, combined, tiling, add).launch(
        grid=(tiling.blocks(inverse.shape[0]), 1, 1), block=(tiling.threads, 1, 1), stream=stream
    )


@cute_cache.cached
def compile_for(arch: str, dtype: str, top_k: int, tiling: RowTiling, add: bool, keep: bool = False) -> Any:
    """Compile combine for one architecture and shape class (no GPU needed).

    The result is called with y (R, H), inverse (T, k) int32, weights (T, k) float32, residual (T, H), combined (T, H); the
    residual is read only with `add`.
    """
    element = support.DTYPES[dtype]
    tokens, rows = cute.sym_int(), cute.sym_int()
    arguments = [
        support.matrix(element, rows, tiling.hidden),
        support.matrix(Int32, tokens, top_k),
        support.matrix(Float32, tokens, top_k),
        support.matrix(element, tokens, tiling.hidden),
        support.matrix(element, tokens, tiling.hidden),
        tiling,
        add,
    ]
    return support.compile_kernel(combine_host, arguments, arch, keep)


def choose_tiling(tokens: int, hidden: int, dtype: str, top_k: int) -> RowTiling:
    """The row tiling: at most 4 vectors a thread, fewer for large k (registers) or few tokens (occupancy)."""
    vectors = max(1, min(4, LOADS_IN_FLIGHT // top_k))
    tiling = support.row_tiling(hidden, dtype, vectors, threads=128, streaming=False)
    while vectors > 1 and tiling.blocks(tokens) < ENOUGH_BLOCKS:
        vectors //= 2
        tiling = support.row_tiling(hidden, dtype, vectors, threads=128, streaming=False)
    return tiling


def precompile(cell: Any, arch: str) -> None:
    """Put the kernel of a cell into the cache; needs no GPU."""
    compile_for(arch, cell.dtype, cell.top_k, choose_tiling(cell.tokens, cell.hidden, cell.dtype, cell.top_k), False)


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind combine: y (R, H), inverse (T, k) int32, weights (T, k) float32 -> combined (T, H), of y's dtype.

    A `residual` (T, H) among the inputs, such as a shared expert's output, is where each token's sum starts.
    """
    inverse, combined, residual = inputs["inverse"], outputs["combined"], inputs.get("residual")
    tiling = choose_tiling(len(inverse), cell.hidden, cell.dtype, cell.top_k)
    kernel = compile_for(support.current_arch(), cell.dtype, cell.top_k, tiling, residual is not None)
    start = combined if residual is None else residual
    return functools.partial(kernel, inputs["y"], inverse, inputs["weights"], start, combined)
