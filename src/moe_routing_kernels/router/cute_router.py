"""Router in CuTe DSL: projection, top-k and weights in one launch.

Strategy: a block multiplies a tile of tokens by all experts' weights over one split of K = H (`cute_gemm`). Split-K is used where
tiles are few (decode), so that many SMs read the weight: a block then writes its partial scores to a workspace and increments
the tile's count; the last block of a tile adds the partials up, always in the order of the splits, so that every run gives the
same bits, and resets the count to zero, so that the launch can be repeated. The epilogue passes the scores of a tile through a
buffer to the warps' `exact_warp`.
Compulsory bytes and floor: see triton_router.

Invariant: a partial is written before its count is raised (release), and read after the last count was seen (acquire).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, current_arch, fake_tensor, per_problem
from moe_routing_kernels.gate import WARP, FusedRule, rule_of
from moe_routing_kernels.gate.cute_exact import exact_warp
from moe_routing_kernels.gate.cute_primitives import THREADS
from moe_routing_kernels.router import Router, splits_of, unsupported
from moe_routing_kernels.router.cute_gemm import (
    CHUNK,
    COLUMNS,
    LANE,
    QUAD,
    ROWS,
    WARPS,
    mainloop,
    tiles_of,
)
from moe_routing_kernels.target import MEASURED, Target

__all__ = ["bind", "compile_for", "precompile", "unsupported"]

# Most 16-byte copies of a thread in flight: 96 KB per block with one block per SM, or 80 KB, which with the shared memory of
# the gate leave room for two blocks.
ONE_BLOCK, TWO_BLOCKS = 48, 40


@dataclass(frozen=True)
class Config:
    """Compile-time constants of the kernel, in addition to the rule."""

    row_tiles: int  # tiles of 16 tokens per block
    splits: int  # split-K: blocks that share H
    chunks: int  # of 32 elements of H in a split
    in_flight: int  # chunks that are loaded ahead: the stages
    threads_per_token: int  # of the top-k, see `cute_exact`
    tokens_per_thread: int


@cute.kernel
def router_kernel(
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    partial: cute.Tensor,
    count: cute.Tensor,
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    config: cutlass.Constexpr,
):
    """One block: a tile of 16 `row_tiles` tokens, one split of H."""
    tokens = x.shape[0]
    thread, tile, split_index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.block_idx()[1]
    warp, lane = thread // WARP, cute.arch.lane_idx()
    first_token, first_expert = tile * (ROWS * config.row_tiles), warp * (tiles_of(weight.shape[0]) * COLUMNS)

    # main loop
    acc = mainloop(x, weight, first_token, first_expert, split_index, thread, lane, config)
    # split-K
    last = split_index == 0
    if cutlass.const_expr(config.splits > 1):
        last = exchange(partial, count, acc, tile, split_index, thread, tokens - first_token, config)
    # epilogue
    if last:
        store_logits(logits, acc, first_token, first_expert, lane, tokens)
        cute.arch.sync_threads()
        warp_tokens = cutlass.const_expr(ROWS * config.row_tiles // WARPS)
        threads, at_once = config.threads_per_token, config.tokens_per_thread
        for done in range(0, warp_tokens, WARP // threads * at_once):
            first = first_token + warp * warp_tokens + done
            exact_warp(logits, bias, ids, weights, first, rule, threads, at_once)
            cute.arch.sync_warp()  # the next tokens use the same shared memory


@cute.jit
def store_logits(
    logits: cute.Tensor, acc: cute.Tensor, first_token: Int32, first_expert: Int32, lane: Int32, tokens: Int32
):
    """Write a thread's accumulators (4, row tiles, tiles of experts) to logits (T, E)."""
    for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        for upper in cutlass.range_constexpr(2):
            token = first_token + m * ROWS + upper * (ROWS // 2) + lane // QUAD
            if token < tokens:
                for n in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for i in cutlass.range_constexpr(2):
                        expert = first_expert + n * COLUMNS + lane % QUAD * 2 + i
                        if expert < logits.shape[1]:
                            logits[token, expert] = acc[upper * 2 + i, m, n]


@cute.jit
def exchange(
    partial: cute.Tensor,
    count: cute.Tensor,
    acc: cute.Tensor,
    tile: Int32,
    split_index: Int32,
    thread: Int32,
    valid_rows: Int32,
    config: cutlass.Constexpr,
):
    """Write this block's accumulators; in the last block of a tile, replace them by the sums over all splits.

    Returns whether this is the last block. Rows of the tile from `valid_rows` on are neither written nor read.
    """
    rows, tiles = cutlass.const_expr(config.row_tiles), cutlass.const_expr(cute.size(acc, mode=[2]))
    width = cutlass.const_expr(math.gcd(2 * tiles, 4))
    load = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=width * 32)
    store = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), Float32, num_bits_per_copy=width * 32)
    values = cute.make_rmem_tensor((width, 2 * tiles // width, 2, rows), Float32)
    pairs = cute.make_tensor(values.iterator, cute.make_layout((2, tiles, 2, rows)))
    for m in cutlass.range_constexpr(rows):
        for n in cutlass.range_constexpr(tiles):
            for i in cutlass.range_constexpr(4):
                pairs[i % 2, n, i // 2, m] = acc[i, m, n]
    move_partial(store, partial, values, tile * config.splits + split_index, thread, valid_rows, True)
    flag = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
    cute.arch.sync_threads()
    if thread == 0:
        before = cute.arch.atomic_add(count.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
        flag[0] = before
    cute.arch.sync_threads()
    last = flag[0] == config.splits - 1
    if last:
        if thread == 0:
            count[tile] = 0
        values.fill(0.0)
        for p in cutlass.range_constexpr(config.splits):
            other = cute.make_rmem_tensor((width, 2 * tiles // width, 2, rows), Float32)
            other.fill(0.0)
            move_partial(load, partial, other, tile * config.splits + p, thread, valid_rows, False)
            for e in cutlass.range_constexpr(cute.size(values)):
                values[e] = values[e] + other[e]
        for m in cutlass.range_constexpr(rows):
            for n in cutlass.range_constexpr(tiles):
                for i in cutlass.range_constexpr(4):
                    acc[i, m, n] = pairs[i % 2, n, i // 2, m]
    return last


@cute.jit
def move_partial(
    atom: cute.CopyAtom,
    partial: cute.Tensor,
    values: cute.Tensor,
    index: Int32,
    thread: Int32,
    valid_rows: Int32,
    to_memory: cutlass.Constexpr,
):
    """Copy a thread's accumulators `values` (width, vectors, 2, row tiles) to or from the `index`-th partial result.

    A partial result has the layout of its threads' registers: vectors of a thread and row are THREADS vectors apart.
    """
    width, vectors = cutlass.const_expr(cute.size(values, mode=[0])), cutlass.const_expr(cute.size(values, mode=[1]))
    for m in cutlass.range_constexpr(cute.size(values, mode=[3])):
        for upper in cutlass.range_constexpr(2):
            if m * ROWS + upper * (ROWS // 2) + thread % WARP // QUAD < valid_rows:
                for v in cutlass.range_constexpr(vectors):
                    at = ((m * 2 + upper) * vectors + v) * (THREADS * width) + thread * width
                    start = cute.assume(Int64(index) * (THREADS * cute.size(values)) + Int64(at), divby=width)
                    memory = cute.make_tensor(partial.iterator + start, cute.make_layout((width,)))
                    if cutlass.const_expr(to_memory):
                        cute.copy(atom, values[None, v, upper, m], memory)
                    else:
                        cute.copy(atom, memory, values[None, v, upper, m])


@cute.jit
def router_host(
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    partial: cute.Tensor,
    count: cute.Tensor,
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    config: cutlass.Constexpr,
    stream: Any,
):
    tiles = cute.ceil_div(x.shape[0], ROWS * config.row_tiles)
    router_kernel(x, weight, bias, partial, count, logits, ids, weights, rule, config).launch(
        grid=(tiles, config.splits, 1), block=(THREADS, 1, 1), stream=stream
    )


@cached
def compile_for(
    arch: str, dtype: str, hidden: int, experts: int, top_k: int, rule: FusedRule, config: Config, keep: bool = False
) -> Any:
    """Compile the router for one architecture and shape class (no GPU needed).

    The result is called with x (T, H), weight (E, H), bias (E,) float32 (any where the rule has none), partial (words,)
    float32, count (tiles,) int32 zeros, logits (T, E) float32, ids (T, k) int32, weights (T, k) float32.
    """
    tokens, kind = cute.sym_int(), DTYPES[dtype]
    arguments = [
        fake_tensor(kind, tokens, hidden),
        fake_tensor(kind, experts, hidden),
        fake_tensor(Float32, experts),
        fake_tensor(Float32, cute.sym_int()),
        fake_tensor(Int32, cute.sym_int()),
        fake_tensor(Float32, tokens, experts),
        fake_tensor(Int32, tokens, top_k),
        fake_tensor(Float32, tokens, top_k),
        rule,
        config,
    ]
    return compile_kernel(router_host, arguments, arch, keep)


def _divisor(total: int, most: int) -> int:
    """The largest divisor of `total` up to `most`; or `most`, with padding, where that divisor is less than half of it."""
    fitting = max(n for n in range(1, most + 1) if total % n == 0)
    return fitting if 2 * fitting >= most else most


def choose(
    tokens: int, hidden: int, experts: int, rule: FusedRule, multiprocessors: int = MEASURED.multiprocessors
) -> Config:
    """The configuration of a shape. A split is one round of loads where possible."""
    tiles = tiles_of(experts)
    rows = 1
    while rows < 4 and tokens > ROWS * rows * multiprocessors and 2 * rows * tiles <= 16:
        rows *= 2
    blocks, total = -(-tokens // (ROWS * rows)), -(-hidden // CHUNK)
    splits = _divisor(total, min(splits_of(tokens, hidden, ROWS * rows, multiprocessors), total))
    chunks = -(-total // splits)
    fit = (ONE_BLOCK if blocks * splits <= multiprocessors else TWO_BLOCKS) // (tiles + 2 * rows)
    in_flight = _divisor(chunks, min(chunks, max(2, fit))) if hidden % LANE == 0 else 1  # narrow loads are synchronous
    chunks += -chunks % in_flight
    threads = max(rule.groups, 8) if experts <= 128 else WARP
    return Config(rows, -(-total // chunks), chunks, in_flight, threads, 2 if threads == WARP and experts <= 512 else 1)


@per_problem
def _compiled(problem: Router, arch: str) -> tuple[Any, Config]:
    rule, shape = rule_of(problem.router), (problem.hidden, problem.experts)
    config = choose(problem.tokens, *shape, rule, Target.named(arch).multiprocessors)
    return compile_for(arch, problem.dtype, *shape, problem.top_k, rule, config), config


def precompile(problem: Router, arch: str) -> None:
    """Put the kernel of a problem into the cache; needs no GPU."""
    _compiled(problem, arch)


def bind(
    problem: Router,
    *,
    x: Tensor,
    router_weight: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    bias: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    kernel, config = _compiled(problem, current_arch())
    blocks, experts = -(-len(x) // (ROWS * config.row_tiles)), len(router_weight)
    wide = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    padded = tiles_of(experts) * COLUMNS * WARPS
    partial = wide(blocks * config.splits * config.row_tiles * ROWS * padded if config.splits > 1 else 1)
    count = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    bias = wide(experts) if bias is None else bias
    logits = wide(len(x), experts)
    return functools.partial(kernel, x, router_weight, bias, partial, count, logits, topk_ids, topk_weights)
