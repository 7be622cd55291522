"""The main loop of `quantised` for tiles of 8 tokens, where issuing instructions binds: each warp multiplies by itself.

With so few tokens the tensor cores are nearly idle, and the overhead of a warpgroup's MMA, fences and descriptors, is a sixth of
the instructions. A warp's MMA takes the same fragments, tokens in registers too. Integers are not dequantised: for a group along K

    sum_k scale (code_k - zero) x_k = scale (sum_k (base + code_k) x_k - sum_k (base + zero) x_k),

where base + code is what a mask leaves of a word of codes, and base + zero a register per row: a second MMA takes the place of
subtractions, and accumulators are scaled in place of weights. All are integers of at most 11 bits times x, accumulated in float32, and
their difference has at least 24 - 8 bits left, more than weights rounded to 16-bit floats have. 8-bit floats are dequantised as elsewhere:
without their scale those of bf16 activations are so small that products vanish.

Invariant: a stage is released when all lanes of the warp have their codes and tokens in registers.
"""

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from moe_routing_kernels.gemm.sm90.dequantise import masks, number, register, subtracts, subtrahend_of
from moe_routing_kernels.gemm.sm90.quantised_layout import DEPTH, Codes
from moe_routing_kernels.gemm.sm90.quantised_mainloop import (
    BATCHES,
    FRAGMENT,
    factors,
    offsets_of,
    parameters_of,
    words_of,
)
from moe_routing_kernels.gemm.sm90.quantised_tile import FEWEST_TOKENS, K16
from moe_routing_kernels.gemm.sm90.schedule import MAINLOOP, release, skip
from moe_routing_kernels.gemm.sm90.tile import TILE_K, WARPGROUP

_CHUNK = 8  # elements that a lane gives the address of: 16 bytes of a token
_A, _B, _ACC = ((2, 2, 2), 1), ((2, 2), 1), ((2, 2), 1, 1)  # fragments of a warp's MMA, and how many


@cute.jit
def tokens_of(x_stages: cute.Tensor, index: Int32):
    """A thread's part of a stage's tokens: (2 registers of two numbers for each of two MMAs, pairs of MMAs).

    Lane 8 q + r names the q-th of four pieces of token r. A token's pieces of 128 bytes are permuted by its number, as TMA wrote them.
    """
    dtype = x_stages.element_type
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    tokens = cute.make_rmem_tensor((_CHUNK, K16 // 2), dtype)
    plain = cute.recast_ptr(x_stages.iterator, cute.make_swizzle(0, 4, 3), dtype=dtype)
    token, piece = cute.arch.lane_idx() % FEWEST_TOKENS, cute.arch.lane_idx() // FEWEST_TOKENS
    for n in cutlass.range_constexpr(K16 // 2):
        half, first = divmod(n * 4 * _CHUNK, TILE_K)
        place = index * (FEWEST_TOKENS * DEPTH) + half * (FEWEST_TOKENS * TILE_K) + token * TILE_K
        place = place + ((piece + first // _CHUNK) ^ token) * _CHUNK
        source = cute.make_tensor(plain + cute.assume(place, divby=_CHUNK), tokens[None, n].layout)
        cute.copy(atom, source, tokens[None, n])
    return tokens


def zeros() -> cute.Tensor:
    """Accumulators of an MMA, (2 tokens, 2 rows 8 apart), that begin with 0."""
    acc = cute.make_rmem_tensor(_ACC, Float32)
    acc.fill(0.0)
    return acc


def places(step: int, codes: Codes) -> list[tuple[int, int, int]]:
    """For each register of an MMA: its number, the word of a thread's words of a stage, and which of its fields."""
    return [(n, *divmod(step * FRAGMENT + n, codes.fields)) for n in range(FRAGMENT)]


def add(mma: cute.MmaAtom, acc: cute.Tensor, x: cute.Tensor, steps: range, operands: Iterator[list]) -> None:
    """Add to acc the products of the registers of the MMAs `steps`, from `operands`, and of tokens x, `tokens_of`."""
    for step, registers in zip(steps, operands, strict=True):
        a = cute.make_rmem_tensor((FRAGMENT,), Uint32)
        for n in range(FRAGMENT):
            a[n] = registers[n]
        left = cute.make_tensor(cute.recast_ptr(a.iterator, dtype=x.element_type), cute.make_layout(_A))
        right = cute.make_tensor(x.iterator + step * _CHUNK // 2, cute.make_layout(_B))
        cute.gemm(mma, acc, left, right, acc)


def add_block(
    mma: cute.MmaAtom, results: cute.Tensor, block: cute.Tensor, x: cute.Tensor, offsets: dict, mask: dict, gemm: Any
) -> None:
    """Add the product of a block of codes and of a stage's tokens x to results, accumulators of an MMA.

    `offsets` are accumulators by group that are subtracted: without zero points those of one block are those of all.
    """
    codes = gemm.codes
    batches = [words_of(block, batch, gemm) for batch in range(BATCHES)]
    words = [batch[n] for batch in batches for n in range(cute.size(batch))]
    parameters = parameters_of(block, gemm)
    layout = cute.make_layout((2, codes.parameters, codes.groups))
    scales = cute.make_tensor(cute.recast_ptr(parameters.iterator, dtype=x.element_type), layout)
    each = K16 // codes.groups  # MMAs of a group
    for group in range(codes.groups):
        steps = range(group * each, (group + 1) * each)
        if codes.kind != "int":
            row_factors = factors(parameters, group, codes)
            numbers = (
                [register(words[at], field, *row_factors[n % 2], mask, codes) for n, at, field in places(step, codes)]
                for step in steps
            )
            add(mma, results, x, steps, numbers)
            continue
        acc = zeros()
        numbers = ([number(words[at], field, mask, codes) for _, at, field in places(step, codes)] for step in steps)
        add(mma, acc, x, steps, numbers)
        if subtracts(codes) and (codes.zeros or group not in offsets):
            offsets[group], subtrahends = zeros(), offsets_of(parameters, group, codes)
            zero_points = (
                [subtrahend_of(field, subtrahends[n % 2], codes) for n, _, field in places(step, codes)]
                for step in steps
            )
            add(mma, offsets[group], x, steps, zero_points)
        for n in range(cute.size(acc)):
            exact = acc[n] - offsets[group][n] if subtracts(codes) else acc[n]
            results[n] = results[n] + Float32(scales[n // 2, 0, group]) * exact


@cute.jit
def mainloop(
    tokens: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    acc: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    share: Int32,
    consumer: Int32,
    zero: Int32,
    gemm: cutlass.Constexpr,
):
    """As `quantised_mainloop.mainloop`, by the warps of a warpgroup, each by itself."""
    m_atoms, stages = cutlass.const_expr(gemm.tile.m_atoms), cutlass.const_expr(gemm.stages)
    mma = cute.make_mma_atom(warp.MmaF16BF16Op(x_stages.element_type, Float32, (16, FEWEST_TOKENS, 16)))
    results = cute.make_tensor(acc.iterator, cute.make_layout((*_ACC, m_atoms)))
    mask = masks(Uint32(zero), gemm.codes)
    first = Int32(0)
    if cutlass.const_expr(gemm.splits > 1):
        first = consumer
        index, phase = skip(index, phase, consumer, stages)
        if consumer > 0:
            acc.fill(0.0)  # those of the first begin with the biases
    for _ in cutlass.range(first, gemm.k_tiles, gemm.splits, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        x, offsets = tokens_of(x_stages, index), {}
        for m_atom in cutlass.range_constexpr(m_atoms):
            block = w_stages[None, share * m_atoms + m_atom, index]
            add_block(mma, results[None, None, None, m_atom], block, x, offsets, mask, gemm)
        cute.arch.sync_warp()
        release(empty + index)
        index, phase = skip(index, phase, gemm.splits, stages)


@cute.jit
def reduce_splits(acc: cute.Tensor, partial: cute.Tensor, consumer: Int32, gemm: cutlass.Constexpr):
    """By the warpgroups that split a tile: add their accumulators to those of the first, through `partial` (threads, accumulators, the others)."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    threads = cutlass.const_expr(WARPGROUP * gemm.splits)
    if consumer > 0:
        for n in cutlass.range_constexpr(cute.size(acc)):
            partial[thread, n, consumer - 1] = acc[n]
    cute.arch.barrier(barrier_id=MAINLOOP, number_of_threads=threads)
    if consumer == 0:
        for n in cutlass.range_constexpr(cute.size(acc)):
            for other in cutlass.range_constexpr(gemm.splits - 1):
                acc[n] = acc[n] + partial[thread, n, other]
    cute.arch.barrier(barrier_id=MAINLOOP, number_of_threads=threads)  # none overwrites its part before it is read
