"""The grouped matrix product of `cute_quantised` (sm_90a): that of `cute_swapped`, with weights that are dequantised in registers.

out[r, c] = f(sum_k w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1].

Strategy: weights stand on the M side of the tensor cores' product, whose left operand may come from registers. A warp brings blocks
of codes in the order of `quantised_layout` and token rows through a ring of stages (`cute_quantised_loads`); one or two warpgroups load
their codes, 16 bytes per thread at a time, make numbers of them (`cute_dequantise`) and multiply (`cute_quantised_multiply`, and of tiles of
8 tokens `cute_quantised_few`). Tiles, their order and the epilogue are those of `cute_swapped`, whose warpgroups share a tile or take tiles in
turn. With few rows, several blocks share a multiprocessor, each of which hides its latencies behind the others' work, and up to three warpgroups
take the stages of a tile in turn.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import cached
from moe_routing_kernels.cute.compilation import DTYPES, compile_kernel, fake_tensor
from moe_routing_kernels.experts import cute_quantised_few as few
from moe_routing_kernels.experts.cute_epilogue import begin, store_chunk, transpose
from moe_routing_kernels.experts.cute_multiply import TURN, in_form
from moe_routing_kernels.experts.cute_quantised_loads import stream
from moe_routing_kernels.experts.cute_quantised_multiply import multiply
from moe_routing_kernels.experts.cute_quantised_tiles import QuantisedProduct
from moe_routing_kernels.experts.cute_tiles import SLAB, WARPGROUP, count_tiles, locate, skip, width_of
from moe_routing_kernels.experts.quantised_layout import DEPTH


@cute.kernel
def quantised_kernel(
    w: cute.Tensor,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    offsets: cute.Tensor,
    biases: cute.Tensor | None,
    out: cute.Tensor,
    x_layout: cute.ComposedLayout,
    product: cutlass.Constexpr,
):
    """A thread block: tiles blockIdx, blockIdx + gridDim, ... The last warp or warpgroup loads, the others multiply and store."""
    tile_shape, stages = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages)
    thread = cute.arch.thread_idx()[0]
    warp_index = cute.arch.make_warp_uniform(thread // WARP)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    allocator = cutlass.memory.SmemAllocator()
    x_stages = allocator.allocate_tensor(out.element_type, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    w_stages = allocator.allocate_tensor(
        Uint32, cute.make_layout((product.codes.block_words, product.slabs_together, stages)), byte_alignment=128
    )
    buffers = allocator.allocate_tensor(
        out.element_type, cute.make_layout((product.chunk * product.pitch, tile_shape.warpgroups)), byte_alignment=128
    )
    partial = None
    if cutlass.const_expr(product.splits > 1):
        partial = allocator.allocate_tensor(Float32, cute.make_layout(product.partial), byte_alignment=128)
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    starts = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)
    first_tiles = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)

    if warp_index == 0:
        cpasync.prefetch_descriptor(x_atom)
        count_tiles(offsets, starts, first_tiles, product)
    if thread == WARP:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, 4 * tile_shape.sharing)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if cutlass.const_expr(product.signals == "early"):
        cute.arch.griddepcontrol_launch_dependents()  # blocks of the second start where those of this one end
    tiles = first_tiles[product.experts] * product.parts
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

    moves = cutlass.const_expr(product.loaders == WARPGROUP)  # registers, to those that multiply
    if group == product.warpgroups:
        if cutlass.const_expr(moves):
            cute.arch.setmaxregister_decrease(product.registers[0])
        if warp_index == 4 * product.warpgroups:
            stream(w, w_stages, x_atom, x, x_stages, full, empty, starts, first_tiles, tiles, product)
    else:
        if cutlass.const_expr(moves):
            cute.arch.setmaxregister_increase(product.registers[1])
        consumer = group
        share = consumer if cutlass.const_expr(tile_shape.sharing > 1) else 0  # of the tile's weights
        elements = cutlass.const_expr(SLAB * tile_shape.slabs * tile_shape.tokens // WARPGROUP)
        sums = cute.make_rmem_tensor((elements,), Float32)
        plain = cute.make_layout((2, 2, tile_shape.tokens // 8, tile_shape.slabs))
        finished = cute.make_tensor(sums.iterator, plain)  # the same registers
        buffer = buffers[None, consumer % tile_shape.warpgroups]
        index, phase = Int32(0), Int32(0)
        if cutlass.const_expr(tile_shape.pingpong):
            if consumer == 1:
                tile += stride
                index, phase = skip(index, phase, product.steps, stages)
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)  # the other begins
            stride *= 2
        while tile < tiles:
            expert, row, end, part = locate(tile, starts, first_tiles, product)
            column = (part * tile_shape.sharing + share) * product.width
            begin(finished, biases, expert, column, product)
            stage = (full, empty, index, phase)
            width = width_of(row, end, tile_shape)
            shared = (w_stages, x_stages, sums, *stage, share, consumer, first_tiles[0], product)
            in_form(few.multiply if product.few else multiply, width, tile_shape.widths, shared)
            index, phase = skip(index, phase, product.steps * (2 if tile_shape.pingpong else 1), stages)

            if cutlass.const_expr(product.splits > 1):
                few.add_up(sums, partial, consumer, product)
                end = cutlass.select_(consumer == 0, end, row)  # the first one stores
            for chunk in cutlass.range_constexpr(tile_shape.tokens // product.chunk):
                first = row + chunk * product.chunk
                if first < end:
                    # All have read the chunk before.
                    cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
                    transpose(finished, buffer, chunk, product)
                    cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
                    store_chunk(buffer, out, first, end, column, product)
            tile += stride


@cute.jit
def quantised_host(
    x: cute.Tensor,
    offsets: cute.Tensor,
    w: cute.Tensor,
    biases: cute.Tensor | None,
    out: cute.Tensor,
    blocks: Int32,
    product: cutlass.Constexpr,
    stream: Any,
):
    tile = product.tile
    words = cute.make_tensor(cute.recast_ptr(w.iterator, dtype=Uint32), w.layout)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, x.element_type)
    x_layout = cute.tile_to_shape(atom, (tile.tokens, DEPTH, product.stages), order=(0, 1, 2))
    load = cpasync.CopyBulkTensorTileG2SOp()
    x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, DEPTH))
    quantised_kernel(words, x_atom, x_map, offsets, biases, out, x_layout, product).launch(
        grid=(blocks, 1, 1),
        block=(product.threads, 1, 1),
        min_blocks_per_mp=product.resident,
        preferred_smem_carveout=100,  # percent; asking the driver for it would need one
        stream=stream,
        use_pdl=bool(product.waits),
    )


@cached
def compile_for(arch: str, dtype: str, product: QuantisedProduct, keep: bool = False) -> Any:
    """Compile one product for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), offsets (E + 1,) int32, w (E, slabs, blocks, words) int32 of `quantised_layout`, biases (E, N)
    or None, out (R, columns), and the number of thread blocks.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    wide = (2 if product.gated else 1) * product.columns
    weights = cute.runtime.make_fake_compact_tensor(
        Int32,
        (product.experts, product.slabs, product.steps, product.codes.block_words),
        stride_order=(3, 2, 1, 0),
        assumed_align=16,
    )
    arguments = [
        fake_tensor(element, rows, product.inner),
        fake_tensor(Int32, product.experts + 1),
        weights,
        fake_tensor(element, product.experts, wide) if product.biased else None,
        fake_tensor(element, rows, product.columns),
        Int32(1),
        product,
    ]
    return compile_kernel(quantised_host, arguments, arch, keep, only="sm_90a")
