"""The rows of a block's assignments, from the counts of the assignments before them."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.permute.cute_chunks import add_chunks, add_few_chunks, expert_at, lanes_with, shared


class Counters(NamedTuple):
    """Counters of a block in shared memory, int32."""

    by_warp: (
        cute.Tensor
    )  # (E, warps): a warp's counts, then the position in the tile of its first assignment to an expert
    sorted_tile: cute.Tensor  # (tile,): expert << 16 | position in the tile, by expert
    before: cute.Tensor  # (E,): assignments before this tile
    loads: cute.Tensor  # (E,): all assignments
    sizes: cute.Tensor  # (E,): rows
    starts: cute.Tensor  # (E + 1,): first row
    tile_loads: cute.Tensor  # (E,): assignments in this tile
    tile_starts: cute.Tensor  # (E + 1,): the first assignment in `sorted_tile`


@cute.kernel
def place_kernel(
    ids: cute.Tensor,
    partial: cute.Tensor,
    counts: cute.Tensor,
    offsets: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    limit: Int32,
    config: cutlass.Constexpr,
):
    """One block: the rows of its chunk's assignments."""
    experts, threads, items = cutlass.const_expr(partial.shape[1]), config.threads, config.items_per_thread
    if cutlass.const_expr(config.signals):
        cute.arch.griddepcontrol_launch_dependents()
    warps = cutlass.const_expr(threads // WARP)
    extents = ((experts, warps), threads * items, experts, experts, experts, experts + 1, experts, experts + 1)
    counters = Counters(*[shared(extent) for extent in extents])
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    lane, warp, n = cute.arch.lane_idx(), thread // WARP, ids.shape[0]
    clear(counters, thread, lane, warp, threads)
    if cutlass.const_expr(config.single_block):
        for row in range(thread, order.shape[0], threads):
            order[row] = -1
    cute.arch.sync_threads()

    tiles = Int32(1)
    if cutlass.const_expr(not config.single_block):
        tiles = cute.ceil_div(n, cute.arch.grid_dim()[0] * threads * items)
    lower_lanes = Uint32(cute.arch.lanemask_lt())
    for tile in range(tiles):
        # rank: a warp's assignments are contiguous, so ranks by round, then lane, are ranks by position.
        first = (block * tiles + tile) * (threads * items)
        position = warp * (WARP * items) + lane
        expert_ids, ranks = rank_in_warp(ids, counters.by_warp, first + position, warp, lower_lanes, items)
        # count
        if cutlass.const_expr(not config.single_block):
            if tile == 0:
                if cutlass.const_expr(config.overlap):  # all above reads nothing that the first launch writes
                    cute.arch.griddepcontrol_wait()
                if cutlass.const_expr(config.few_chunks):
                    add_few_chunks(partial, counters.before, counters.loads, thread, block)
                else:
                    add_chunks(partial, counters.before, counters.loads, thread, block, config)
        cute.arch.sync_threads()
        add_warps(counters, thread, tile, limit, config)
        cute.arch.sync_threads()
        if warp == 0:
            scan(counters.tile_loads, counters.tile_starts, lane)
        if tile == 0 and warp == cutlass.const_expr(min(1, warps - 1)):
            scan(counters.sizes, counters.starts, lane)
        cute.arch.sync_threads()
        # store
        write_inverse(inverse, counters, expert_ids, ranks, n, first, position, warp, limit)
        cute.arch.sync_threads()
        write_order(order, counters, first, thread, limit, threads)
        if tile + 1 < tiles:
            for expert in range(lane, experts, WARP):
                counters.by_warp[expert, warp] = 0
            cute.arch.sync_warp()
    if block == 0:
        for expert in range(thread, experts, threads):
            counts[expert] = cutlass.min(counters.loads[expert], limit)
        for expert in range(thread, experts + 1, threads):
            offsets[expert] = counters.starts[expert]


@cute.jit
def clear(counters: Counters, thread: Int32, lane: Int32, warp: Int32, threads: cutlass.Constexpr):
    """Set the counters that are added to to zero."""
    experts = cutlass.const_expr(counters.by_warp.shape[0])
    for expert in range(thread, experts, threads):
        counters.before[expert] = 0
        counters.loads[expert] = 0
        counters.tile_loads[expert] = 0
    for expert in range(lane, experts, WARP):
        counters.by_warp[expert, warp] = 0


@cute.jit
def rank_in_warp(
    ids: cute.Tensor,
    by_warp: cute.Tensor,
    start: Int32,
    warp: Int32,
    lower_lanes: Uint32,
    items: cutlass.Constexpr,
):
    """A thread's experts (items,), -1 beyond the last assignment, and their ranks among the warp's assignments to them.

    The thread's assignments are `start` and every WARP-th after it. Adds the warp's counts to `by_warp`.
    """
    experts = cutlass.const_expr(by_warp.shape[0])
    expert_ids = cute.make_rmem_tensor((items,), Int32)
    ranks = cute.make_rmem_tensor((items,), Int32)
    expert_ids.fill(-1)
    for r in cutlass.range_constexpr(items):
        if start + r * WARP < ids.shape[0]:
            expert_ids[r] = expert_at(ids, start + r * WARP, experts)
    for r in cutlass.range_constexpr(items):
        valid = expert_ids[r] >= 0 and expert_ids[r] < experts
        mask = lanes_with(expert_ids[r], valid, experts)
        ranks[r] = 0
        earlier = Int32(0)
        if valid:
            earlier = by_warp[expert_ids[r], warp]
            ranks[r] = earlier + Int32(cute.arch.popc(mask & lower_lanes))
        cute.arch.sync_warp()
        if valid and mask & lower_lanes == 0:
            by_warp[expert_ids[r], warp] = earlier + Int32(cute.arch.popc(mask))
        cute.arch.sync_warp()
    return expert_ids, ranks


@cute.jit
def add_warps(counters: Counters, thread: Int32, tile: Int32, limit: Int32, config: cutlass.Constexpr):
    """Replace each warp's counts by the counts of the warps before it; add them up per expert; size the experts' rows."""
    experts, warps = cutlass.const_expr(counters.by_warp.shape[0]), cutlass.const_expr(counters.by_warp.shape[1])
    for expert in range(thread, experts, config.threads):
        counters.before[expert] += counters.tile_loads[expert]  # the previous tile
        warp_counts = cute.make_rmem_tensor((warps,), Int32)
        for w in cutlass.range_constexpr(warps):
            warp_counts[w] = counters.by_warp[expert, w]
        running = Int32(0)
        for w in cutlass.range_constexpr(warps):
            counters.by_warp[expert, w] = running
            running += warp_counts[w]
        counters.tile_loads[expert] = running
        if cutlass.const_expr(config.single_block):
            counters.loads[expert] = running
        if tile == 0:
            kept = cutlass.min(counters.loads[expert], limit)
            counters.sizes[expert] = (kept + (config.align - 1)) // config.align * config.align
            if cutlass.const_expr(config.padded):
                counters.sizes[expert] = limit


@cute.jit
def scan(sizes: cute.Tensor, starts: cute.Tensor, lane: Int32):
    """By one warp: the exclusive prefix sum of sizes, (E,) -> (E + 1,)."""
    experts = cutlass.const_expr(cute.size(sizes))
    count = cutlass.const_expr(-(-experts // WARP))  # sizes of a lane
    values = cute.make_rmem_tensor((count,), Int32)
    values.fill(0)
    total = Int32(0)
    for v in cutlass.range_constexpr(count):
        if lane * count + v < experts:
            values[v] = sizes[lane * count + v]
        total += values[v]
    ending = total
    for step in cutlass.range_constexpr(int(math.log2(WARP))):
        other = cute.arch.shuffle_sync_up(ending, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            ending += other
    running = ending - total
    for v in cutlass.range_constexpr(count):
        if lane * count + v < experts:
            starts[lane * count + v] = running
        running += values[v]
    if lane == WARP - 1:
        starts[experts] = running


@cute.jit
def write_inverse(
    inverse: cute.Tensor,
    counters: Counters,
    expert_ids: cute.Tensor,
    ranks: cute.Tensor,
    n: Int32,
    first: Int32,
    position: Int32,
    warp: Int32,
    limit: Int32,
):
    """Write the rows of a thread's assignments, -1 for those without a row, and sort the assignments into `sorted_tile`."""
    experts = cutlass.const_expr(counters.by_warp.shape[0])
    for r in cutlass.range_constexpr(cute.size(ranks)):
        expert, row = expert_ids[r], Int32(-1)
        if expert >= 0 and expert < experts:
            at = counters.by_warp[expert, warp] + ranks[r]
            counters.sorted_tile[counters.tile_starts[expert] + at] = (expert << 16) | (position + r * WARP)
            if counters.before[expert] + at < limit:
                row = counters.starts[expert] + counters.before[expert] + at
        if first + position + r * WARP < n:
            inverse[first + position + r * WARP] = row


@cute.jit
def write_order(
    order: cute.Tensor, counters: Counters, first: Int32, thread: Int32, limit: Int32, threads: cutlass.Constexpr
):
    """Write the tile's assignments to their rows. In sorted order, an expert's rows are neighbours in memory."""
    experts = cutlass.const_expr(counters.by_warp.shape[0])
    for at in range(thread, counters.tile_starts[experts], threads):
        expert = counters.sorted_tile[at] >> 16
        place = counters.before[expert] + at - counters.tile_starts[expert]
        if place < limit:
            order[counters.starts[expert] + place] = first + (counters.sorted_tile[at] & 0xFFFF)
