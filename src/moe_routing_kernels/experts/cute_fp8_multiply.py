"""The main loop of `cute_fp8_product`: e4m3 times e4m3 with scales, stage by stage, and how the rows' scales come to shared memory.

A stage is 128 numbers of both operands deep, as far as scales reach: the tensor cores sum its products, and the sums of a slab are then
multiplied by the scales of weights and tokens and added to those of the tile, in float32. So nothing of the tensor cores' narrower sums is
carried over more than 128 products. While one warpgroup does so, the other's products are computed.

Invariant: a stage is released after its products and the reads of its scales are over.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.experts.cute_epilogue import bias_of
from moe_routing_kernels.experts.cute_fp8_tiles import BLOCK, DEPTH, INSTRUCTIONS, LOADERS, Fp8Product
from moe_routing_kernels.experts.cute_multiply import release
from moe_routing_kernels.experts.cute_tiles import SLAB, advance, locate


@cute.jit
def load_scales(
    scales: cute.Tensor,
    x_scales: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    tiles: Int32,
    product: cutlass.Constexpr,
):
    """By three warps: bring the scales (R, blocks) of the tiles' rows to x_scales (tokens, stages), 4 bytes at a time.

    Rows beyond an expert's last have the scales of its last.
    """
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    mine = cute.arch.thread_idx()[0] - WARP
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    one = cute.make_layout((1,))
    index, phase = Int32(0), Int32(1)
    while tile < tiles:
        _, row, end, _ = locate(tile, starts, first_tiles, product)
        for k in cutlass.range(product.steps, unroll=1):
            cute.arch.mbarrier_wait(empty + index, phase)
            for first in cutlass.range_constexpr(0, product.tile.tokens, LOADERS):
                token = first + mine
                if token < product.tile.tokens:
                    source = scales.iterator + (Int64(cutlass.min(row + token, end - 1)) * product.steps + k)
                    target = x_scales.iterator + (index * product.tile.tokens + token)
                    cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
            index, phase = advance(index, phase, product.stages)
        tile += stride
    cute.arch.cp_async_wait_group(0)  # no thread ends before its copies


def instruction(width: int) -> Any:
    """A warpgroup's product of 64 rows and `width` columns, 32 numbers deep, both from shared memory."""
    k_major, shared = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (SLAB, width, DEPTH), shared, k_major, k_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def operands(left: cute.Tensor, right: cute.Tensor, width: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Stages (rows, 128, stages) and (width, 128, stages) as operands of the products: (_, slabs or 1, products of a stage, stages)."""
    mma = instruction(width)
    mine = mma.get_slice(0)
    return mma.make_fragment_A(mine.partition_A(left)), mma.make_fragment_B(mine.partition_B(right))


def multiply_slab(a: cute.Tensor, b: cute.Tensor, partial: cute.Tensor, slab: int, index: Any) -> None:
    """Have the tensor cores sum the products of a slab of a stage of a, and of all of that of b, in `partial`, whatever it held."""
    width = 8 * partial.shape[2]
    mma = instruction(width)  # a new one, as what is set may not leave the branch that this is in
    results = cute.make_tensor(partial.iterator, cute.make_layout(((2, 2, width // 8), 1, 1)))
    warpgroup.fence()
    for n in range(INSTRUCTIONS):
        mma.set(warpgroup.Field.ACCUMULATE, n > 0)
        rows = a[None, slab, n, index]
        rows = cute.make_tensor(rows.iterator, cute.append_ones(rows.layout))
        cute.gemm(mma, results, rows, b[None, None, n, index], results)
    warpgroup.commit_group()


def weight_blocks(expert: Any, column: Any, product: Fp8Product) -> list[list]:
    """Of a thread's rows of weights, two of each slab: where the scales of their blocks begin among those of all (E, N / 128, K / 128)."""
    wide = (2 if product.gated else 1) * product.columns
    found = []
    for slab in range(product.tile.slabs):
        places = [bias_of(column, slab, half, product)[1] for half in range(2)]
        blocks = [cutlass.min(place, wide - 1) // BLOCK for place in places]
        found.append([(expert * product.blocks + block) * product.steps for block in blocks])
    return found


def promote(
    sums: cute.Tensor, partial: cute.Tensor, slab: int, w_scales: list, x_scales: cute.Tensor, index: Any, tokens: int
) -> None:
    """Add the scaled sums of a stage, (2 tokens, 2 rows 8 apart, tokens / 8), to those of the tile, (2, 2, tokens / 8, slabs)."""
    place = index * tokens + cute.arch.lane_idx() % 4 * 2
    for eight in range(tokens // 8):
        pair = cute.make_rmem_tensor((2,), Float32)
        source = x_scales.iterator + cute.assume(place + 8 * eight, divby=2)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2,))), pair)
        for half in range(2):
            for token in range(2):
                scale = w_scales[half] * pair[token]
                sums[token, half, eight, slab] = sums[token, half, eight, slab] + scale * partial[token, half, eight]


@cute.jit
def multiply(
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    x_scales: cute.Tensor,
    scales: cute.Tensor,
    blocks: list,
    sums: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup: add the product of its weights (rows, 128, stages) and of a tile's tokens (tokens, 128, stages) to sums.

    `scales` are those of the weights, flat, and `blocks` where those of the thread's rows begin.
    """
    tile = cutlass.const_expr(product.tile)
    a, b = operands(w_stages, x_stages, tile.tokens)
    partial = cute.make_rmem_tensor((2, 2, tile.tokens // 8), Float32)
    for k in cutlass.range(product.steps, unroll=1):
        w_scales = [[scales[start + k] for start in pair] for pair in blocks]
        cute.arch.mbarrier_wait(full + index, phase)
        for slab in cutlass.range_constexpr(tile.slabs):
            multiply_slab(a, b, partial, slab, index)
            warpgroup.wait_group(0)
            promote(sums, partial, slab, w_scales[slab], x_scales, index, tile.tokens)
        cute.arch.sync_warp()  # all lanes have read their scales
        release(empty + index)
        index, phase = advance(index, phase, product.stages)
