"""wgrad, gradients of the experts' weights: grouped GEMMs that reduce over the rows of each expert, of which there are differently many.

out[e] = a[rows of e]^T b[rows of e], for a (R, M), b (R, N) and out (E, M, N): the sum runs over packed rows, which both operands
have as their slow dimension in memory, so both stand in shared memory as they do there (MN-major), 64 elements of a row side by side.

Strategy: one persistent thread block per multiprocessor. A warp loads 64 rows of both operands at a time by TMA through a ring of
stages; two warpgroups take tiles of the result in turn (ping-pong): one multiplies while the other rounds its accumulators and
hands them to TMA, 64 columns at a time. Each expert writes its whole M x N, however few rows it has: with 256 rows the stores
take half as long as the MMAs, so they must overlap. Tiles of an expert follow each other, those of the shorter side first, as
its rows then stay in the L2 cache.

An expert's rows are rarely a multiple of 64. The last stage takes as many MMAs of 16 rows as it needs; the rest of the last 16 is set to zero
in both operands, as they may be another expert's rows, or of no expert, and hold NaN. Meanwhile the stage before is multiplied.

FLOPs: 2 R M N. Floor: those at the rate of a large GEMM, or 2 E M N bytes of 16-bit results and 2 R (M + N) of rows at that of a
stream, whichever takes longer.

Invariants:
- Zeros are written by threads, and read by the tensor cores through the asynchronous proxy: each thread fences, then all meet at a
  barrier, then the warpgroup multiplies.
- A buffer is written again only after TMA has read it: the warp that stored waits for that, and then all meet.
- A stage is filled again only after each warp that multiplies it has arrived at `empty`, after the `wgmma.wait_group` that covers it.
- A warpgroup waits for a stage in its turn only, when the other has seen all earlier ones, as a parity tells a phase from the next only.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.gemm.sm90 import ARCH
from moe_routing_kernels.gemm.sm90.schedule import (
    EPILOGUE,
    MAINLOOP,
    advance,
    allocate_barriers,
    init_barriers,
    release,
    skip,
)
from moe_routing_kernels.gemm.sm90.tile import MMA_M, REGISTERS, TILE_K, VECTOR, WARPGROUP
from moe_routing_kernels.gemm.sm90.wgrad_tile import EPI_COLUMNS, THREADS, WgradGemm, k_tiles_of, locate


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
    gemm: cutlass.Constexpr,
):
    """By one warp: load the rows of a (M, R) and b (N, R) that the block's tiles need."""
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    index, phase = Int32(0), Int32(1)
    while tile < gemm.tiles:
        expert, top, left = locate(tile, gemm)
        row, end = starts[expert], starts[expert + 1]
        while row < end:
            cute.arch.mbarrier_wait(empty + index, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + index, gemm.stage_bytes)
            a_box = cute.local_tile(cute.domain_offset((0, row), a), (gemm.rows, TILE_K), (top, 0))
            target, source = cpasync.tma_partition(
                a_atom, 0, cute.make_layout(1), cute.group_modes(a_stages, 0, 2), cute.group_modes(a_box, 0, 2)
            )
            cute.copy(a_atom, source, target[None, index], tma_bar_ptr=full + index)
            b_box = cute.local_tile(cute.domain_offset((0, row), b), (gemm.columns, TILE_K), (left, 0))
            target, source = cpasync.tma_partition(
                b_atom, 0, cute.make_layout(1), cute.group_modes(b_stages, 0, 2), cute.group_modes(b_box, 0, 2)
            )
            cute.copy(b_atom, source, target[None, index], tma_bar_ptr=full + index)
            index, phase = advance(index, phase, gemm.stages)
            row += TILE_K
        tile += stride


@cute.jit
def clear(stages: cute.Tensor, size: cutlass.Constexpr, index: Int32, first: Int32, end: Int32):
    """By a warpgroup: set rows `first` to `end` of a stage, which are fewer than 16, to zero in all `size` columns."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    row, vector = first + thread // VECTOR, thread % VECTOR
    base = cute.recast_ptr(stages.iterator) + cute.assume(
        index * (size * TILE_K) + row * TILE_K + vector * VECTOR, divby=VECTOR
    )
    zero = cute.make_rmem_tensor((VECTOR,), stages.element_type)
    zero.fill(0.0)
    if row < end:
        for block in cutlass.range_constexpr(size // TILE_K):
            cute.autovec_copy(zero, cute.make_tensor(base + block * TILE_K * TILE_K, cute.make_layout(VECTOR)))


@cute.jit
def mainloop(
    a_stages: cute.Tensor,
    b_stages: cute.Tensor,
    acc: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    count: Int32,
    consumer: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup, in its turn: add the gemm of `count` rows to acc, from stage `index` on."""
    dtype = a_stages.element_type
    major, shared = cute.nvgpu.OperandMajorMode.MN, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (MMA_M, gemm.columns, 16), shared, major, major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    thread_mma = mma.get_slice(0)
    a = mma.make_fragment_A(thread_mma.partition_A(a_stages))
    b = mma.make_fragment_B(thread_mma.partition_B(b_stages))
    layout = cute.make_layout(
        ((2, 2, gemm.columns // 8), gemm.m_atoms, 1), stride=((1, 2, 4), MMA_M * gemm.columns // WARPGROUP, 0)
    )
    results = cute.make_tensor(acc.iterator, layout)
    cute.arch.barrier(barrier_id=MAINLOOP + consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.fence()
    previous = index
    for k in cutlass.range(count // TILE_K, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        for n in cutlass.range_constexpr(TILE_K // 16):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
        if k > 0:
            warpgroup.wait_group(1)
            release(empty + previous)
        previous = index
        index, phase = advance(index, phase, gemm.stages)
    over = count % TILE_K
    if over > 0:  # the step before is still multiplied meanwhile
        cute.arch.mbarrier_wait(full + index, phase)
        sixteens = (over + 15) // 16
        clear(a_stages, gemm.rows, index, over, 16 * sixteens)
        clear(b_stages, gemm.columns, index, over, 16 * sixteens)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
        for n in cutlass.range(sixteens, unroll=1):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
    cute.arch.barrier_arrive(barrier_id=MAINLOOP + 1 - consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.wait_group(0)
    if count >= TILE_K:
        release(empty + previous)
    if over > 0:
        release(empty + index)


@cute.jit
def round_subtile(acc: cute.Tensor, buffer: cute.Tensor, subtile: cutlass.Constexpr, gemm: cutlass.Constexpr):
    """By a warpgroup: write 64 columns of its accumulators, (2, 2 rows 8 apart, columns / 8, m_atoms), to `buffer`, swizzled as TMA reads it."""
    dtype = buffer.element_type
    lane, warp_of_group = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    row = warp_of_group * 16 + lane // 8 % 2 * 8 + lane % 8  # lanes 8 q to 8 q + 7 give the addresses of the q-th block
    for m_atom in cutlass.range_constexpr(gemm.m_atoms):
        for pair in cutlass.range_constexpr(EPI_COLUMNS // 16):
            rounded = cute.make_rmem_tensor((2, 2, 2), dtype)
            for n in cutlass.range_constexpr(2):
                rounded[None, None, n].store(acc[None, None, subtile * 8 + pair * 2 + n, m_atom].load().to(dtype))
            vector = (pair * 2 + lane // 16) ^ (lane % 8)
            offset = (row + m_atom * MMA_M) * EPI_COLUMNS + vector * VECTOR
            target = cute.recast_ptr(buffer.iterator) + cute.assume(offset, divby=VECTOR)
            flat = cute.make_tensor(rounded.iterator, cute.make_layout(8))
            cute.copy(atom, flat, cute.make_tensor(target, flat.layout))


class WgradGemmKernel:
    """The kernel of a `WgradGemm`: its schedule, its operands and its epilogue are not those of `grouped_gemm`, its pipeline is."""

    def __init__(self, gemm: WgradGemm) -> None:
        """Keep the configuration, on which alone the kernel depends, with its operands' dtype."""
        self.gemm = gemm

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offsets: cute.Tensor,
        out: cute.Tensor,
        blocks: Int32,
        stream: Any,
    ):
        """Launch it: a (R, M), b (R, N), offsets (E + 1,) -> out (E, M, N)."""
        gemm, height, width, dtype = self.gemm, self.gemm.height, self.gemm.width, a.element_type
        kinds = warpgroup.SmemLayoutAtomKind
        mn_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, dtype)
        a_layout = cute.tile_to_shape(mn_major, (gemm.rows, TILE_K, gemm.stages), order=(1, 0, 2))
        b_layout = cute.tile_to_shape(mn_major, (gemm.columns, TILE_K, gemm.stages), order=(1, 0, 2))
        k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, dtype)
        out_layout = cute.tile_to_shape(k_major, (gemm.rows, EPI_COLUMNS, 2), order=(0, 1, 2))
        a_columns = cute.make_tensor(a.iterator, cute.make_layout((height, a.shape[0]), stride=(1, height)))
        b_columns = cute.make_tensor(b.iterator, cute.make_layout((width, b.shape[0]), stride=(1, width)))
        shape, stride = (height, width, gemm.experts), (width, 1, height * width)
        results = cute.make_tensor(out.iterator, cute.make_layout(shape, stride=stride))
        load, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        a_atom, a_map = cpasync.make_tiled_tma_atom(load, a_columns, a_layout, (gemm.rows, TILE_K))
        b_atom, b_map = cpasync.make_tiled_tma_atom(load, b_columns, b_layout, (gemm.columns, TILE_K))
        buffer = cute.select(out_layout, mode=[0, 1])
        out_atom, out_map = cpasync.make_tiled_tma_atom(write, results, buffer, (gemm.rows, EPI_COLUMNS))
        tensors = (a_atom, a_map, b_atom, b_map, out_atom, out_map, offsets)
        self.kernel(*tensors, a_layout, b_layout, out_layout, dtype).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
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
    ):
        """A thread block: tiles blockIdx, blockIdx + gridDim, ... Warpgroup 0 loads, the others take tiles in turn."""
        gemm, stages = cutlass.const_expr(self.gemm), cutlass.const_expr(self.gemm.stages)
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        allocator = cutlass.memory.SmemAllocator()
        a_stages = allocator.allocate_tensor(dtype, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        b_stages = allocator.allocate_tensor(dtype, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        buffers = allocator.allocate_tensor(dtype, out_layout.outer, byte_alignment=1024, swizzle=out_layout.inner)
        full, empty = allocate_barriers(allocator, stages)
        starts = allocator.allocate_tensor(Int32, cute.make_layout(gemm.experts + 1), byte_alignment=4)

        # prologue
        for i in cutlass.range_constexpr(math.ceil((gemm.experts + 1) / THREADS)):
            if thread + i * THREADS <= gemm.experts:
                starts[thread + i * THREADS] = offsets[thread + i * THREADS]
        if thread == 0:
            init_barriers(full, empty, stages, 1, 4)
        cute.arch.sync_threads()
        tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_index == 0:
                load(a_atom, a, a_stages, b_atom, b, b_stages, full, empty, starts, gemm)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            consumer = group - 1
            acc = cute.make_rmem_tensor((2, 2, gemm.columns // 8, gemm.m_atoms), Float32)
            buffer = buffers[None, None, consumer]
            index, phase = Int32(0), Int32(0)
            if consumer == 1:
                if tile < gemm.tiles:
                    other, _, _ = locate(tile, gemm)
                    count = k_tiles_of(starts[other], starts[other + 1])
                    index, phase = skip(index, phase, count, stages)
                tile += stride
                cute.arch.barrier_arrive(barrier_id=MAINLOOP, number_of_threads=2 * WARPGROUP)  # the other begins
            while tile < gemm.tiles:
                expert, top, left = locate(tile, gemm)
                first, end = starts[expert], starts[expert + 1]
                acc.fill(0.0)
                # main loop
                mainloop(a_stages, b_stages, acc, full, empty, index, phase, end - first, consumer, gemm)
                count = k_tiles_of(first, end)
                if tile + stride < gemm.tiles:  # the other's tile stands between
                    other, _, _ = locate(tile + stride, gemm)
                    count += k_tiles_of(starts[other], starts[other + 1])
                index, phase = skip(index, phase, count, stages)
                # epilogue
                boxes = cute.local_tile(out, (gemm.rows, EPI_COLUMNS), (top, None, expert))
                source, target = cpasync.tma_partition(
                    out_atom, 0, cute.make_layout(1), cute.group_modes(buffer, 0, 2), cute.group_modes(boxes, 0, 2)
                )
                for subtile in cutlass.range_constexpr(gemm.columns // EPI_COLUMNS):
                    if warp_index % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                    round_subtile(acc, buffer, subtile, gemm)
                    cute.arch.fence_view_async_shared()
                    cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                    box = left * (gemm.columns // EPI_COLUMNS) + subtile  # those beyond the last column do not exist
                    if (warp_index % 4 == 0) & (box * EPI_COLUMNS < gemm.width):
                        cute.copy(out_atom, source, target[None, box])
                        cute.arch.cp_async_bulk_commit_group()
                tile += 2 * stride
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0)


@cached
def compile_for(arch: str, dtype: str, gemm: WgradGemm, keep: bool = False) -> Any:
    """Compile one GEMM for one architecture (no GPU needed).

    The result is called with a (R, M), b (R, N), offsets (E + 1,) int32, out (E, M, N), and the number of thread blocks.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    arguments = [
        fake_tensor(element, rows, gemm.height),
        fake_tensor(element, rows, gemm.width),
        fake_tensor(Int32, gemm.experts + 1),
        fake_tensor(element, gemm.experts, gemm.height, gemm.width),
        Int32(1),
    ]
    return compile_kernel(WgradGemmKernel(gemm), arguments, arch, keep, only=ARCH)
