"""Step 3: a ring of stages between a producer and a consumer. Run it: `python docs/kernels/step_3_pipeline.py`.

One warp does nothing but load (the producer), and runs ahead as far as there are stages. The consumer warpgroup multiplies a stage while the
next ones arrive, and keeps one group of MMAs in flight. Each stage has two mbarriers: `full` completes when its bytes have arrived, `empty`
when the consumer's four warps have read it. Both sides walk the ring in the same order, with a phase that flips at its end.

The gain over step 2 is small, as several blocks on an SM hid most of the latency there. But a ring needs no other blocks: step 4 can spend
the whole SM on one large tile.

New: warp specialisation, `full` and `empty`, index and phase, `wait_group(1)`.
"""

import cutlass
import cutlass.cute as cute
from common import EXPERTS, INNER, ROWS, compiled, run
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from step_2_tensor_cores import M_TILES, K, M, N, load, locate, multiply, store, tensor_maps

STAGES = 3  # of 32 KB: two blocks share a multiprocessor


@cute.jit
def advance(index: Int32, phase: Int32):
    """The next stage of the ring, and its phase."""
    last = index == STAGES - 1
    return cutlass.select_(last, Int32(0), index + 1), cutlass.select_(last, phase ^ 1, phase)


@cute.jit
def release(empty: cute.Pointer):
    """By a consumer warp: a stage has been read."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(empty)


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
    """A block: one tile. Warps 0 to 3 multiply, warp 4 loads."""
    allocator = cutlass.memory.SmemAllocator()
    w_stages = allocator.allocate_tensor(BFloat16, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner)
    x_stages = allocator.allocate_tensor(BFloat16, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    full = allocator.allocate_tensor(Int64, cute.make_layout(STAGES), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(STAGES), byte_alignment=8).iterator
    if cute.arch.thread_idx()[0] == 0:
        for i in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, 4)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    block = cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
    expert, row, end = locate(block // M_TILES, offsets)
    m_tile = block % M_TILES
    if row < end:
        if warp == 4:
            # producer: its first round waits for the phase before the first, which passes
            index, phase = Int32(0), Int32(1)
            for k in cutlass.range(INNER // K, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                w_box = cute.local_tile(w[None, None, expert], (M, K), (m_tile, k))
                x_box = cute.local_tile(cute.domain_offset((row, 0), x), (N, K), (0, k))
                load(w_atom, w_box, w_stages, x_atom, x_box, x_stages, index, full + index)
                index, phase = advance(index, phase)
        else:
            # consumer
            acc = cute.make_rmem_tensor((2, 2, N // 8, M // 64), Float32)
            acc.fill(0.0)
            index, phase = Int32(0), Int32(0)
            previous = index
            warpgroup.fence()
            for k in cutlass.range(INNER // K, unroll=1):
                cute.arch.mbarrier_wait(full + index, phase)
                multiply(acc, w_stages, x_stages, index)
                if k > 0:
                    warpgroup.wait_group(1)  # the MMAs of the stage before are over
                    release(empty + previous)
                previous = index
                index, phase = advance(index, phase)
            warpgroup.wait_group(0)
            store(acc, out, row, end, m_tile * M)


@cute.jit
def host(x: cute.Tensor, offsets: cute.Tensor, w: cute.Tensor, out: cute.Tensor, blocks: Int32, stream):
    """Make the tensor maps and launch `blocks` blocks."""
    maps, layouts = tensor_maps(w, x, STAGES)
    kernel(*maps, offsets, out, *layouts).launch(grid=(blocks, 1, 1), block=(160, 1, 1), stream=stream)


if __name__ == "__main__":
    run("3 pipeline", compiled(host), (ROWS // N + EXPERTS) * M_TILES)
