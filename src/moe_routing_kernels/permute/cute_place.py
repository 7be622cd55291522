"""The rows of a block's assignments, once it is known what comes before them."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.permute.cute_chunks import add_chunks, add_few_chunks, expert_at, lanes_with, shared


class Counters(NamedTuple):
    """What a block keeps in shared memory, int32."""

    by_warp: cute.Tensor  # (E, warps): a warp's counts, then where in the tile its first assignment to an expert is
    sorted_tile: cute.Tensor  # (tile,): expert << 16 | position in the tile, by expert
    before: cute.Tensor  # (E,): assignments before this tile
    loads: cute.Tensor  # (E,): assignments in all
    sizes: cute.Tensor  # (E,): rows
    starts: cute.Tensor  # (E + 1,): first row
    tile_loads: cute.Tensor  # (E,): assignments in this tile
    tile_starts: cute.Tensor  # (E + 1,): the first of them in `sorted_tile`


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
    held = Counters(*[shared(extent) for extent in extents])
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    lane, warp, n = cute.arch.lane_idx(), thread // WARP, ids.shape[0]
    clear(held, thread, lane, warp, threads)
    if cutlass.const_expr(config.single_block):
        for row in range(thread, order.shape[0], threads):
            order[row] = -1
    cute.arch.sync_threads()

    tiles = Int32(1)
    if cutlass.const_expr(not config.single_block):
        tiles = cute.ceil_div(n, cute.arch.grid_dim()[0] * threads * items)
    lower_lanes = Uint32(cute.arch.lanemask_lt())
    for tile in range(tiles):
        # A warp's assignments are contiguous, so ranks by round, then lane, are ranks by position.
        first = (block * tiles + tile) * (threads * items)
        position = warp * (WARP * items) + lane
        expert_ids, ranks = rank_in_warp(ids, held.by_warp, first + position, warp, lower_lanes, items)
        if cutlass.const_expr(not config.single_block):
            if tile == 0:
                if cutlass.const_expr(config.overlap):  # all above needs nothing from the first launch
                    cute.arch.griddepcontrol_wait()
                if cutlass.const_expr(config.few_chunks):
                    add_few_chunks(partial, held.before, held.loads, thread, block)
                else:
                    add_chunks(partial, held.before, held.loads, thread, block, config)
        cute.arch.sync_threads()
        add_warps(held, thread, tile, limit, config)
        cute.arch.sync_threads()
        if warp == 0:
            scan(held.tile_loads, held.tile_starts, lane)
        if tile == 0 and warp == cutlass.const_expr(min(1, warps - 1)):
            scan(held.sizes, held.starts, lane)
        cute.arch.sync_threads()
        write_inverse(inverse, held, expert_ids, ranks, n, first, position, warp, limit)
        cute.arch.sync_threads()
        write_order(order, held, first, thread, limit, threads)
        if tile + 1 < tiles:
            for expert in range(lane, experts, WARP):
                held.by_warp[expert, warp] = 0
            cute.arch.sync_warp()
    if block == 0:
        for expert in range(thread, experts, threads):
            counts[expert] = cutlass.min(held.loads[expert], limit)
        for expert in range(thread, experts + 1, threads):
            offsets[expert] = held.starts[expert]


@cute.jit
def clear(held: Counters, thread: Int32, lane: Int32, warp: Int32, threads: cutlass.Constexpr):
    """Set what is added to to zero."""
    experts = cutlass.const_expr(held.by_warp.shape[0])
    for expert in range(thread, experts, threads):
        held.before[expert] = 0
        held.loads[expert] = 0
        held.tile_loads[expert] = 0
    for expert in range(lane, experts, WARP):
        held.by_warp[expert, warp] = 0


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
def add_warps(held: Counters, thread: Int32, tile: Int32, limit: Int32, config: cutlass.Constexpr):
    """Replace each warp's counts by those of the warps before it, and their sums by expert; size the experts' rows."""
    experts, warps = cutlass.const_expr(held.by_warp.shape[0]), cutlass.const_expr(held.by_warp.shape[1])
    for expert in range(thread, experts, config.threads):
        held.before[expert] += held.tile_loads[expert]  # of the tile before
        warp_counts = cute.make_rmem_tensor((warps,), Int32)
        for w in cutlass.range_constexpr(warps):
            warp_counts[w] = held.by_warp[expert, w]
        running = Int32(0)
        for w in cutlass.range_constexpr(warps):
            held.by_warp[expert, w] = running
            running += warp_counts[w]
        held.tile_loads[expert] = running
        if cutlass.const_expr(config.single_block):
            held.loads[expert] = running
        if tile == 0:
            kept = cutlass.min(held.loads[expert], limit)
            held.sizes[expert] = (kept + (config.align - 1)) // config.align * config.align
            if cutlass.const_expr(config.padded):
                held.sizes[expert] = limit


@cute.jit
def scan(sizes: cute.Tensor, starts: cute.Tensor, lane: Int32):
    """By one warp: the sum of the sizes before each, (E,) -> (E + 1,)."""
    experts = cutlass.const_expr(cute.size(sizes))
    count = cutlass.const_expr(-(-experts // WARP))  # sizes of a lane
    held = cute.make_rmem_tensor((count,), Int32)
    held.fill(0)
    total = Int32(0)
    for v in cutlass.range_constexpr(count):
        if lane * count + v < experts:
            held[v] = sizes[lane * count + v]
        total += held[v]
    ending = total
    for step in cutlass.range_constexpr(int(math.log2(WARP))):
        other = cute.arch.shuffle_sync_up(ending, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            ending += other
    running = ending - total
    for v in cutlass.range_constexpr(count):
        if lane * count + v < experts:
            starts[lane * count + v] = running
        running += held[v]
    if lane == WARP - 1:
        starts[experts] = running


@cute.jit
def write_inverse(
    inverse: cute.Tensor,
    held: Counters,
    expert_ids: cute.Tensor,
    ranks: cute.Tensor,
    n: Int32,
    first: Int32,
    position: Int32,
    warp: Int32,
    limit: Int32,
):
    """Write the rows of a thread's assignments, -1 where they have none, and sort the assignments into `sorted_tile`."""
    experts = cutlass.const_expr(held.by_warp.shape[0])
    for r in cutlass.range_constexpr(cute.size(ranks)):
        expert, row = expert_ids[r], Int32(-1)
        if expert >= 0 and expert < experts:
            at = held.by_warp[expert, warp] + ranks[r]
            held.sorted_tile[held.tile_starts[expert] + at] = (expert << 16) | (position + r * WARP)
            if held.before[expert] + at < limit:
                row = held.starts[expert] + held.before[expert] + at
        if first + position + r * WARP < n:
            inverse[first + position + r * WARP] = row


@cute.jit
def write_order(
    order: cute.Tensor, held: Counters, first: Int32, thread: Int32, limit: Int32, threads: cutlass.Constexpr
):
    """Write the tile's assignments to their rows. In sorted order, an expert's rows are neighbours in memory."""
    experts = cutlass.const_expr(held.by_warp.shape[0])
    for at in range(thread, held.tile_starts[experts], threads):
        expert = held.sorted_tile[at] >> 16
        place = held.before[expert] + at - held.tile_starts[expert]
        if place < limit:
            order[held.starts[expert] + place] = first + (held.sorted_tile[at] & 0xFFFF)
