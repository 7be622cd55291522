"""Step 2: tiles, TMA and tensor cores. Run it: `python docs/kernels/step_2_tensor_cores.py`.

A block of one warpgroup computes a tile: 128 rows of weights (M) times 128 tokens (N). The operands are swapped, as N of wgmma has steps of
8 and M has steps of 64, and an expert's tokens are the smaller and odd number. For each 64 of K one thread has TMA copy a box of weights and
a box of token rows to shared memory; an mbarrier says when they are there. Then the warpgroup multiplies, and only then the next copy begins.
Within a block the tensor cores wait for memory, and memory for them; three blocks share an SM and fill each other's gaps.

New: tile coordinates found from `offsets` on the device, `make_tiled_tma_atom`, mbarriers, wgmma and its accumulator layout.
"""

import cutlass
import cutlass.cute as cute
from common import COLUMNS, EXPERTS, INNER, ROWS, compiled, run
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

M, N, K = 128, 128, 64  # rows of weights, tokens and elements of K of a tile
M_TILES = COLUMNS // M
BYTES = (M + N) * K * 2  # of a stage


def stages_of(rows: int, stages: int) -> cute.ComposedLayout:
    """(rows, K, stages) in shared memory, swizzled as TMA writes it and wgmma reads it."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, K, stages), order=(0, 1, 2))


@cute.jit
def locate(tile: Int32, offsets: cute.Tensor):
    """The expert, first row and end of a tile of N tokens; none has a tile beyond the last."""
    expert, row, end, before = Int32(0), Int32(0), Int32(0), Int32(0)
    for e in cutlass.range(EXPERTS, unroll=1):
        start, stop = offsets[e], offsets[e + 1]
        count = (stop - start + N - 1) // N
        if (before <= tile) & (tile < before + count):
            expert, row, end = Int32(e), start + (tile - before) * N, stop
        before += count
    return expert, row, end


def multiply(acc: cute.Tensor, w_stages: cute.Tensor, x_stages: cute.Tensor, index: Int32) -> None:
    """Issue the MMAs of a stage: acc (2 tokens, 2 rows 8 apart, N / 8, M / 64) += w (M, K) x (N, K)."""
    k_major, shared = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, N, 16), shared, k_major, k_major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    thread_mma = mma.get_slice(0)
    a = mma.make_fragment_A(thread_mma.partition_A(w_stages))
    b = mma.make_fragment_B(thread_mma.partition_B(x_stages))
    layout = cute.make_layout(((2, 2, N // 8), M // 64, 1), stride=((1, 2, 4), N // 2, 0))
    results = cute.make_tensor(acc.iterator, layout)
    for n in range(K // 16):
        cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
    warpgroup.commit_group()


@cute.jit
def load(
    w_atom: cute.CopyAtom,
    w_boxes: cute.Tensor,
    w_stages: cute.Tensor,
    x_atom: cute.CopyAtom,
    x_boxes: cute.Tensor,
    x_stages: cute.Tensor,
    index: Int32,
    full: cute.Pointer,
):
    """By one warp: tell `full` how many bytes come, and have TMA copy a box of each operand to a stage."""
    w_to, w_from = cpasync.tma_partition(
        w_atom, 0, cute.make_layout(1), cute.group_modes(w_stages, 0, 2), cute.group_modes(w_boxes, 0, 2)
    )
    x_to, x_from = cpasync.tma_partition(
        x_atom, 0, cute.make_layout(1), cute.group_modes(x_stages, 0, 2), cute.group_modes(x_boxes, 0, 2)
    )
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, BYTES)
    cute.copy(w_atom, w_from, w_to[None, index], tma_bar_ptr=full)
    cute.copy(x_atom, x_from, x_to[None, index], tma_bar_ptr=full)


@cute.jit
def store(acc: cute.Tensor, out: cute.Tensor, row: Int32, end: Int32, column: Int32):
    """Write the accumulators of a tile: a thread has two neighbouring tokens, in rows of weights 8 apart, of each 8 tokens."""
    warp, lane = cute.arch.thread_idx()[0] % 128 // 32, cute.arch.lane_idx()
    for m_atom in cutlass.range_constexpr(M // 64):
        for n in cutlass.range_constexpr(N // 8):
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    token = row + n * 8 + lane % 4 * 2 + i
                    if token < end:
                        place = column + m_atom * 64 + warp * 16 + half * 8 + lane // 4
                        out[token, place] = acc[i, half, n, m_atom].to(BFloat16)


@cute.kernel
def kernel(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    offsets: cute.Tensor,
    out: cute.Tensor,
    w_layout: cute.ComposedLayout,
    x_layout: cute.ComposedLayout,
):
    """A block: one tile. Blocks of neighbouring numbers share token rows."""
    allocator = cutlass.memory.SmemAllocator()
    w_stages = allocator.allocate_tensor(BFloat16, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner)
    x_stages = allocator.allocate_tensor(BFloat16, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    full = allocator.allocate_tensor(Int64, cute.make_layout(1), byte_alignment=8).iterator
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    block = cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
    expert, row, end = locate(block // M_TILES, offsets)
    m_tile = block % M_TILES
    if row < end:
        acc = cute.make_rmem_tensor((2, 2, N // 8, M // 64), Float32)
        acc.fill(0.0)
        phase = Int32(0)
        for k in cutlass.range(INNER // K, unroll=1):
            if warp == 0:
                w_box = cute.local_tile(w[None, None, expert], (M, K), (m_tile, k))
                x_box = cute.local_tile(cute.domain_offset((row, 0), x), (N, K), (0, k))
                load(w_atom, w_box, w_stages, x_atom, x_box, x_stages, Int32(0), full)
            cute.arch.mbarrier_wait(full, phase)
            warpgroup.fence()
            multiply(acc, w_stages, x_stages, Int32(0))
            warpgroup.wait_group(0)
            cute.arch.sync_threads()  # all have read the stage
            phase ^= 1
        store(acc, out, row, end, m_tile * M)


def tensor_maps(w: cute.Tensor, x: cute.Tensor, stages: int) -> tuple[tuple, tuple]:
    """The copies and tensor maps of boxes of weights and of token rows, and the layouts of their stages."""
    layouts = stages_of(M, stages), stages_of(N, stages)
    columns_k_experts = cute.make_layout((COLUMNS, INNER, EXPERTS), stride=(INNER, 1, COLUMNS * INNER))
    weights, copy = cute.make_tensor(w.iterator, columns_k_experts), cpasync.CopyBulkTensorTileG2SOp()
    of_weights = cpasync.make_tiled_tma_atom(copy, weights, layouts[0], (M, K))
    return (*of_weights, *cpasync.make_tiled_tma_atom(copy, x, layouts[1], (N, K))), layouts


@cute.jit
def host(x: cute.Tensor, offsets: cute.Tensor, w: cute.Tensor, out: cute.Tensor, blocks: Int32, stream):
    """Make the tensor maps and launch `blocks` blocks."""
    maps, layouts = tensor_maps(w, x, stages=1)
    kernel(*maps, offsets, out, *layouts).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)


if __name__ == "__main__":
    run("2 tensor cores", compiled(host), (ROWS // N + EXPERTS) * M_TILES)
