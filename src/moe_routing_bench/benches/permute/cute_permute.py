"""Permute in CuTe DSL: expert ids to counts, offsets, stable order and its inverse, in one or two launches.

Strategy: the assignments are cut into contiguous chunks, one a thread block. Launch 1 counts each chunk's experts (and
clears `order`); launch 2 lets every block add up the chunks before its own, which gives the first rank of each expert in
it, and places its assignments. Inside a chunk, ballots over the bits of the expert's id find the lanes of a warp that hold
the same expert, and per-warp counters in shared memory, scanned over the warps, make the ranks stable. Few assignments fit
one block, which does all of it in a single launch.
Compulsory bytes: 4 * (2 * T * k + R); floor at 131,072 assignments: 1.5 MB, 0.4 us at 4 TB/s, so latency rules: two
launches and about four dependent trips to L2. Predicted 6 to 8 us.

Invariant: ranks follow from positions alone, never from the order in which blocks or atomics arrive; every atomic adds
integers. Ids outside 0 .. E-1 (a token that the gate could not route) take no row: their inverse is -1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Uint32

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support

WARP = 32
COUNTER_BYTES = 32768  # shared memory for per-warp counters: bounds the warps of a block when experts are many
ROUNDS = 8  # up to so many assignments a thread, one block is faster than two launches
MAX_BLOCKS = 264  # two on each of 132 SMs


@cute.jit
def lanes_with(expert: Int32, live: Boolean, bits: cutlass.Constexpr) -> Uint32:
    """The lanes of the warp that hold the same expert, for lanes that are live."""
    mask = Uint32(cute.arch.vote_ballot_sync(live))
    for bit in cutlass.range_constexpr(bits):
        on = (expert >> bit) & 1 == 1
        votes = Uint32(cute.arch.vote_ballot_sync(on))
        mask = mask & Uint32(cutlass.select_(on, votes, ~votes))
    return mask


def shared(shape: Any) -> cute.Tensor:
    """Int32 counters in shared memory."""
    return cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)


@cute.kernel
def count_kernel(ids: cute.Tensor, partial: cute.Tensor, order: cute.Tensor, threads: cutlass.Constexpr, items: cutlass.Constexpr):  # fmt: skip
    """One block: how often each expert occurs in its chunk; clears its share of `order`."""
    experts = cutlass.const_expr(partial.shape[1])
    bits = cutlass.const_expr(max(1, (experts - 1).bit_length()))
    counters = shared(experts)
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    blocks, n = partial.shape[0], ids.shape[0]
    for expert in range(thread, experts, threads):
        counters[expert] = 0
    cute.arch.sync_threads()

    tiles = cute.ceil_div(n, blocks * threads * items)
    below = cute.arch.lanemask_lt()
    for tile in range(tiles):
        start = (block * tiles + tile) * (threads * items) + thread
        held = cute.make_rmem_tensor((items,), Int32)
        held.fill(-1)
        for r in cutlass.range_constexpr(items):
            if start + r * threads < n:
                held[r] = ids[start + r * threads]
        for r in cutlass.range_constexpr(items):
            live = held[r] >= 0 and held[r] < experts
            mask = lanes_with(held[r], live, bits)
            if live and mask & Uint32(below) == 0:
                cute.arch.atomic_add(counters.iterator + held[r], Int32(cute.arch.popc(mask)))
    for row in range(block * threads + thread, order.shape[0], blocks * threads):
        order[row] = -1
    cute.arch.sync_threads()
    for expert in range(thread, experts, threads):
        partial[block, expert] = counters[expert]


@cute.jit
def add_chunks(
    partial: cute.Tensor,
    before: cute.Tensor,
    loads: cute.Tensor,
    thread: Int32,
    block: Int32,
    threads: cutlass.Constexpr,
):
    """Each expert's assignments in the chunks before `block`'s, and in all: partial (blocks, E) -> before, loads (E,)."""
    experts = cutlass.const_expr(partial.shape[1])
    groups = cutlass.const_expr(max(1, threads // experts))
    for first in cutlass.range_constexpr(0, experts, threads):
        expert, group = first + thread % min(experts, threads), thread // min(experts, threads)
        if expert < experts and group < groups:
            earlier, total = Int32(0), Int32(0)
            for chunk in cutlass.range(group, partial.shape[0], groups, unroll=8):
                count = partial[chunk, expert]
                total += count
                earlier += Int32(cutlass.select_(chunk < block, count, Int32(0)))
            cute.arch.atomic_add(before.iterator + expert, earlier)
            cute.arch.atomic_add(loads.iterator + expert, total)


@cute.jit
def scan(
    loads: cute.Tensor,
    starts: cute.Tensor,
    limit: Int32,
    lane: Int32,
    padded: cutlass.Constexpr,
    align: cutlass.Constexpr,
):
    """By one warp: each expert's first row, loads (E,) -> starts (E + 1,)."""
    experts = cutlass.const_expr(cute.size(loads))
    each = cutlass.const_expr(-(-experts // WARP))
    sizes = cute.make_rmem_tensor((each,), Int32)
    total = Int32(0)
    for v in cutlass.range_constexpr(each):
        sizes[v] = 0
        if lane * each + v < experts:
            if cutlass.const_expr(padded):
                sizes[v] = limit
            else:
                sizes[v] = (cutlass.min(loads[lane * each + v], limit) + (align - 1)) // align * align
        total += sizes[v]
    ending = total
    for step in cutlass.range_constexpr(int(math.log2(WARP))):
        other = cute.arch.shuffle_sync_up(ending, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            ending += other
    running = ending - total
    for v in cutlass.range_constexpr(each):
        if lane * each + v < experts:
            starts[lane * each + v] = running
        running += sizes[v]
    if lane == WARP - 1:
        starts[experts] = running


@cute.kernel
def place_kernel(
    ids: cute.Tensor,
    partial: cute.Tensor,
    counts: cute.Tensor,
    offsets: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    limit: Int32,
    threads: cutlass.Constexpr,
    items: cutlass.Constexpr,
    alone: cutlass.Constexpr,
    padded: cutlass.Constexpr,
    align: cutlass.Constexpr,
):
    """One block: the rows of its chunk's assignments. `alone`: the only block, with all of them in one tile."""
    experts = cutlass.const_expr(partial.shape[1])
    bits, warps = cutlass.const_expr(max(1, (experts - 1).bit_length())), cutlass.const_expr(threads // WARP)
    counters = shared((experts, warps))  # of each warp: first its counts, then the first rank of each expert
    before, loads, starts = shared(experts), shared(experts), shared(experts + 1)
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    lane, warp = cute.arch.lane_idx(), thread // WARP
    n = ids.shape[0]
    for expert in range(thread, experts, threads):
        before[expert] = 0
        loads[expert] = 0
    for expert in range(lane, experts, WARP):
        counters[expert, warp] = 0
    if cutlass.const_expr(alone):
        for row in range(thread, order.shape[0], threads):
            order[row] = -1
    cute.arch.sync_threads()
    if cutlass.const_expr(not alone):
        add_chunks(partial, before, loads, thread, block, threads)

    tiles = Int32(1)
    if cutlass.const_expr(not alone):
        tiles = cute.ceil_div(n, cute.arch.grid_dim()[0] * threads * items)
    below = Uint32(cute.arch.lanemask_lt())
    for tile in range(tiles):
        # A warp's assignments are contiguous, so ranks by round, then lane, are ranks by position.
        start = (block * tiles + tile) * (threads * items) + warp * (WARP * items) + lane
        held = cute.make_rmem_tensor((items,), Int32)
        rank = cute.make_rmem_tensor((items,), Int32)
        held.fill(-1)
        for r in cutlass.range_constexpr(items):
            if start + r * WARP < n:
                held[r] = ids[start + r * WARP]
        for r in cutlass.range_constexpr(items):
            live = held[r] >= 0 and held[r] < experts
            mask = lanes_with(held[r], live, bits)
            rank[r] = 0
            earlier = Int32(0)
            if live:
                earlier = counters[held[r], warp]
                rank[r] = earlier + Int32(cute.arch.popc(mask & below))
            cute.arch.sync_warp()
            if live and mask & below == 0:
                counters[held[r], warp] = earlier + Int32(cute.arch.popc(mask))
            cute.arch.sync_warp()
        cute.arch.sync_threads()
        for expert in range(thread, experts, threads):
            running = before[expert]
            for w in cutlass.range_constexpr(warps):
                count = counters[expert, w]
                counters[expert, w] = running
                running += count
            before[expert] = running
            if cutlass.const_expr(alone):
                loads[expert] = running
        cute.arch.sync_threads()
        if tile == 0:
            if warp == 0:
                scan(loads, starts, limit, lane, padded, align)
            cute.arch.sync_threads()
        for r in cutlass.range_constexpr(items):
            row = Int32(-1)
            if held[r] >= 0 and held[r] < experts:
                place = counters[held[r], warp] + rank[r]
                if place < limit:
                    row = starts[held[r]] + place
                    order[row] = start + r * WARP
            if start + r * WARP < n:
                inverse[start + r * WARP] = row
        cute.arch.sync_warp()
        for expert in range(lane, experts, WARP):
            counters[expert, warp] = 0
        cute.arch.sync_warp()
    if block == 0:
        for expert in range(thread, experts, threads):
            counts[expert] = cutlass.min(loads[expert], limit)
        for expert in range(thread, experts + 1, threads):
            offsets[expert] = starts[expert]


@cute.jit
def permute_host(
    ids: cute.Tensor,
    partial: cute.Tensor,
    counts: cute.Tensor,
    offsets: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    limit: Int32,
    threads: cutlass.Constexpr,
    items: cutlass.Constexpr,
    alone: cutlass.Constexpr,
    padded: cutlass.Constexpr,
    align: cutlass.Constexpr,
    stream: Any,
):
    grid, block = (partial.shape[0], 1, 1), (threads, 1, 1)
    if cutlass.const_expr(not alone):
        count_kernel(ids, partial, order, threads, items).launch(grid=grid, block=block, stream=stream)
    place_kernel(
        ids, partial, counts, offsets, order, inverse, limit, threads, items, alone, padded, align
    ).launch(grid=grid, block=block, stream=stream)  # fmt: skip


@cute_cache.cached
def compile_for(
    arch: str, experts: int, threads: int, items: int, alone: bool, padded: bool, align: int, keep: bool = False
) -> Any:
    """Compile permute for one architecture and shape class (no GPU needed).

    The result is called with ids (N,), partial (blocks, E), counts (E,), offsets (E + 1,), order (R,), inverse (N,), all
    int32, and the most rows an expert may have.
    """
    n, rows, blocks = cute.sym_int(), cute.sym_int(), cute.sym_int()
    arguments = [
        support.matrix(Int32, n),
        support.matrix(Int32, blocks, experts),
        support.matrix(Int32, experts),
        support.matrix(Int32, experts + 1),
        support.matrix(Int32, rows),
        support.matrix(Int32, n),
        Int32(1),
        threads,
        items,
        alone,
        padded,
        align,
    ]
    return support.compile_kernel(permute_host, arguments, arch, keep)


def choose(n: int, experts: int) -> tuple[int, int, int]:
    """(threads, assignments a thread, blocks): one block where it can hold all, else up to two an SM."""
    warps = min(32, 1 << (COUNTER_BYTES // 4 // experts).bit_length() - 1)
    if n <= warps * WARP * ROUNDS:
        warps = min(warps, 1 << (max(1, n // WARP) - 1).bit_length())
        return warps * WARP, -(-n // (warps * WARP)), 1
    items = 1024 // (warps * WARP)
    return warps * WARP, items, min(MAX_BLOCKS, -(-n // (warps * WARP * items)))


def _shape(cell: Any) -> tuple[Any, ...]:
    threads, items, blocks = choose(cell.tokens * cell.top_k, cell.experts)
    return cell.experts, threads, items, blocks == 1, cell.layout == "padded", cell.block


def precompile(cell: Any, arch: str) -> None:
    """Put the kernels of a cell into the cache; needs no GPU."""
    compile_for(arch, *_shape(cell))


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind permute: topk_ids (T, k) -> counts (E,), offsets (E + 1,), order (R,), inverse (T, k), all int32."""
    ids = inputs["topk_ids"].view(-1)
    n = len(ids)
    partial = ids.new_empty(choose(n, cell.experts)[2], cell.experts)
    kernel = compile_for(support.current_arch(), *_shape(cell))
    limit = n if cell.capacity is None else cell.capacity
    held = (outputs["counts"], outputs["offsets"], outputs["order"], outputs["inverse"].view(-1))
    return functools.partial(kernel, ids, partial, *held, limit)
