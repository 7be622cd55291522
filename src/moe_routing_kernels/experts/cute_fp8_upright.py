"""The main loop and the epilogue of `cute_fp8_product` with tokens on the M side of the tensor cores' product: for many rows.

A thread's sums of a slab, which is of 64 tokens and of the 128 rows of weights of its warpgroup, belong to two tokens, and the rows to one
block of scales, or to two where they are gates and ups. So a thread has two or four factors per slab, which it loads while the slab is
multiplied, and scaling takes one instruction per sum. With tokens on the N side it takes two, and one load from shared memory per four.

Invariants:
- A stage is released after its products and the reads of its scales are over.
- A warp alone writes and reads its part of the epilogue's buffer.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.experts.cute_epilogue import activate
from moe_routing_kernels.experts.cute_fp8_multiply import multiply_slab, operands
from moe_routing_kernels.experts.cute_fp8_tiles import BLOCK, WARP_ROWS, Fp8Product
from moe_routing_kernels.experts.cute_multiply import release
from moe_routing_kernels.experts.cute_tiles import SLAB, VECTOR, advance


def weight_blocks(expert: Any, column: Any, product: Fp8Product) -> list:
    """Of a warpgroup's columns from `column` on: where the scales of their blocks, gates' and ups', begin among those of all (E, N / 128, K / 128).

    Beyond the last columns, whose results are not stored, these are the scales of the last.
    """
    column = cutlass.min(column, product.columns - 1)
    firsts = [column, column + product.columns] if product.gated else [column]
    return [(expert * product.blocks + first // BLOCK) * product.steps for first in firsts]


def load_factors(factors: cute.Tensor, slab: int, w_scales: list, x_scales: cute.Tensor, index: Any) -> None:
    """Write the products of the scales of a thread's tokens of a slab, 8 apart, and of the weights to factors (2, scales of weights).

    x_scales (tokens, stages) are those of the tile's tokens.
    """
    token = slab * SLAB + cute.arch.warp_idx() % 4 * WARP_ROWS + cute.arch.lane_idx() // 4
    for half in range(2):
        for n, one in enumerate(w_scales):
            factors[half, n] = x_scales[token + 8 * half, index] * one


def promote(sums: cute.Tensor, partial: cute.Tensor, slab: int, factors: cute.Tensor, counts: tuple[int, int]) -> None:
    """Add the scaled sums of a stage, (2 columns, 2 tokens 8 apart, eights), to those of the tile, (2, 2, eights, slabs).

    `counts` are those of eights and of factors per token: one for all eights, or in turns for gates and ups.
    """
    eights, kinds = counts
    for eight in range(eights):
        for half in range(2):
            for column in range(2):
                scaled = factors[half, eight % kinds] * partial[column, half, eight]
                sums[column, half, eight, slab] = sums[column, half, eight, slab] + scaled


@cute.jit
def multiply(
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    x_scales: cute.Tensor,
    scales: cute.Tensor,
    blocks: list,
    sums: cute.Tensor,
    live: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup: add the product of its weights (rows, 128, stages) and of the first `live` slabs of a tile's tokens (tokens, 128, stages) to sums.

    `scales` are those of the weights, flat, and `blocks` where those of the warpgroup's rows begin.
    """
    rows, slabs = cutlass.const_expr(SLAB * product.tile.slabs), cutlass.const_expr(product.tile.tokens // SLAB)
    a, b = operands(x_stages, w_stages, rows)
    partial = cute.make_rmem_tensor((2, 2, rows // 8), Float32)
    counts = cutlass.const_expr((rows // 8, len(blocks)))
    factors = cute.make_rmem_tensor((2, len(blocks)), Float32)
    for k in cutlass.range(product.steps, unroll=1):
        w_scales = [scales[start + k] for start in blocks]
        cute.arch.mbarrier_wait(full + index, phase)
        for slab in cutlass.range_constexpr(slabs):
            if slab < live:
                multiply_slab(a, b, partial, slab, index)
                load_factors(factors, slab, w_scales, x_scales, index)
                warpgroup.wait_group(0)
            if cutlass.const_expr(slab == slabs - 1):
                cute.arch.sync_warp()  # all lanes have read their scales
                release(empty + index)
            if slab < live:
                promote(sums, partial, slab, factors, counts)
        index, phase = advance(index, phase, product.stages)


def matrix_place(lane: Any, pitch: int, vector: int) -> Any:
    """Where in (token, column) the 16 bytes, `vector` columns, lie whose address a lane gives: lanes 8 q to 8 q + 7 give those of the q-th of
    four matrices, tokens 0 to 7 or 8 to 15, of two eights."""
    matrix = lane // 8
    return (matrix % 2 * 8 + lane % 8) * pitch + matrix // 2 * vector


@cute.jit
def store(
    sums: cute.Tensor,
    buffer: cute.Tensor,
    out: cute.Tensor,
    row: Int32,
    end: Int32,
    column: Int32,
    product: cutlass.Constexpr,
):
    """Activate and round a warpgroup's sums, and store them to rows `row` to `end` of out (R, columns) from `column` on.

    A warp brings 16 tokens times 64 columns at a time through its part of `buffer`, as (token, column).
    """
    lane, warp_of_group = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    mine = buffer.iterator + cute.assume(warp_of_group * (WARP_ROWS * product.pitch), divby=VECTOR)
    lanes = cutlass.const_expr(SLAB // VECTOR)  # of a token
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), out.element_type)
    place = matrix_place(lane, product.pitch, VECTOR)
    token, part = lane // lanes, lane % lanes * VECTOR
    for slab in cutlass.range_constexpr(product.tile.tokens // SLAB):
        first = row + slab * SLAB + warp_of_group * WARP_ROWS
        for start in cutlass.range_constexpr(0, product.width, SLAB):
            if first < end:
                cute.arch.sync_warp()  # all lanes have read what was there
                for eight in cutlass.range_constexpr(0, SLAB // 8, 2):
                    values = cute.make_rmem_tensor((8,), Float32)
                    for n in cutlass.range_constexpr(8):  # matrix, then column
                        half, at, i = n // 2 % 2, start // 8 + eight + n // 4, n % 2
                        if cutlass.const_expr(product.gated):
                            gate, up = sums[i, half, 2 * at, slab], sums[i, half, 2 * at + 1, slab]
                            values[n] = activate(gate, up, product.activation)
                        else:
                            values[n] = activate(sums[i, half, at, slab], None, product.activation)
                    rounded = cute.make_rmem_tensor((8,), out.element_type)
                    rounded.store(values.load().to(out.element_type))
                    matrices = mine + cute.assume(place + eight * 8, divby=VECTOR)
                    cute.copy(atom, rounded, cute.make_tensor(matrices, rounded.layout))
                cute.arch.sync_warp()
                for n in cutlass.range_constexpr(WARP_ROWS * lanes // WARP):
                    at = token + n * (WARP // lanes)
                    if (first + at < end) & (column + start + part < product.columns):
                        source = mine + cute.assume(at * product.pitch + part, divby=VECTOR)
                        offset = Int64(first + at) * product.columns + Int64(column + start + part)
                        held = cute.make_tensor(source, cute.make_layout(VECTOR))
                        target = out.iterator + cute.assume(offset, divby=VECTOR)
                        cute.autovec_copy(held, cute.make_tensor(target, cute.make_layout(VECTOR)))
