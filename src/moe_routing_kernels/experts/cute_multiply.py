"""The main loop of `cute_swapped`: a warpgroup multiplies a tile's weights and tokens, step by step through the ring of stages.

A tile has a form for each width that its tokens may need, a loop of its own with its own matrix instructions, as their width is
part of the instruction. All forms sum in the same registers; the epilogue knows one layout only.

Invariants:
- A stage is released after the `wgmma.wait_group` that covers its reads.
- Ping-pong, a warpgroup waits for its turn before its first instruction and hands it on after its last.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from moe_routing_kernels.experts.cute_tiles import SLAB, STEP, WARPGROUP, advance

TURN = 3  # named barriers from it on: one per warpgroup of a ping-pong; 1 and 2 are those of their stores


@cute.jit
def release(empty: cute.Pointer, cluster: cutlass.Constexpr = 1):
    """Say that the calling warp has read a stage, to each block of the cluster, as all of them fill it."""
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(cluster > 1):
        if lane < cluster:
            cute.arch.mbarrier_arrive(empty, lane)
    elif lane == 0:
        cute.arch.mbarrier_arrive(empty)


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
    """By a warpgroup: add the product of a tile's weights and of its first `tokens` tokens to sums, from stage `index` on.

    Sums have room for the tile's widest form: (2 tokens, 2 rows 8 apart, tokens / 8, slabs).
    """
    tile, stages = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages)
    k_major, shared = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(x_stages.element_type, Float32, (SLAB, tokens, 16), shared, k_major, k_major)
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
        if cutlass.const_expr(product.top_k):
            cute.arch.fence_view_async_shared()
        for n in cutlass.range_constexpr(STEP // 16):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
        if k > 0:
            warpgroup.wait_group(1)
            release(empty + previous, tile.cluster)
        previous = index
        index, phase = advance(index, phase, stages)
    if cutlass.const_expr(tile.pingpong):
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.wait_group(0)
    release(empty + previous, tile.cluster)


@cute.jit
def in_form(multiply: cutlass.Constexpr, width: Int32, widths: cutlass.Constexpr, shared: tuple):
    """`multiply(tokens, *shared)` in the form of `width` tokens, which is one of `widths`: found by halving them."""
    if cutlass.const_expr(len(widths) == 1):
        multiply(widths[0], *shared)
    else:
        half = cutlass.const_expr(len(widths) // 2)
        if width < widths[half]:
            in_form(multiply, width, widths[:half], shared)
        else:
            in_form(multiply, width, widths[half:], shared)
