"""Gradients of the experts' weights (sm_90a): products over the rows of each expert, of which there are differently many.

out[e] = a[rows of e]^T b[rows of e], for a (R, M), b (R, N) and out (E, M, N): the sum runs over packed rows, which both operands
have as their slow dimension in memory, so both stand in shared memory as they do there (MN-major), 64 elements of a row side by side.

Strategy: one persistent thread block per multiprocessor. A warp brings steps of 64 rows of both operands by TMA through a ring of
stages; two warpgroups take tiles of the result in turn (ping-pong): one multiplies while the other rounds its float32 sums and
hands them to TMA, 64 columns at a time. Each expert writes its whole M x N, however few rows it has: with 256 rows the stores
take half as long as the products, so they must overlap. Tiles of an expert follow each other, those of the shorter side first, as
its rows then stay in the L2 cache.

An expert's rows are rarely a multiple of 64. The last step multiplies as many 16s as it needs; the rest of the last 16 is set to zero
in both operands, as they may be another expert's rows, or of no expert, and hold NaN. Meanwhile the step before is multiplied.

FLOPs: 2 R M N. Floor: those at the rate of a large product, or 2 E M N bytes of 16-bit results and 2 R (M + N) of rows at that of a
stream, whichever takes longer.

Invariants:
- Zeros are written by threads, and read by the tensor cores through the asynchronous proxy: each thread fences, then all meet at a
  barrier, then the warpgroup multiplies.
- A buffer is written again only after TMA has read it: the warp that stored waits for that, and then all meet.
- A stage is filled again only after each warp that multiplies it has arrived at `empty`, after the `wgmma.wait_group` that covers it.
- A warpgroup waits for a stage in its turn only, when the other has seen all earlier ones: a parity tells a phase from the next only.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import cached
from moe_routing_kernels.cute.compilation import DTYPES, compile_kernel, fake_tensor
from moe_routing_kernels.experts.cute_multiply import TURN, release
from moe_routing_kernels.experts.cute_tiles import REGISTERS, SLAB, STEP, VECTOR, WARPGROUP, advance, skip
from moe_routing_kernels.experts.cute_weight_tiles import CHUNK, THREADS, Reduction, locate, steps_of


@cute.jit
def load(
    a_atom: cute.CopyAtom,
    a: cute.Tensor,
    a_stages: cute.Tensor,
    b_atom: cute.CopyAtom,
    b: cute.Tensor,
    b_stages: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    product: cutlass.Constexpr,
):
    """By one warp: bring the rows of a (M, R) and b (N, R) that the block's tiles need."""
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    index, phase = Int32(0), Int32(1)
    while tile < product.tiles:
        expert, top, left = locate(tile, product)
        row, end = starts[expert], starts[expert + 1]
        while row < end:
            cute.arch.mbarrier_wait(empty + index, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + index, product.stage_bytes)
            a_box = cute.local_tile(cute.domain_offset((0, row), a), (product.rows, STEP), (top, 0))
            target, source = cpasync.tma_partition(
                a_atom, 0, cute.make_layout(1), cute.group_modes(a_stages, 0, 2), cute.group_modes(a_box, 0, 2)
            )
            cute.copy(a_atom, source, target[None, index], tma_bar_ptr=full + index)
            b_box = cute.local_tile(cute.domain_offset((0, row), b), (product.columns, STEP), (left, 0))
            target, source = cpasync.tma_partition(
                b_atom, 0, cute.make_layout(1), cute.group_modes(b_stages, 0, 2), cute.group_modes(b_box, 0, 2)
            )
            cute.copy(b_atom, source, target[None, index], tma_bar_ptr=full + index)
            index, phase = advance(index, phase, product.stages)
            row += STEP
        tile += stride


@cute.jit
def clear(stages: cute.Tensor, size: cutlass.Constexpr, index: Int32, first: Int32, end: Int32):
    """By a warpgroup: set rows `first` to `end` of a stage, which are fewer than 16, to zero in all `size` columns."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    row, vector = first + thread // VECTOR, thread % VECTOR
    base = cute.recast_ptr(stages.iterator) + cute.assume(
        index * (size * STEP) + row * STEP + vector * VECTOR, divby=VECTOR
    )
    zero = cute.make_rmem_tensor((VECTOR,), stages.element_type)
    zero.fill(0.0)
    if row < end:
        for block in cutlass.range_constexpr(size // STEP):
            cute.autovec_copy(zero, cute.make_tensor(base + block * STEP * STEP, cute.make_layout(VECTOR)))


@cute.jit
def multiply(
    a_stages: cute.Tensor,
    b_stages: cute.Tensor,
    sums: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    count: Int32,
    consumer: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup, in its turn: add the product of `count` rows to sums, from stage `index` on."""
    dtype = a_stages.element_type
    major, shared = cute.nvgpu.OperandMajorMode.MN, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (SLAB, product.columns, 16), shared, major, major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    mine = mma.get_slice(0)
    a = mma.make_fragment_A(mine.partition_A(a_stages))
    b = mma.make_fragment_B(mine.partition_B(b_stages))
    layout = cute.make_layout(
        ((2, 2, product.columns // 8), product.slabs, 1), stride=((1, 2, 4), SLAB * product.columns // WARPGROUP, 0)
    )
    results = cute.make_tensor(sums.iterator, layout)
    cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.fence()
    previous = index
    for k in cutlass.range(count // STEP, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        for n in cutlass.range_constexpr(STEP // 16):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
        if k > 0:
            warpgroup.wait_group(1)
            release(empty + previous)
        previous = index
        index, phase = advance(index, phase, product.stages)
    over = count % STEP
    if over > 0:  # the step before is still multiplied meanwhile
        cute.arch.mbarrier_wait(full + index, phase)
        sixteens = (over + 15) // 16
        clear(a_stages, product.rows, index, over, 16 * sixteens)
        clear(b_stages, product.columns, index, over, 16 * sixteens)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
        for n in cutlass.range(sixteens, unroll=1):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
    cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.wait_group(0)
    if count >= STEP:
        release(empty + previous)
    if over > 0:
        release(empty + index)


@cute.jit
def round_chunk(sums: cute.Tensor, buffer: cute.Tensor, chunk: cutlass.Constexpr, product: cutlass.Constexpr):
    """By a warpgroup: write 64 columns of its sums, (2, 2 rows 8 apart, columns / 8, slabs), to `buffer`, swizzled as TMA reads it."""
    dtype = buffer.element_type
    lane, warp_of_group = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    row = warp_of_group * 16 + lane // 8 % 2 * 8 + lane % 8  # lanes 8 q to 8 q + 7 give the addresses of the q-th block
    for slab in cutlass.range_constexpr(product.slabs):
        for pair in cutlass.range_constexpr(CHUNK // 16):
            rounded = cute.make_rmem_tensor((2, 2, 2), dtype)
            for n in cutlass.range_constexpr(2):
                rounded[None, None, n].store(sums[None, None, chunk * 8 + pair * 2 + n, slab].load().to(dtype))
            vector = (pair * 2 + lane // 16) ^ (lane % 8)
            offset = (row + slab * SLAB) * CHUNK + vector * VECTOR
            target = cute.recast_ptr(buffer.iterator) + cute.assume(offset, divby=VECTOR)
            flat = cute.make_tensor(rounded.iterator, cute.make_layout(8))
            cute.copy(atom, flat, cute.make_tensor(target, flat.layout))


@cute.kernel
def reduction_kernel(
    a_atom: cute.CopyAtom,
    a: cute.Tensor,
    b_atom: cute.CopyAtom,
    b: cute.Tensor,
    out_atom: cute.CopyAtom,
    out: cute.Tensor,
    offsets: cute.Tensor,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    out_layout: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
    product: cutlass.Constexpr,
):
    """A thread block: tiles blockIdx, blockIdx + gridDim, ... Warpgroup 0 loads, the others take tiles in turn."""
    stages = cutlass.const_expr(product.stages)
    thread = cute.arch.thread_idx()[0]
    warp_index = cute.arch.make_warp_uniform(thread // WARP)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    allocator = cutlass.memory.SmemAllocator()
    a_stages = allocator.allocate_tensor(dtype, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
    b_stages = allocator.allocate_tensor(dtype, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
    buffers = allocator.allocate_tensor(dtype, out_layout.outer, byte_alignment=1024, swizzle=out_layout.inner)
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    starts = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)
    for i in cutlass.range_constexpr(math.ceil((product.experts + 1) / THREADS)):
        if thread + i * THREADS <= product.experts:
            starts[thread + i * THREADS] = offsets[thread + i * THREADS]
    if thread == 0:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, 4)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

    if group == 0:
        cute.arch.setmaxregister_decrease(REGISTERS[0])
        if warp_index == 0:
            load(a_atom, a, a_stages, b_atom, b, b_stages, full, empty, starts, product)
    else:
        cute.arch.setmaxregister_increase(REGISTERS[1])
        consumer = group - 1
        sums = cute.make_rmem_tensor((2, 2, product.columns // 8, product.slabs), Float32)
        buffer = buffers[None, None, consumer]
        index, phase = Int32(0), Int32(0)
        if consumer == 1:
            if tile < product.tiles:
                other, _, _ = locate(tile, product)
                steps = steps_of(starts[other], starts[other + 1])
                index, phase = skip(index, phase, steps, stages)
            tile += stride
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)  # the other begins
        while tile < product.tiles:
            expert, top, left = locate(tile, product)
            first, end = starts[expert], starts[expert + 1]
            sums.fill(0.0)
            multiply(a_stages, b_stages, sums, full, empty, index, phase, end - first, consumer, product)
            steps = steps_of(first, end)
            if tile + stride < product.tiles:  # the other's tile stands between
                other, _, _ = locate(tile + stride, product)
                steps += steps_of(starts[other], starts[other + 1])
            index, phase = skip(index, phase, steps, stages)
            boxes = cute.local_tile(out, (product.rows, CHUNK), (top, None, expert))
            source, target = cpasync.tma_partition(
                out_atom, 0, cute.make_layout(1), cute.group_modes(buffer, 0, 2), cute.group_modes(boxes, 0, 2)
            )
            for chunk in cutlass.range_constexpr(product.columns // CHUNK):
                if warp_index % 4 == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)
                round_chunk(sums, buffer, chunk, product)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)
                column = left * (product.columns // CHUNK) + chunk  # of chunks; those beyond the last have no box
                if (warp_index % 4 == 0) & (column * CHUNK < product.width):
                    cute.copy(out_atom, source, target[None, column])
                    cute.arch.cp_async_bulk_commit_group()
            tile += 2 * stride
        if warp_index % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def reduction_host(
    a: cute.Tensor,
    b: cute.Tensor,
    offsets: cute.Tensor,
    out: cute.Tensor,
    blocks: Int32,
    product: cutlass.Constexpr,
    stream: Any,
):
    height, width, dtype = product.height, product.width, a.element_type
    columns = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
    a_layout = cute.tile_to_shape(columns, (product.rows, STEP, product.stages), order=(1, 0, 2))
    b_layout = cute.tile_to_shape(columns, (product.columns, STEP, product.stages), order=(1, 0, 2))
    lines = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    out_layout = cute.tile_to_shape(lines, (product.rows, CHUNK, 2), order=(0, 1, 2))
    fetch = cpasync.CopyBulkTensorTileG2SOp()
    a_columns = cute.make_tensor(a.iterator, cute.make_layout((height, a.shape[0]), stride=(1, height)))
    b_columns = cute.make_tensor(b.iterator, cute.make_layout((width, b.shape[0]), stride=(1, width)))
    results = cute.make_tensor(
        out.iterator, cute.make_layout((height, width, product.experts), stride=(width, 1, height * width))
    )
    a_atom, a_map = cpasync.make_tiled_tma_atom(fetch, a_columns, a_layout, (product.rows, STEP))
    b_atom, b_map = cpasync.make_tiled_tma_atom(fetch, b_columns, b_layout, (product.columns, STEP))
    one_buffer = cute.select(out_layout, mode=[0, 1])
    out_atom, out_map = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), results, one_buffer, (product.rows, CHUNK)
    )
    reduction_kernel(
        a_atom, a_map, b_atom, b_map, out_atom, out_map, offsets, a_layout, b_layout, out_layout, dtype, product
    ).launch(
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


@cached
def compile_for(arch: str, dtype: str, product: Reduction, keep: bool = False) -> Any:
    """Compile one product for one architecture (no GPU needed).

    The result is called with a (R, M), b (R, N), offsets (E + 1,) int32, out (E, M, N), and the number of thread blocks.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    out = cute.runtime.make_fake_compact_tensor(
        element, (product.experts, product.height, product.width), stride_order=(2, 1, 0), assumed_align=16
    )
    arguments = [
        fake_tensor(element, rows, product.height),
        fake_tensor(element, rows, product.width),
        fake_tensor(Int32, product.experts + 1),
        out,
        Int32(1),
        product,
    ]
    return compile_kernel(reduction_host, arguments, arch, keep, only="sm_90a")
