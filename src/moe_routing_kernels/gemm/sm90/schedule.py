"""What the warps of a thread block do next: the ring of stages between producer and consumers, named barriers, and the next tile.

A stage has two mbarriers: `full` completes when its data has arrived, `empty` when each consumer warp has read it. Both are waited for by
parity, which tells a phase from the next only. The producer waits for the parity opposite to its phase, so its first round passes.

`cutlass.pipeline` has classes for this. They count arrivals of one kind per barrier, where gathered rows need those of TMA and of
asynchronous copies at the same `full`, and have no way over another warpgroup's stages (`skip`), which ping-pong takes.

A tile is an expert, rows and columns. Every thread block counts the tiles itself: one warp reads the offsets, and each warp finds its tile in the counts by two votes. So
nothing is read on the host, and the grid is as large as any routing can need.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gemm.sm90.tile import GROUP, GroupedGemm, Tile

# Named barriers, by number; 0 is that of `sync_threads`.
EPILOGUE = 1  # from it on: one per consumer warpgroup, around its buffer
MAINLOOP = (
    3  # from it on: one per consumer warpgroup of a ping-pong, whose turn it is; where none takes turns, all consumers'
)
LEAD = MAINLOOP + 1  # where none takes turns: the first of two warpgroups lets the second begin


def allocate_barriers(allocator: Any, stages: int) -> tuple[cute.Pointer, cute.Pointer]:
    """The `full` and the `empty` mbarriers of the stages."""
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    return full, empty


@cute.jit
def init_barriers(
    full: cute.Pointer,
    empty: cute.Pointer,
    stages: cutlass.Constexpr,
    arrivals: cutlass.Constexpr,
    warps: cutlass.Constexpr,
):
    """By one thread: `full` expects `arrivals` per phase, `empty` those of `warps` consumer warps."""
    for i in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full + i, arrivals)
        cute.arch.mbarrier_init(empty + i, warps)
    cute.arch.mbarrier_init_fence()


@cute.jit
def release(empty: cute.Pointer, cluster: cutlass.Constexpr = 1):
    """By a consumer warp: a stage has been read; each block of the cluster is told, as all of them fill it."""
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(cluster > 1):
        if lane < cluster:
            cute.arch.mbarrier_arrive(empty, lane)
    elif lane == 0:
        cute.arch.mbarrier_arrive(empty)


def advance(index: Any, phase: Any, stages: int) -> tuple[Any, Any]:
    """The next stage of the ring, and its phase."""
    last = index == stages - 1
    return cutlass.select_(last, Int32(0), index + 1), cutlass.select_(last, phase ^ 1, phase)


def skip(index: Any, phase: Any, count: int, stages: int) -> tuple[Any, Any]:
    """The stage `count` further in the ring, and its phase."""
    index = index + count % stages
    over = index >= stages
    phase = phase ^ (count // stages % 2)
    return cutlass.select_(over, index - stages, index), cutlass.select_(over, phase ^ 1, phase)


@cute.jit
def count_tiles(offsets: cute.Tensor, starts: cute.Tensor, first_tiles: cute.Tensor, gemm: cutlass.Constexpr):
    """By one warp: copy offsets (E + 1,) to `starts`, and write how many tiles of tokens, or clusters of them, precede each expert.

    A lane takes neighbouring experts, so that all its loads are in flight at a time.
    """
    lane = cute.arch.lane_idx()
    experts = cutlass.const_expr(gemm.experts)
    share = cutlass.const_expr(math.ceil(experts / WARP))
    begins = [offsets[cutlass.min(lane * share + i, experts)] for i in range(share + 1)]
    before = [Int32(0)]
    for i in cutlass.range_constexpr(share):
        tiles = (begins[i + 1] - begins[i] + (gemm.tile.span - 1)) // gemm.tile.span
        before.append(before[i] + tiles)
    total = before[share]
    for n in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << n)
        total = total + cutlass.select_(lane >= (1 << n), below, Int32(0))
    base = total - before[share]
    for i in cutlass.range_constexpr(share):
        expert = lane * share + i
        if expert < experts:
            starts[expert] = begins[i]
            first_tiles[expert] = base + before[i]
    if lane == WARP - 1:  # experts past the last have no tiles, so the last lane's total is that of all
        starts[experts] = offsets[experts]
        first_tiles[experts] = total


def begin_at(gemm: GroupedGemm) -> tuple[Any, Any]:
    """The first tile of the calling thread block or its cluster, and how far on the next one is."""
    block, blocks, cluster = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], gemm.tile.cluster
    return (block, blocks) if cluster == 1 else (block // cluster, blocks // cluster)


def locate(tile: Any, starts: cute.Tensor, first_tiles: cute.Tensor, gemm: GroupedGemm) -> tuple[Any, Any, Any, Any]:
    """By a whole warp: a tile's expert, first row, end of rows, and place among the tiles of a row's columns.

    Blocks of a cluster count its tiles as one, and each finds its own, which has no rows where the expert has too few.

    Tiles of an expert are taken in groups of up to GROUP tiles of tokens, column by column of tiles: tiles that run at the same time share weights
    and token rows. Where tiles have several variants, those of an expert share its rows in multiples of 8, and their end is their own;
    else it is the expert's. Which of them are longer rotates from column to column and from expert to expert: otherwise a block, which
    takes every n-th tile, could get long ones alone.
    """
    lane, experts = cute.arch.lane_idx(), gemm.experts
    share = math.ceil(experts / WARP)
    number = tile // gemm.m_tiles  # as if an expert's tiles stood column by column: right for the expert
    passed = first_tiles[cutlass.min((lane + 1) * share, experts)] <= number
    base = cute.arch.popc(cute.arch.vote_ballot_sync(passed)) * share
    passed = first_tiles[cutlass.min(base + lane + 1, experts)] <= number  # lanes past this share: none, as starts rise
    expert = base + cute.arch.popc(cute.arch.vote_ballot_sync(passed))
    expert = cute.arch.make_warp_uniform(expert)
    first, start, end = first_tiles[expert], starts[expert], starts[expert + 1]
    count = first_tiles[expert + 1] - first
    inside = tile - first * gemm.m_tiles
    most = GROUP // gemm.tile.cluster
    group = inside // (most * gemm.m_tiles)
    high = cutlass.min(count - group * most, most)
    inside = inside - group * (most * gemm.m_tiles)
    if not gemm.tile.narrowest:
        return expert, start + (group * most + inside % high) * gemm.tile.tokens, end, inside // high
    m_tile = inside // high
    number = group * most + (inside % high + m_tile + expert) % high
    if gemm.tile.cluster > 1:
        number = number * gemm.tile.cluster + cute.arch.block_idx_in_cluster()
        count = count * gemm.tile.cluster
    row, last = start + first_of(number, end - start, count), start + first_of(number + 1, end - start, count)
    return expert, row, cutlass.min(last, end), m_tile


def first_of(number: Any, rows: Any, count: Any) -> Any:
    """Where a tile begins that is one of `count` which share `rows` rows: some are 8 rows longer than others."""
    eights = (rows + 7) // 8
    return 8 * (number * (eights // count) + cutlass.min(number, eights % count))


def n_of(row: Any, end: Any, tile: Tile) -> Any:
    """The variant that a tile of these rows has, in tokens."""
    if not tile.narrowest:
        return tile.tokens
    over = cutlass.max(end - row - tile.n_sizes[0], 0)
    return tile.n_sizes[0] + (over + tile.grain - 1) // tile.grain * tile.grain
