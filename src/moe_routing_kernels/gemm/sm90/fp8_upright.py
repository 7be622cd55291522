"""The main loop and the epilogue of `fp8` without swapped operands: tokens on the M side of the MMA, for many rows.

A thread's accumulators of an MMA, which is of 64 tokens and of the 128 rows of weights of its warpgroup, belong to two tokens, and the rows
to one block of scales, or to two where they are gates and ups. So a thread has two or four factors per MMA, which it loads while that
runs, and scaling takes one instruction per accumulator. With tokens on the N side it takes two, and one load from shared memory per four.

Invariants:
- A stage is released after its MMAs and the reads of its scales are over.
- A warp alone writes and reads its part of the epilogue's buffer.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gemm.sm90.epilogue import activate
from moe_routing_kernels.gemm.sm90.fp8_mainloop import BLOCK, WARP_ROWS, Fp8Gemm, fragments, multiply_block
from moe_routing_kernels.gemm.sm90.schedule import LEAD, advance, release
from moe_routing_kernels.gemm.sm90.tile import MMA_M, VECTOR, WARPGROUP


def scale_places(expert: Any, column: Any, gemm: Fp8Gemm) -> list:
    """For a warpgroup's columns from `column` on: where the scales of their blocks, gates' and ups', begin among those of all (E, N / 128, K / 128).

    Beyond the last columns, whose results are not stored, these are the scales of the last.
    """
    column = cutlass.min(column, gemm.columns - 1)
    firsts = [column, column + gemm.columns] if gemm.gated else [column]
    return [(expert * gemm.blocks + first // BLOCK) * gemm.k_tiles for first in firsts]


def first_token(m_atom: Any) -> Any:
    """The first of the two tokens of a tile, 8 apart, that a thread has in an MMA."""
    return m_atom * MMA_M + cute.arch.warp_idx() % 4 * WARP_ROWS + cute.arch.lane_idx() // 4


def load_factors(factors: cute.Tensor, m_atom: int, w_scales: list, x_scales: cute.Tensor, index: Any) -> None:
    """Write the products of the scales of a thread's tokens of an MMA, 8 apart, and of the weights to factors (2, scales of weights).

    x_scales (tokens, stages) are those of the tile's tokens.
    """
    token = first_token(m_atom)
    for half in range(2):
        for n, w_scale in enumerate(w_scales):
            factors[half, n] = x_scales[token + 8 * half, index] * w_scale


def promote(acc: cute.Tensor, block_acc: cute.Tensor, m_atom: int, factors: cute.Tensor, kinds: Sequence[int]) -> None:
    """Add a block's scaled accumulators, (2 columns, 2 tokens 8 apart, eights), to those of the tile, (2, 2, eights, MMAs).

    `kinds` names, for each of the eights, which of a token's factors is its own.
    """
    for eight, kind in enumerate(kinds):
        for half in range(2):
            for column in range(2):
                scaled = factors[half, kind] * block_acc[column, half, eight]
                acc[column, half, eight, m_atom] = acc[column, half, eight, m_atom] + scaled


@cute.jit
def await_lead(share: Int32, gemm: cutlass.Constexpr):
    """By a warpgroup before its first MMA of a tile: the second waits until the first is `lead` sums ahead."""
    if cutlass.const_expr(gemm.lead):
        if share == 1:
            cute.arch.barrier(barrier_id=LEAD, number_of_threads=2 * WARPGROUP)


@cute.jit
def announce(number: cutlass.Constexpr, k: Int32, share: Int32, gemm: cutlass.Constexpr):
    """By a warpgroup after the MMAs of a sum of stage k, and ahead of its scaling: the first tells the second to begin."""
    if cutlass.const_expr(gemm.lead and number == (gemm.lead - 1) % gemm.sums):
        if (k == (gemm.lead - 1) // gemm.sums) & (share == 0):
            cute.arch.barrier_arrive(barrier_id=LEAD, number_of_threads=2 * WARPGROUP)


@cute.jit
def mainloop(
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    x_scales: cute.Tensor,
    scales: cute.Tensor,
    places: list,
    acc: cute.Tensor,
    live: Int32,
    share: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup: add the gemm of its weights (rows, 128, stages) and of the first `live` MMAs of a tile's tokens (tokens, 128, stages) to acc.

    `scales` are those of the weights, flat, and `places` where those of the warpgroup's rows begin.
    """
    rows, m_atoms = cutlass.const_expr(MMA_M * gemm.tile.m_atoms), cutlass.const_expr(gemm.tile.tokens // MMA_M)
    a, b = fragments(x_stages, w_stages, rows)
    block_acc = cute.make_rmem_tensor((2, 2, rows // 8), Float32)
    kinds = cutlass.const_expr([eight % len(places) for eight in range(rows // 8)])  # gates and ups in turns
    factors = cute.make_rmem_tensor((2, len(places)), Float32)
    await_lead(share, gemm)
    for k in cutlass.range(gemm.k_tiles, unroll=1):
        w_scales = [scales[start + k] for start in places]
        cute.arch.mbarrier_wait(full + index, phase)
        for m_atom in cutlass.range_constexpr(m_atoms):
            if m_atom < live:
                multiply_block(a, b, block_acc, m_atom, index)
                load_factors(factors, m_atom, w_scales, x_scales, index)
                warpgroup.wait_group(0)
            announce(m_atom, k, share, gemm)
            if cutlass.const_expr(m_atom == m_atoms - 1):
                cute.arch.sync_warp()  # all lanes have read their scales
                release(empty + index)
            if m_atom < live:
                promote(acc, block_acc, m_atom, factors, kinds)
        index, phase = advance(index, phase, gemm.stages)


def matrix_place(lane: Any, pitch: int, vector: int) -> Any:
    """Where in (token, column) the 16 bytes, `vector` columns, lie whose address a lane gives: lanes 8 q to 8 q + 7 give those of the q-th of
    four matrices, tokens 0 to 7 or 8 to 15, of two eights."""
    matrix = lane // 8
    return (matrix % 2 * 8 + lane % 8) * pitch + matrix // 2 * vector


@cute.jit
def store(
    acc: cute.Tensor,
    buffer: cute.Tensor,
    out: cute.Tensor,
    row: Int32,
    end: Int32,
    column: Int32,
    gemm: cutlass.Constexpr,
):
    """Activate and round a warpgroup's accumulators, and store them to rows `row` to `end` of out (R, columns) from `column` on.

    A warp brings 16 tokens times 64 columns at a time through its part of `buffer`, as (token, column).
    """
    lane, warp_of_group = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    of_warp = buffer.iterator + cute.assume(warp_of_group * (WARP_ROWS * gemm.epi_pitch), divby=VECTOR)
    lanes = cutlass.const_expr(MMA_M // VECTOR)  # of a token
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), out.element_type)
    place = matrix_place(lane, gemm.epi_pitch, VECTOR)
    token, part = lane // lanes, lane % lanes * VECTOR
    for m_atom in cutlass.range_constexpr(gemm.mmas):
        first = row + m_atom * MMA_M + warp_of_group * WARP_ROWS
        for start in cutlass.range_constexpr(0, gemm.width, MMA_M):
            if first < end:
                cute.arch.sync_warp()  # all lanes have read the previous contents
                for eight in cutlass.range_constexpr(0, MMA_M // 8, 2):
                    values = cute.make_rmem_tensor((8,), Float32)
                    for n in cutlass.range_constexpr(8):  # matrix, then column
                        half, at, i = n // 2 % 2, start // 8 + eight + n // 4, n % 2
                        if cutlass.const_expr(gemm.gated):
                            gate, up = acc[i, half, 2 * at, m_atom], acc[i, half, 2 * at + 1, m_atom]
                            values[n] = activate(gate, up, gemm.activation)
                        else:
                            values[n] = activate(acc[i, half, at, m_atom], None, gemm.activation)
                    rounded = cute.make_rmem_tensor((8,), out.element_type)
                    rounded.store(values.load().to(out.element_type))
                    matrices = of_warp + cute.assume(place + eight * 8, divby=VECTOR)
                    cute.copy(atom, rounded, cute.make_tensor(matrices, rounded.layout))
                cute.arch.sync_warp()
                for n in cutlass.range_constexpr(WARP_ROWS * lanes // WARP):
                    at = token + n * (WARP // lanes)
                    if (first + at < end) & (column + start + part < gemm.columns):
                        source = of_warp + cute.assume(at * gemm.epi_pitch + part, divby=VECTOR)
                        offset = Int64(first + at) * gemm.columns + Int64(column + start + part)
                        vector = cute.make_tensor(source, cute.make_layout(VECTOR))
                        target = out.iterator + cute.assume(offset, divby=VECTOR)
                        cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(VECTOR)))
