"""The grouped products of `cute_training` over packed rows (sm_90a): as those of `cute_swapped`, with two things more.

out[r, c] = f(sum_k w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1].

- The gradients of rows sum over the rows of the weights: w[e, c, k] is at (E, k, c) in memory. Weights then lie in shared memory as
  they do there, 64 columns of a row side by side (MN-major); nothing is transposed.
- The first product of the forward pass stores its sums, too, and the gradient of the activated rows goes through the activation at
  once (`cute_training_epilogue`): sums are never computed twice, and the gradient of the activated rows is never written.

Strategy, tiles and invariants are those of `cute_swapped`; rows are packed, products do not overlap, and there are no biases.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import cached
from moe_routing_kernels.cute.compilation import DTYPES, compile_kernel, fake_tensor
from moe_routing_kernels.experts import cute_training_epilogue as epilogue
from moe_routing_kernels.experts.cute_loads import stream
from moe_routing_kernels.experts.cute_multiply import TURN, in_form, release
from moe_routing_kernels.experts.cute_tiles import (
    MOST_STAGES,
    RESERVED,
    SHARED_BYTES,
    SLAB,
    STEP,
    VECTOR,
    WARPGROUP,
    Product,
    advance,
    count_tiles,
    locate,
    skip,
    width_of,
)


@dataclass(frozen=True)
class TrainingProduct(Product):
    """A product of packed rows, forward where its weights are (E, N, inner), backward where they are (E, inner, columns)."""

    backward: bool = False
    derivative: str = ""  # the activation whose slope its results are multiplied by
    weighted: bool = False  # those results by the weights of their rows, too

    @property
    def dots(self) -> int:
        """Parts of a row of the result, of each of which a product is kept where rows have weights."""
        return self.parts * self.tile.sharing

    @property
    def parts_stored(self) -> int:
        """Chunks that the epilogue holds at a time: forward, what is activated, gates and ups."""
        return 3 if self.gated else 1

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue transposes at a time: all where it needs the registers of the sums."""
        return self.tile.tokens if self.derivative else super().chunk

    def stages_beside(self, chunk: int) -> int:
        """Stages that fit beside buffers of `chunk` tokens."""
        buffers = chunk * self.pitch * 2 * self.tile.warpgroups * self.parts_stored
        tables = 2 * 4 * (self.experts + 1)
        return min(MOST_STAGES, (SHARED_BYTES - RESERVED - buffers - tables) // self.stage_bytes)


@cute.jit
def multiply(
    tokens: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    sums: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    consumer: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup: add the product of a tile's weights and of its first `tokens` tokens to sums, from stage `index` on."""
    tile, stages = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages)
    major, shared = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource.SMEM
    of_weights = major.MN if cutlass.const_expr(product.backward) else major.K
    op = warpgroup.MmaF16BF16Op(x_stages.element_type, Float32, (SLAB, tokens, 16), shared, of_weights, major.K)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    mine = mma.get_slice(0)
    a = mma.make_fragment_A(mine.partition_A(w_stages))
    b = mma.make_fragment_B(mine.partition_B(cute.local_tile(x_stages, (tokens, STEP, stages), (0, 0, 0))))
    layout = cute.make_layout(
        ((2, 2, tokens // 8), tile.slabs, 1), stride=((1, 2, 4), SLAB * tile.tokens // WARPGROUP, 0)
    )
    results = cute.make_tensor(sums.iterator, layout)
    if cutlass.const_expr(tile.pingpong):
        cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.fence()
    previous = index
    for k in cutlass.range(product.steps, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        for n in cutlass.range_constexpr(STEP // 16):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
        if k > 0:
            warpgroup.wait_group(1)
            release(empty + previous)
        previous = index
        index, phase = advance(index, phase, stages)
    if cutlass.const_expr(tile.pingpong):
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.wait_group(0)
    release(empty + previous)


@cute.jit
def finish(
    finished: cute.Tensor,
    buffer: cute.Tensor,
    sums: cute.Tensor | None,
    scales: cute.Tensor | None,
    out: cute.Tensor,
    inner: cute.Tensor | None,
    dots: cute.Tensor | None,
    row: Int32,
    end: Int32,
    column: Int32,
    consumer: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup: store a tile's sums, (2 tokens, 2 rows 8 apart, tokens / 8, slabs), chunk by chunk."""
    part = cutlass.const_expr(product.chunk * product.pitch)
    for chunk in cutlass.range_constexpr(product.tile.tokens // product.chunk):
        first = row + chunk * product.chunk
        if first < end:
            here = (first, end, column, product)
            if cutlass.const_expr(product.derivative):
                held = cute.make_rmem_tensor((VECTOR, 2, epilogue.TOGETHER), out.element_type)
                scale = cute.make_rmem_tensor((epilogue.TOGETHER,), Float32)
                held.fill(0.0)
                scale.fill(1.0)
                epilogue.fetch(sums, scales, held, scale, Int32(0), *here)
            cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)  # all have read the chunk before
            if cutlass.const_expr(product.gated):
                epilogue.transpose(epilogue.activated(finished, product.activation), buffer, 0, chunk, product)
                epilogue.transpose(epilogue.gate_or_up(finished, 0), buffer, part, chunk, product)
                epilogue.transpose(epilogue.gate_or_up(finished, 1), buffer, 2 * part, chunk, product)
            else:
                epilogue.transpose(epilogue.plain(finished), buffer, 0, chunk, product)
            cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
            if cutlass.const_expr(product.derivative):
                epilogue.store_gradients(buffer, sums, scales, held, scale, out, inner, dots, *here)
            else:
                epilogue.store(buffer, 0, out, 0, product.columns, *here)
                if cutlass.const_expr(product.gated):
                    for half in cutlass.range_constexpr(2):
                        shift = cutlass.const_expr(half * product.columns)
                        epilogue.store(buffer, (1 + half) * part, sums, shift, 2 * product.columns, *here)


@cute.kernel
def training_kernel(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    offsets: cute.Tensor,
    sums: cute.Tensor | None,
    scales: cute.Tensor | None,
    out: cute.Tensor,
    inner: cute.Tensor | None,
    dots: cute.Tensor | None,
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
    w_stages = allocator.allocate_tensor(out.element_type, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner)
    x_stages = allocator.allocate_tensor(out.element_type, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    held = cutlass.const_expr(product.chunk * product.pitch * product.parts_stored)
    buffers = allocator.allocate_tensor(
        out.element_type, cute.make_layout((held, tile_shape.warpgroups)), byte_alignment=128
    )
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    starts = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)
    first_tiles = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)

    if warp_index == 0:
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
        if warp_index == 0:
            stream(w_atom, w, w_stages, x_atom, x, x_stages, full, empty, starts, first_tiles, tiles, product)
    else:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_increase(product.registers[1])
        consumer = group - 1
        share = 0 if cutlass.const_expr(tile_shape.pingpong) else consumer  # of the tile's weights
        rows = cutlass.const_expr(SLAB * tile_shape.slabs)
        w_mine = cute.local_tile(w_stages, (rows, STEP, stages), (share, 0, 0))
        finished = cute.make_rmem_tensor((2, 2, tile_shape.tokens // 8, tile_shape.slabs), Float32)
        index, phase = Int32(0), Int32(0)
        if cutlass.const_expr(tile_shape.pingpong):
            if consumer == 1:
                tile += stride
                index, phase = skip(index, phase, product.steps, stages)
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)  # the other begins
            stride *= 2
        while tile < tiles:
            _, row, end, part = locate(tile, starts, first_tiles, product)
            column = (part * tile_shape.sharing + share) * product.width
            finished.fill(0.0)
            stage = (full, empty, index, phase)
            width = width_of(row, end, tile_shape)
            shared = (w_mine, x_stages, finished, *stage, consumer, product)
            in_form(multiply, width, tile_shape.widths, shared)
            index, phase = skip(index, phase, product.steps * (2 if tile_shape.pingpong else 1), stages)
            tensors = (sums, scales, out, inner, dots)
            finish(finished, buffers[None, consumer], *tensors, row, end, column, consumer, product)
            tile += stride


@cute.jit
def training_host(
    x: cute.Tensor,
    offsets: cute.Tensor,
    w: cute.Tensor,
    sums: cute.Tensor | None,
    scales: cute.Tensor | None,
    out: cute.Tensor,
    inner: cute.Tensor | None,
    dots: cute.Tensor | None,
    blocks: Int32,
    product: cutlass.Constexpr,
    stream: Any,
):
    depth, columns, experts = product.inner, product.columns, product.experts
    if cutlass.const_expr(product.backward):
        shape, stride = (columns, depth, experts), (1, columns, columns * depth)
    elif cutlass.const_expr(product.gated):
        shape = ((8, 2, columns // 8), depth, experts)
        stride = ((depth, columns * depth, 8 * depth), 1, 2 * columns * depth)
    else:
        shape, stride = (columns, depth, experts), (depth, 1, columns * depth)
    weights = cute.make_tensor(w.iterator, cute.make_layout(shape, stride=stride))
    tile, dtype, kinds = product.tile, w.element_type, warpgroup.SmemLayoutAtomKind
    lines = warpgroup.make_smem_layout_atom(kinds.K_SW128, dtype)
    x_layout = cute.tile_to_shape(lines, (tile.tokens, STEP, product.stages), order=(0, 1, 2))
    if cutlass.const_expr(product.backward):
        upright = warpgroup.make_smem_layout_atom(kinds.MN_SW128, dtype)
        w_layout = cute.tile_to_shape(upright, (tile.rows, STEP, product.stages), order=(1, 0, 2))
    else:
        w_layout = cute.tile_to_shape(lines, (tile.rows, STEP, product.stages), order=(0, 1, 2))
    load = cpasync.CopyBulkTensorTileG2SOp()
    w_atom, w_map = cpasync.make_tiled_tma_atom(load, weights, w_layout, (tile.rows, STEP))
    x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, STEP))
    training_kernel(
        w_atom, w_map, x_atom, x_map, offsets, sums, scales, out, inner, dots, w_layout, x_layout, product
    ).launch(grid=(blocks, 1, 1), block=(product.threads, 1, 1), min_blocks_per_mp=1, stream=stream)


@cached
def compile_for(arch: str, dtype: str, product: TrainingProduct, keep: bool = False) -> Any:
    """Compile one product for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), offsets (E + 1,) int32, w, sums, scales, out, inner, dots and the number of thread blocks,
    None for what is not named here:

    - forward, w is (E, 2 columns, inner), and sums (R, 2 columns) and out (R, columns) are written;
    - with a `derivative`, w is (E, inner, columns), sums (R, 2 columns) is read, out (R, 2 columns) and inner (R, columns) are written;
      where that is `weighted`, scales (R,) float32 is read, too, and dots (R, `product.dots`) float32 written;
    - else w is (E, inner, columns), and out (R, columns) is written.
    """
    element, rows, columns = DTYPES[dtype], cute.sym_int(), product.columns
    shape = (product.inner, columns) if product.backward else (2 * columns if product.gated else columns, product.inner)
    weights = cute.runtime.make_fake_compact_tensor(
        element, (product.experts, *shape), stride_order=(2, 1, 0), assumed_align=16
    )
    derived, weighted = bool(product.derivative), product.weighted
    arguments = [
        fake_tensor(element, rows, product.inner),
        fake_tensor(Int32, product.experts + 1),
        weights,
        fake_tensor(element, rows, 2 * columns) if derived or product.gated else None,
        fake_tensor(Float32, rows) if weighted else None,
        fake_tensor(element, rows, 2 * columns if derived else columns),
        fake_tensor(element, rows, columns) if derived else None,
        fake_tensor(Float32, rows, product.dots) if weighted else None,
        Int32(1),
        product,
    ]
    return compile_kernel(training_host, arguments, arch, keep, only="sm_90a")
