"""Step 4: persistent blocks, two consumer warpgroups, coalesced stores. Run it: `python docs/kernels/step_4_persistent.py`.

One block per multiprocessor takes tile after tile, so the producer loads the next tile while the consumers store this one, and barriers
are set up once. The tile grows to 256 rows of weights times 128 tokens, two warpgroups of 128 rows each: of every byte loaded the tensor cores
make more FLOPs. A thread's accumulators lie across rows of the result; `stmatrix` transposes them in shared memory, and each thread then
writes 16 bytes. Tiles are counted once per block (`gemm.sm90.schedule`) instead of being searched.

New: `schedule.count_tiles` and `locate`, `setmaxregister`, the epilogue of `gemm.sm90.epilogue`. From here on the parts are the library's.
"""

import cutlass
import cutlass.cute as cute
from common import COLUMNS, EXPERTS, INNER, compiled, run
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.gemm.sm90 import epilogue
from moe_routing_kernels.gemm.sm90.grouped_gemm import k_major_stages, weight_layout
from moe_routing_kernels.gemm.sm90.loads import load_packed, load_weights, weight_boxes
from moe_routing_kernels.gemm.sm90.mainloop import accumulator, mainloop
from moe_routing_kernels.gemm.sm90.schedule import (
    EPILOGUE,
    allocate_barriers,
    begin_at,
    count_tiles,
    init_barriers,
    locate,
    skip,
)
from moe_routing_kernels.gemm.sm90.tile import MMA_M, TILE_K, WARPGROUP, GroupedGemm, Tile

GEMM = GroupedGemm(COLUMNS, INNER, EXPERTS, activation="", tile=Tile(m_atoms=2, warpgroups=2, tokens=128))


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
    """A block: tiles blockIdx, blockIdx + gridDim, ... Warpgroup 0 loads, 1 and 2 multiply and store."""
    thread, tokens = cute.arch.thread_idx()[0], GEMM.tile.tokens
    warp, group = (cute.arch.make_warp_uniform(thread // size) for size in (32, WARPGROUP))
    allocator = cutlass.memory.SmemAllocator()
    w_stages = allocator.allocate_tensor(BFloat16, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner)
    x_stages = allocator.allocate_tensor(BFloat16, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    subtile = cute.make_layout((GEMM.epi_tokens * GEMM.epi_pitch, 2))
    buffers = allocator.allocate_tensor(BFloat16, subtile, byte_alignment=128)
    full, empty = allocate_barriers(allocator, GEMM.stages)
    starts, first_tiles = (
        allocator.allocate_tensor(Int32, cute.make_layout(EXPERTS + 1), byte_alignment=4) for _ in range(2)
    )
    if warp == 0:
        count_tiles(offsets, starts, first_tiles, GEMM)
    if thread == 32:
        init_barriers(full, empty, GEMM.stages, 1, 8)  # eight consumer warps read a stage
    cute.arch.sync_threads()
    tiles = first_tiles[EXPERTS] * GEMM.m_tiles
    tile, stride = begin_at(GEMM)
    if group == 0:
        cute.arch.setmaxregister_decrease(GEMM.registers[0])
        if warp == 0:
            weights = weight_boxes(w_atom, w, w_stages, GEMM)
            load_packed(load_weights, weights, x_atom, x, x_stages, full, empty, starts, first_tiles, tiles, GEMM)
    else:
        cute.arch.setmaxregister_increase(GEMM.registers[1])
        consumer = group - 1
        w_half = cute.local_tile(w_stages, (2 * MMA_M, TILE_K, GEMM.stages), (consumer, 0, 0))
        acc = accumulator(GEMM)
        index, phase = Int32(0), Int32(0)
        while tile < tiles:
            _, row, end, m_tile = locate(tile, starts, first_tiles, GEMM)
            column = (2 * m_tile + consumer) * GEMM.width
            acc.fill(0.0)
            mainloop(tokens, w_half, x_stages, acc, full, empty, index, phase, consumer, GEMM)
            index, phase = skip(index, phase, GEMM.k_tiles, GEMM.stages)
            for part in cutlass.range_constexpr(tokens // GEMM.epi_tokens):
                first = row + part * GEMM.epi_tokens
                if first < end:
                    cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                    epilogue.transpose(epilogue.activated(acc, GEMM), buffers[None, consumer], 0, part, GEMM)
                    cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                    epilogue.store(buffers[None, consumer], 0, out, 0, COLUMNS, first, end, column, GEMM)
            tile += stride


@cute.jit
def host(x: cute.Tensor, offsets: cute.Tensor, w: cute.Tensor, out: cute.Tensor, blocks: Int32, stream):
    """Make the tensor maps and launch `blocks` blocks, one per multiprocessor."""
    tile = GEMM.tile
    w_layout, x_layout = (k_major_stages(rows, TILE_K, GEMM.stages, BFloat16) for rows in (tile.m, tile.tokens))
    copy, weights = cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(w.iterator, weight_layout(GEMM))
    w_atom, w_map = cpasync.make_tiled_tma_atom(copy, weights, w_layout, (tile.m, TILE_K))
    x_atom, x_map = cpasync.make_tiled_tma_atom(copy, x, x_layout, (tile.tokens, TILE_K))
    kernel(w_atom, w_map, x_atom, x_map, offsets, out, w_layout, x_layout).launch(
        grid=(blocks, 1, 1), block=(GEMM.threads, 1, 1), min_blocks_per_mp=1, stream=stream
    )


if __name__ == "__main__":
    run("4 persistent", compiled(host), 132)
