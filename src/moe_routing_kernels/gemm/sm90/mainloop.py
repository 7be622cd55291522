"""The main loop of 16-bit operands: a warpgroup multiplies a tile's weights and tokens, stage by stage (wgmma, both from shared memory).

A tile has a variant for each N that its tokens may need, a separate loop with its own MMA, as N is part of the instruction. All variants
accumulate in the same registers, so one epilogue serves them.

Invariants:
- A stage is released after the `wgmma.wait_group` that covers its reads.
- Ping-pong, a warpgroup waits for its turn before its first MMA and hands it on after its last.
- With a lag, the first of two warpgroups that share a tile lets the second begin after `lag` stages: one is in its epilogue while the
  other finishes the tile or begins the next. It cannot do so twice before the second has begun, as the ring is shorter than a tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from moe_routing_kernels.gemm.sm90.schedule import MAINLOOP, advance, release
from moe_routing_kernels.gemm.sm90.tile import MMA_M, TILE_K, WARPGROUP, GroupedGemm


def accumulator(gemm: GroupedGemm) -> cute.Tensor:
    """A warpgroup's accumulators in float32, with room for the tile's widest variant: (2 tokens, 2 rows 8 apart, tokens / 8, m_atoms)."""
    return cute.make_rmem_tensor((2, 2, gemm.tile.tokens // 8, gemm.tile.m_atoms), Float32)


def accumulator_of(acc: cute.Tensor, tokens: int, gemm: GroupedGemm) -> cute.Tensor:
    """The part of the accumulators that the variant of `tokens` tokens has, as its MMA takes it."""
    stride = ((1, 2, 4), MMA_M * gemm.tile.tokens // WARPGROUP, 0)
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, tokens // 8), gemm.tile.m_atoms, 1), stride=stride))


@cute.jit
def begin_turn(consumer: Int32, gemm: cutlass.Constexpr):
    """By a consumer warpgroup: ping-pong, wait for the tensor cores; the second of two that share a tile, for the first's lead."""
    if cutlass.const_expr(gemm.tile.pingpong):
        cute.arch.barrier(barrier_id=MAINLOOP + consumer, number_of_threads=2 * WARPGROUP)
    if cutlass.const_expr(gemm.tile.lag):
        if consumer == 1:
            cute.arch.barrier(barrier_id=MAINLOOP, number_of_threads=2 * WARPGROUP)


@cute.jit
def end_turn(consumer: Int32, gemm: cutlass.Constexpr):
    """By a consumer warpgroup: ping-pong, hand the tensor cores to the other."""
    if cutlass.const_expr(gemm.tile.pingpong):
        cute.arch.barrier_arrive(barrier_id=MAINLOOP + 1 - consumer, number_of_threads=2 * WARPGROUP)


@cute.jit
def lead(consumer: Int32, k: Int32, gemm: cutlass.Constexpr):
    """By a consumer warpgroup that has issued the MMAs of stage k: the first lets the second begin once it has its lead."""
    if cutlass.const_expr(gemm.tile.lag):
        if (consumer == 0) & (k == gemm.tile.lag - 1):
            cute.arch.barrier_arrive(barrier_id=MAINLOOP, number_of_threads=2 * WARPGROUP)


@cute.jit
def mainloop(
    tokens: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    acc: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    consumer: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup: add the product of its weights and of the first `tokens` tokens of a tile to acc, from stage `index` on."""
    tile, stages = cutlass.const_expr(gemm.tile), cutlass.const_expr(gemm.stages)
    major, shared = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource.SMEM
    of_weights = major.MN if cutlass.const_expr(gemm.transposed) else major.K
    op = warpgroup.MmaF16BF16Op(x_stages.element_type, Float32, (MMA_M, tokens, 16), shared, of_weights, major.K)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    thread_mma = mma.get_slice(0)
    a = mma.make_fragment_A(thread_mma.partition_A(w_stages))
    b = mma.make_fragment_B(thread_mma.partition_B(cute.local_tile(x_stages, (tokens, TILE_K, stages), (0, 0, 0))))
    results = accumulator_of(acc, tokens, gemm)
    begin_turn(consumer, gemm)
    warpgroup.fence()
    previous = index
    for k in cutlass.range(gemm.k_tiles, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        if cutlass.const_expr(gemm.top_k):
            cute.arch.fence_view_async_shared()
        for n in cutlass.range_constexpr(TILE_K // 16):
            cute.gemm(mma, results, a[None, None, n, index], b[None, None, n, index], results)
        warpgroup.commit_group()
        lead(consumer, k, gemm)
        if k > 0:
            warpgroup.wait_group(1)
            release(empty + previous, tile.cluster)
        previous = index
        index, phase = advance(index, phase, stages)
    end_turn(consumer, gemm)
    warpgroup.wait_group(0)
    release(empty + previous, tile.cluster)


@cute.jit
def dispatch(loop: cutlass.Constexpr, n: Int32, n_sizes: cutlass.Constexpr, arguments: tuple):
    """`loop(tokens, *arguments)` in the variant of `n` tokens, which is one of `n_sizes`: found by halving them."""
    if cutlass.const_expr(len(n_sizes) == 1):
        loop(n_sizes[0], *arguments)
    else:
        half = cutlass.const_expr(len(n_sizes) // 2)
        if n < n_sizes[half]:
            dispatch(loop, n, n_sizes[:half], arguments)
        else:
            dispatch(loop, n, n_sizes[half:], arguments)
