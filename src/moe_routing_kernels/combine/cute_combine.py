"""Combine in CuTe DSL: each token's weighted sum of the expert output rows of its k assignments.

Strategy: one group of threads per token (and column tile). It reads the k row numbers and weights, issues the loads of
all k rows (in chunks that fit the registers), and only then adds them up, so that many independent 16-byte loads are
in flight; a dropped assignment causes no traffic.
Compulsory bytes: (kept + T) * H * itemsize + 8 * T * k; floor: a stream that reads k rows and writes one.

Invariant: the sum runs over j = 0 .. k-1 in fp32, whatever the tiling, so results are the same bits for every variant.
"""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from moe_routing_kernels.combine import Combine
from moe_routing_kernels.cute import rows as cute_rows
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, current_arch, fake_tensor, per_problem
from moe_routing_kernels.cute.rows import RowTiling, row_tiling
from moe_routing_kernels.target import MEASURED, Target

LOADS_IN_FLIGHT = 16  # vectors that a thread loads before the first use: 64 registers
# Per multiprocessor:
ENOUGH_BLOCKS = 8  # fewer leave it partly idle: threads then take fewer vectors each
MANY_THREADS = 5120  # two and a half times what it holds


@cute.kernel
def combine_kernel(
    y: cute.Tensor,
    inverse: cute.Tensor,
    weights: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    tiling: cutlass.Constexpr,
    add: cutlass.Constexpr,
    waits: cutlass.Constexpr,
):
    """One group of `tiling.lanes` threads: one column tile of one token. `add`: the residual is part of the sum.

    `waits`: it may start before the previous kernel, which writes y, ends.
    """
    token, column = cute_rows.position(tiling)
    top_k = cutlass.const_expr(inverse.shape[1])
    # load rows' numbers and weights
    rows = cute.make_rmem_tensor((top_k,), Int32)
    scales = cute.make_rmem_tensor((top_k,), Float32)
    rows.fill(-1)
    scales.fill(0.0)
    if token < inverse.shape[0]:
        cute.autovec_copy(inverse[token, None], rows)
        if cutlass.const_expr(weights.element_type is Float32):
            cute.autovec_copy(weights[token, None], scales)
        else:
            narrow = cute.make_rmem_tensor((top_k,), weights.element_type)
            cute.autovec_copy(weights[token, None], narrow)
            scales.store(narrow.load().to(Float32))
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
            cute_rows.load_row(residual, token, column, start, tiling)
        total.store(start.load().to(Float32))
    if cutlass.const_expr(waits):  # all above was written before the previous kernel started
        cute.arch.griddepcontrol_wait()
    chunk = cutlass.const_expr(min(top_k, max(1, LOADS_IN_FLIGHT // tiling.vectors)))
    for first in cutlass.range_constexpr(0, top_k, chunk):
        # load
        terms = cute.make_rmem_tensor((*shape, min(chunk, top_k - first)), y.element_type)
        terms.fill(0)  # in use when no row is loaded
        # One branch for all loads, not one each, and apart from the accumulation: else ptxas keeps only two rows in flight. A
        # dropped assignment repeats a kept row of its token (same cache lines, no more traffic) and counts as zero.
        if last >= 0:
            for j in cutlass.range_constexpr(terms.shape[2]):
                row = cutlass.select_(rows[first + j] >= 0, rows[first + j], last)
                cute_rows.load_row(y, row, column, terms[None, None, j], tiling)
        if least < 0:  # apart from the accumulation: most tokens drop nothing and need no check of every term
            for j in cutlass.range_constexpr(terms.shape[2]):
                if rows[first + j] < 0:  # the loaded row may be inf, the weight anything
                    terms[None, None, j].fill(0)
                    scales[first + j] = Float32(0.0)
        # accumulate
        for j in cutlass.range_constexpr(terms.shape[2]):
            total.store(total.load() + scales[first + j] * terms[None, None, j].load().to(Float32))

    # store
    result = cute.make_rmem_tensor(shape, combined.element_type)
    result.store(total.load().to(combined.element_type))
    if token < inverse.shape[0]:
        cute_rows.store_row(result, combined, token, column, tiling)


@cute.jit
def combine_host(
    y: cute.Tensor,
    inverse: cute.Tensor,
    weights: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    tiling: cutlass.Constexpr,
    add: cutlass.Constexpr,
    waits: cutlass.Constexpr,
    stream: Any,
):
    combine_kernel(y, inverse, weights, residual, combined, tiling, add, waits).launch(
        grid=(tiling.blocks(inverse.shape[0]), 1, 1), block=(tiling.threads, 1, 1), stream=stream, use_pdl=waits
    )


@cached
def compile_for(
    arch: str,
    dtype: str,
    top_k: int,
    tiling: RowTiling,
    add: bool,
    weights: str = "fp32",
    waits: bool = False,
    keep: bool = False,
) -> Any:
    """Compile combine for one architecture and shape class (no GPU needed).

    The result is called with y (R, H), inverse (T, k) int32, weights (T, k), residual (T, H), combined (T, H);
    the residual is read only with `add`. With `waits` it is a dependent launch after the previous kernel, which signals.
    """
    element = DTYPES[dtype]
    tokens, rows = cute.sym_int(), cute.sym_int()
    arguments = [
        fake_tensor(element, rows, tiling.hidden),
        fake_tensor(Int32, tokens, top_k),
        fake_tensor(DTYPES[weights], tokens, top_k),
        fake_tensor(element, tokens, tiling.hidden),
        fake_tensor(element, tokens, tiling.hidden),
        tiling,
        add,
        waits,
    ]
    return compile_kernel(combine_host, arguments, arch, keep)


def choose_tiling(
    tokens: int, hidden: int, dtype: str, top_k: int, multiprocessors: int = MEASURED.multiprocessors
) -> RowTiling:
    """The row tiling, measured on an H200 (docs/kernels.md): two vectors per thread where k is 1 or 2, else one.

    With k = 2 two vectors pay for many rows only, with k = 1 for all but few rows.

    The caches keep the rows that are read and written, except for the fewest tokens: lines marked as used once never displace
    other kernels' lines in L2, so many such lines would be short of room.
    """
    tiling = row_tiling(hidden, dtype, 2 if top_k <= 2 else 1, threads=128, streaming=False)
    enough, many = multiprocessors * ENOUGH_BLOCKS, multiprocessors * MANY_THREADS
    few = tiling.blocks(tokens) * tiling.threads < many if top_k == 2 else tiling.blocks(tokens) < enough
    if few:
        tiling = row_tiling(hidden, dtype, 1, threads=128, streaming=False)
    if tiling.blocks(tokens) < enough:
        tiling = row_tiling(hidden, dtype, 1, threads=128, streaming=True)
    return tiling


def precompile(problem: Combine, arch: str, waits: bool = False, add: bool = False) -> None:
    """Put the kernel of a problem, which may `add` a residual, into the cache; needs no GPU."""
    _compiled(problem, arch, add, waits)


@per_problem
def _compiled(problem: Combine, arch: str, add: bool, waits: bool) -> Any:
    sizes = (problem.tokens, problem.hidden, problem.dtype, problem.top_k)
    tiling = choose_tiling(*sizes, Target.named(arch).multiprocessors)
    return compile_for(arch, problem.dtype, problem.top_k, tiling, add, problem.weights, waits)


def bind(
    problem: Combine,
    *,
    y: torch.Tensor,
    inverse: torch.Tensor,
    topk_weights: torch.Tensor,
    combined: torch.Tensor,
    residual: torch.Tensor | None = None,
    waits: bool = False,
) -> Callable[[], None]:
    """Bind combine: y (R, H), inverse (T, k) int32, topk_weights (T, k) of `problem.weights` -> combined (T, H), of y's dtype.

    Each token's sum starts from its `residual` (T, H), such as a shared expert's output. With `waits` it starts before the
    previous kernel ends (programmatic dependent launch, sm_90 on): that kernel writes y alone, and signals.
    """
    kernel = _compiled(problem, current_arch(), residual is not None, waits)
    return functools.partial(kernel, y, inverse, topk_weights, combined if residual is None else residual, combined)
