"""The grouped matrix product of `cute_fp8` (sm_90a): that of `cute_swapped`, with both operands e4m3 and scales of 128 numbers.

out[r, c] = f(sum_b s[r, b] t[e, c / 128, b] sum_{k in b} w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1],
and blocks b of 128 neighbours k; s are the scales of rows, t of 128 x 128 weights.

Strategy, tiles and invariants are those of `cute_swapped`, whose loads are used as they are: tensor maps see pairs of numbers as one of 16
bits, and a stage is 128 bytes of each row. The three warps that have nothing to load there bring the rows' scales. Rows are packed, tiles are
shared and have one form, and products do not overlap. Sums that come of the tensor cores and those of the tile take registers both,
so a tile has two slabs of 64 rows times up to 128 tokens per warpgroup. With many rows tokens are on the M side (`cute_fp8_upright`).
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import cached
from moe_routing_kernels.cute.compilation import DTYPES, compile_kernel, fake_tensor
from moe_routing_kernels.experts import cute_fp8_quantise, cute_fp8_upright
from moe_routing_kernels.experts.cute_epilogue import begin, store_chunk, transpose
from moe_routing_kernels.experts.cute_fp8_multiply import load_scales, multiply, weight_blocks
from moe_routing_kernels.experts.cute_fp8_tiles import BLOCK, SLOTS, Fp8Product
from moe_routing_kernels.experts.cute_loads import stream
from moe_routing_kernels.experts.cute_tiles import SLAB, STEP, WARPGROUP, count_tiles, locate, skip


def as_e4m3(stages: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    """Stages of pairs as numbers."""
    return cute.make_tensor(cute.recast_ptr(stages.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)


@cute.kernel
def fp8_kernel(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    w_scales: cute.Tensor,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    scales: cute.Tensor,
    offsets: cute.Tensor,
    biases: cute.Tensor | None,
    out: cute.Tensor,
    out_scales: cute.Tensor | None,
    w_pairs: cute.ComposedLayout,
    x_pairs: cute.ComposedLayout,
    w_layout: cute.ComposedLayout,
    x_layout: cute.ComposedLayout,
    product: cutlass.Constexpr,
):
    """A thread block: tiles blockIdx, blockIdx + gridDim, ... Warpgroup 0 loads, the others multiply and store."""
    tile_shape, stages = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages)
    thread = cute.arch.thread_idx()[0]
    warp_index = cute.arch.make_warp_uniform(thread // WARP)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    allocator = cutlass.memory.SmemAllocator()
    w_stages = allocator.allocate_tensor(BFloat16, w_pairs.outer, byte_alignment=1024, swizzle=w_pairs.inner)
    x_stages = allocator.allocate_tensor(BFloat16, x_pairs.outer, byte_alignment=1024, swizzle=x_pairs.inner)
    x_scales = allocator.allocate_tensor(Float32, cute.make_layout((tile_shape.tokens, stages)), byte_alignment=128)
    buffers = allocator.allocate_tensor(
        out.element_type, cute.make_layout((product.chunk * product.pitch, tile_shape.warpgroups)), byte_alignment=128
    )
    largest = None
    if cutlass.const_expr(product.quantises):
        places = cute.make_layout((tile_shape.tokens, tile_shape.warpgroups, SLOTS))
        largest = allocator.allocate_tensor(Float32, places, byte_alignment=4)
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    starts = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)
    first_tiles = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)

    if warp_index == 0:
        cpasync.prefetch_descriptor(w_atom)
        cpasync.prefetch_descriptor(x_atom)
        count_tiles(offsets, starts, first_tiles, product)
    if thread == WARP:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + i, product.arrivals)
            cute.arch.mbarrier_init(empty + i, 4 * tile_shape.sharing)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tiles = first_tiles[product.experts] * product.parts
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

    if group == 0:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_decrease(product.registers[0])
        ring = (full, empty, starts, first_tiles, tiles, product)
        if warp_index == 0:
            stream(w_atom, w, w_stages, x_atom, x, x_stages, *ring)
        else:
            load_scales(scales, x_scales, *ring)
    else:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_increase(product.registers[1])
        share = group - 1
        rows = cutlass.const_expr(SLAB * tile_shape.slabs)
        w_mine = cute.local_tile(as_e4m3(w_stages, w_layout), (rows, BLOCK, stages), (share, 0, 0))
        x_mine = as_e4m3(x_stages, x_layout)
        upright = cutlass.const_expr(product.upright)
        wide, slabs = (rows, tile_shape.tokens // SLAB) if upright else (tile_shape.tokens, tile_shape.slabs)
        sums = cute.make_rmem_tensor((2, 2, wide // 8, slabs), Float32)
        buffer = buffers[None, share]
        index, phase, slot = Int32(0), Int32(0), Int32(0)
        while tile < tiles:
            expert, row, end, part = locate(tile, starts, first_tiles, product)
            column = (part * tile_shape.sharing + share) * product.width
            ring = (full, empty, index, phase)
            if cutlass.const_expr(upright):
                sums.fill(0.0)
                blocks = cute_fp8_upright.weight_blocks(expert, column, product)
                live = cute.arch.make_warp_uniform((end - row + (SLAB - 1)) // SLAB)
                cute_fp8_upright.multiply(w_mine, x_mine, x_scales, w_scales, blocks, sums, live, *ring, product)
                if cutlass.const_expr(product.quantises):
                    to = (out, out_scales, row, end, column)
                    cute_fp8_quantise.store(sums, buffer, largest, slot, *to, share, product)
                    slot = 1 - slot
                else:
                    cute_fp8_upright.store(sums, buffer, out, row, end, column, product)
            else:
                begin(sums, biases, expert, column, product)
                blocks = weight_blocks(expert, column, product)
                multiply(w_mine, x_mine, x_scales, w_scales, blocks, sums, *ring, product)
                for chunk in cutlass.range_constexpr(tile_shape.tokens // product.chunk):
                    first = row + chunk * product.chunk
                    if first < end:
                        # All have read the chunk before.
                        cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)
                        transpose(sums, buffer, chunk, product)
                        cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)
                        store_chunk(buffer, out, first, end, column, product)
            index, phase = skip(index, phase, product.steps, stages)
            tile += stride


def stages_of(rows: int, product: Fp8Product) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Layouts of the stages of an operand of so many rows: as pairs and as numbers, the same bytes."""
    found = []
    for dtype, deep in ((BFloat16, STEP), (Float8E4M3FN, BLOCK)):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        found.append(cute.tile_to_shape(atom, (rows, deep, product.stages), order=(0, 1, 2)))
    return found[0], found[1]


@cute.jit
def fp8_host(
    x: cute.Tensor,
    scales: cute.Tensor,
    offsets: cute.Tensor,
    w: cute.Tensor,
    w_scales: cute.Tensor,
    biases: cute.Tensor | None,
    out: cute.Tensor,
    out_scales: cute.Tensor | None,
    blocks: Int32,
    product: cutlass.Constexpr,
    stream: Any,
):
    inner, columns, experts, tile = product.inner, product.columns, product.experts, product.tile
    if cutlass.const_expr(product.gated):
        shape = ((8, 2, columns // 8), inner, experts)
        stride = ((inner, columns * inner, 8 * inner), 1, 2 * columns * inner)
    else:
        shape, stride = (columns, inner, experts), (inner, 1, columns * inner)
    weights = cute.make_tensor(cute.recast_ptr(w.iterator, dtype=BFloat16), cute.make_layout(shape, stride=stride))
    rows = cute.make_tensor(
        cute.recast_ptr(x.iterator, dtype=BFloat16), cute.make_layout((x.shape[0], inner), stride=(inner, 1))
    )
    flat = cute.make_tensor(w_scales.iterator, cute.make_layout(experts * product.blocks * product.steps))
    w_pairs, w_layout = stages_of(tile.rows, product)
    x_pairs, x_layout = stages_of(tile.tokens, product)
    load = cpasync.CopyBulkTensorTileG2SOp()
    w_atom, w_map = cpasync.make_tiled_tma_atom(load, weights, w_pairs, (tile.rows, STEP))
    x_atom, x_map = cpasync.make_tiled_tma_atom(load, rows, x_pairs, (tile.tokens, STEP))
    layouts = (w_pairs, x_pairs, w_layout, x_layout)
    fp8_kernel(w_atom, w_map, flat, x_atom, x_map, scales, offsets, biases, out, out_scales, *layouts, product).launch(
        grid=(blocks, 1, 1), block=(product.threads, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cached
def compile_for(arch: str, dtype: str, product: Fp8Product, keep: bool = False) -> Any:
    """Compile one product for one architecture and shape class (no GPU needed).

    The result is called with bytes x (R, 2 inner), scales (R, blocks along K) float32, offsets (E + 1,) int32, bytes w (E, N, 2 inner), their
    scales (E, N / 128, K / 128) float32, biases (E, N) or None, out (R, columns), None, and the number of thread blocks; where it quantises,
    with bytes out (R, columns) and their scales (R, columns / 128) float32.
    """
    element, rows, experts = DTYPES[dtype], cute.sym_int(), product.experts
    wide = (2 if product.gated else 1) * product.columns

    def weights(kind: Any, *shape: int) -> Any:
        return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=(2, 1, 0), assumed_align=16)

    arguments = [
        fake_tensor(Uint8, rows, 2 * product.inner),
        fake_tensor(Float32, rows, product.steps),
        fake_tensor(Int32, experts + 1),
        weights(Uint8, experts, wide, 2 * product.inner),
        weights(Float32, experts, product.blocks, product.steps),
        fake_tensor(element, experts, wide) if product.biased else None,
        fake_tensor(Uint8 if product.quantises else element, rows, product.columns),
        fake_tensor(Float32, rows, math.ceil(product.columns / BLOCK)) if product.quantises else None,
        Int32(1),
        product,
    ]
    return compile_kernel(fp8_host, arguments, arch, keep, only="sm_90a")
