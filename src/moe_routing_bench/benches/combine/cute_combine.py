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
from cutlass import Float32, Int32

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.cute_support import RowTiling

LOADS_IN_FLIGHT = 16  # vectors a thread loads before the first use: 64 registers
ENOUGH_BLOCKS = 132 * 8  # fewer leave a large GPU partly idle: threads then take fewer vectors each


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
    rows = cute.make_rmem_tensor((top_k,), Int32)
    scales = cute.make_rmem_tensor((top_k,), Float32)
    rows.fill(-1)
    scales.fill(0.0)
    if token < inverse.shape[0]:
        cute.autovec_copy(inverse[token, None], rows)
        cute.autovec_copy(weights[token, None], scales)
    last, least = rows[0], rows[0]
    for j in cutlass.range_constexpr(1, top_k):
        last, least = cutlass.max(last, rows[j]), cutlass.min(least, rows[j])

    shape = cutlass.const_expr((tiling.width, tiling.vectors))
    total = cute.make_rmem_tensor(shape, Float32)
    total.fill(0.0)
    if cutlass.const_expr(add):
        start = cute.make_rmem_tensor(shape, combined.element_type)
        start.fill(0)
        if token < inverse.shape[0]:
            support.load_row(residual, token, column, start, tiling)
        total.store(start.load().to(Float32))
    chunk = cutlass.const_expr(min(top_k, max(1, LOADS_IN_FLIGHT // tiling.vectors)))
    for first in cutlass.range_constexpr(0, top_k, chunk):
        terms = cute.make_rmem_tensor((*shape, min(chunk, top_k - first)), y.element_type)
        terms.fill(0)  # in use when no row is loaded
        # One branch for all loads, not one each, and apart from the sums: else ptxas keeps only two rows in flight. A
        # dropped assignment repeats a kept row of its token (same cache lines, no more traffic) and counts as zero.
        if last >= 0:
            for j in cutlass.range_constexpr(terms.shape[2]):
                row = cutlass.select_(rows[first + j] >= 0, rows[first + j], last)
                support.load_row(y, row, column, terms[None, None, j], tiling)
        if least < 0:  # apart from the sum: most tokens drop nothing, and need no check of every term
            for j in cutlass.range_constexpr(terms.shape[2]):
                if rows[first + j] < 0:  # what was loaded may be inf, the weight anything
                    terms[None, None, j].fill(0)
                    scales[first + j] = Float32(0.0)
        for j in cutlass.range_constexpr(terms.shape[2]):
            total.store(total.load() + scales[first + j] * terms[None, None, j].load().to(Float32))

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
    """The row tiling, after measurements on an H200: at most 2 vectors a thread, fewer for large k or few tokens.

    The caches keep what is read and written, but for the fewest tokens: lines marked as used once never displace what other
    kernels left in L2, and many of them are then short of room (docs/kernels.md).
    """
    vectors = 1 if top_k == 2 else max(1, min(2, LOADS_IN_FLIGHT // top_k))
    tiling = support.row_tiling(hidden, dtype, vectors, threads=128, streaming=False)
    if vectors > 1 and tiling.blocks(tokens) < ENOUGH_BLOCKS:
        tiling = support.row_tiling(hidden, dtype, 1, threads=128, streaming=False)
    if tiling.blocks(tokens) < ENOUGH_BLOCKS:
        tiling = support.row_tiling(hidden, dtype, 1, threads=128, streaming=True)
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
