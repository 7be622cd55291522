"""The grouped matrix product of `cute_experts` (sm_90a): weights on the M side of the tensor cores' product, tokens on its N side.

out[r, c] = f(sum_k w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1].

Strategy: one persistent thread block per multiprocessor. Its first warpgroup brings tiles of weights and of token rows through a
ring of stages in shared memory (`cute_loads`); one or two more warpgroups multiply them (wgmma, both operands from shared
memory, float32 sums in registers). A tile of the result is up to 256 rows of weights times 8 to 256 tokens: N has steps of 8,
M has steps of 64, so that few tokens per expert waste little, and an expert's weights are read once where its tokens fit one
tile. Sums lie as (weight row, token) and memory as (token, weight row): the epilogue transposes 8 x 8 blocks with `stmatrix`
into a buffer of its own, then writes 16 bytes per thread (`cute_epilogue`), while the next tile is loaded.

Two warpgroups either share each tile, and the tensor cores rest while it is stored, or take tiles in turn (ping-pong): one
multiplies while the other stores. A named barrier per warpgroup hands the tensor cores over, so that a tile is finished early
rather than two late; each warpgroup passes over the stages of the other's tiles.

A tile may have several forms (`Tile.narrowest`): an expert's rows are then spread evenly over its tiles, and each multiplies
no more tokens than the next multiple of 8. The forms differ in their main loop alone (`cute_multiply`).

Two thread blocks may form a cluster (`Tile.cluster`): they take neighbouring tiles of an expert's rows and the same weights, of
which each loads half, for both (TMA multicast). So L2 sends 36 instead of 52 KB per block and step of 256 x 160, and less power
goes into moving data.

Gate and up: the tensor map sees w13 as (8 rows, gate or up, I / 8, H, E), so that a box of it lays 8 gate rows above the 8 up
rows that belong to them. A thread's sums of rows r and r + 8 of a 16-row slab are then a gate and its up, and the activation
needs no exchange; boxes are clipped at I.

Two products may overlap (programmatic dependent launch): blocks of the second start on multiprocessors that the first has left,
count tiles and load weights, and wait for the end of the first before they load its rows. With few rows the kernels around them may
overlap with them as well: the first product sets up its barriers while rows are still being ordered, and combine starts once all
loads of the second are under way, not sooner: it would be in their way.

Invariants:
- Whatever overlapping kernels did not write themselves is complete before the first of them starts: it is launched in the ordinary
  way. What one of them wrote, another may read without waiting for it if it starts only after a third has: the second product reads
  `offsets` so, as the first lets it start after its own wait. Each ends after the one ahead of it, for whose end it waits in every
  block, and writes what none ahead of it reads.
- Rows beyond an expert's last are multiplied (they are another expert's or its own, or past the tensor and zero) and never
  stored; sums of different tokens do not mix.
- A stage is filled again only after each warp that multiplies it, in all blocks of a cluster, has arrived at its `empty` barrier,
  which it does after the `wgmma.wait_group` that covers its reads. The producer waits for the parity opposite to its phase, so its first round passes.
- A parity tells a phase from the next only: ping-pong, a warpgroup waits for a stage once the other has seen all earlier ones.
- What lies beyond the inner dimension is zero in both operands, so the last step may overhang.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import cached
from moe_routing_kernels.cute.compilation import DTYPES, compile_kernel, fake_tensor
from moe_routing_kernels.experts.cute_epilogue import begin, store_chunk, transpose
from moe_routing_kernels.experts.cute_loads import gather, stream
from moe_routing_kernels.experts.cute_multiply import TURN, in_form, multiply
from moe_routing_kernels.experts.cute_tiles import (
    SLAB,
    STEP,
    WARPGROUP,
    Product,
    begin_at,
    count_tiles,
    locate,
    skip,
    width_of,
)


@cute.kernel
def product_kernel(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    x_atom: cute.CopyAtom | None,
    x: cute.Tensor,
    order: cute.Tensor | None,
    offsets: cute.Tensor,
    biases: cute.Tensor | None,
    out: cute.Tensor,
    w_layout: cute.ComposedLayout,
    x_layout: cute.ComposedLayout,
    product: cutlass.Constexpr,
):
    """A thread block: tiles blockIdx, blockIdx + gridDim, ... (of clusters). Warpgroup 0 loads, the others multiply and store."""
    tile_shape, stages = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages)
    thread = cute.arch.thread_idx()[0]
    warp_index = cute.arch.make_warp_uniform(thread // WARP)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    allocator = cutlass.memory.SmemAllocator()
    w_stages = allocator.allocate_tensor(out.element_type, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner)
    x_stages = allocator.allocate_tensor(out.element_type, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    buffers = allocator.allocate_tensor(
        out.element_type, cute.make_layout((product.chunk * product.pitch, tile_shape.warpgroups)), byte_alignment=128
    )
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    starts = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)
    first_tiles = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)

    if warp_index == 0:
        cpasync.prefetch_descriptor(w_atom)
        if cutlass.const_expr(x_atom is not None):
            cpasync.prefetch_descriptor(x_atom)
        if cutlass.const_expr(product.waits == "offsets"):
            cute.arch.griddepcontrol_wait()
        count_tiles(offsets, starts, first_tiles, product)
    if thread == WARP:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + i, product.arrivals)
            cute.arch.mbarrier_init(empty + i, 4 * tile_shape.sharing * tile_shape.cluster)
        cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(tile_shape.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if cutlass.const_expr(product.signals == "early"):
        cute.arch.griddepcontrol_launch_dependents()  # blocks of the next kernel start where those of this one end
    tiles = first_tiles[product.experts] * product.parts
    tile, stride = begin_at(product)

    if group == 0:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_decrease(product.registers[0])
        ring = (full, empty, starts, first_tiles, tiles, product)
        if cutlass.const_expr(product.top_k):
            gather(w_atom, w, w_stages, x, order, x_stages, *ring)
        elif warp_index == 0:
            stream(w_atom, w, w_stages, x_atom, x, x_stages, *ring)
    else:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_increase(product.registers[1])
        consumer = group - 1
        share = 0 if cutlass.const_expr(tile_shape.pingpong) else consumer  # of the tile's weights
        rows = cutlass.const_expr(SLAB * tile_shape.slabs)
        w_mine = cute.local_tile(w_stages, (rows, STEP, stages), (share, 0, 0))
        elements = cutlass.const_expr(rows * tile_shape.tokens // WARPGROUP)
        sums = cute.make_rmem_tensor((elements,), Float32)
        plain = cute.make_layout((2, 2, tile_shape.tokens // 8, tile_shape.slabs))
        finished = cute.make_tensor(sums.iterator, plain)  # the same registers
        buffer = buffers[None, consumer]
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
            in_form(multiply, width, tile_shape.widths, (w_mine, x_stages, sums, *stage, consumer, product))
            index, phase = skip(index, phase, product.steps * (2 if tile_shape.pingpong else 1), stages)

            for chunk in cutlass.range_constexpr(tile_shape.tokens // product.chunk):
                first = row + chunk * product.chunk
                if first < end:
                    cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)  # all have read the chunk before
                    transpose(finished, buffer, chunk, product)
                    cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)
                    store_chunk(buffer, out, first, end, column, product)
            tile += stride
    if cutlass.const_expr(tile_shape.cluster > 1):  # none ends while others write to its memory
        cute.arch.cluster_arrive(aligned=False)
        cute.arch.cluster_wait()


@cute.jit
def product_host(
    x: cute.Tensor,
    order: cute.Tensor | None,
    offsets: cute.Tensor,
    w: cute.Tensor,
    biases: cute.Tensor | None,
    out: cute.Tensor,
    blocks: Int32,
    product: cutlass.Constexpr,
    stream: Any,
):
    inner, columns, experts = product.inner, product.columns, product.experts
    if cutlass.const_expr(product.gated):
        shape = ((8, 2, columns // 8), inner, experts)
        stride = ((inner, columns * inner, 8 * inner), 1, 2 * columns * inner)
    else:
        shape, stride = (columns, inner, experts), (inner, 1, columns * inner)
    weights = cute.make_tensor(w.iterator, cute.make_layout(shape, stride=stride))
    tile, dtype = product.tile, w.element_type
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    w_layout = cute.tile_to_shape(atom, (tile.rows, STEP, product.stages), order=(0, 1, 2))
    x_layout = cute.tile_to_shape(atom, (tile.tokens, STEP, product.stages), order=(0, 1, 2))
    load = cpasync.CopyBulkTensorTileG2SOp()
    to_cluster = cpasync.CopyBulkTensorTileG2SMulticastOp() if tile.cluster > 1 else load
    w_atom, w_map = cpasync.make_tiled_tma_atom(to_cluster, weights, w_layout, (tile.rows, STEP), tile.cluster)
    x_atom, x_map = None, x
    if cutlass.const_expr(not product.top_k):
        x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, STEP))
    product_kernel(w_atom, w_map, x_atom, x_map, order, offsets, biases, out, w_layout, x_layout, product).launch(
        grid=(blocks, 1, 1),
        block=(product.threads, 1, 1),
        cluster=(tile.cluster, 1, 1) if tile.cluster > 1 else None,
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=bool(product.waits),
    )


@cached
def compile_for(arch: str, dtype: str, product: Product, keep: bool = False) -> Any:
    """Compile one product for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), None, offsets (E + 1,) int32, w (E, N, inner), biases (E, N) or None, out
    (R, columns), and the number of thread blocks; a product that gathers with x (T, inner) and order (R,) int32 in the first
    two places.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    wide = (2 if product.gated else 1) * product.columns
    weights = cute.runtime.make_fake_compact_tensor(
        element, (product.experts, wide, product.inner), stride_order=(2, 1, 0), assumed_align=16
    )
    arguments = [
        fake_tensor(element, cute.sym_int() if product.top_k else rows, product.inner),
        fake_tensor(Int32, rows) if product.top_k else None,
        fake_tensor(Int32, product.experts + 1),
        weights,
        fake_tensor(element, product.experts, wide) if product.biased else None,
        fake_tensor(element, rows, product.columns),
        Int32(1),
        product,
    ]
    return compile_kernel(product_host, arguments, arch, keep, only="sm_90a")
