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
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Uint32

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support

WARP = 32
MAX_EXPERTS = 1024  # per-warp counters of 32 warps then take 128 KB of shared memory
# Up to so many assignments, so many a tile: small tiles spread the work, but every block adds up all chunks before its own.
TILES = ((8192, 512), (65536, 1024), (540672, 2048), (math.inf, 4096))
MAX_BLOCKS = 264  # two on each of 132 SMs


@dataclass(frozen=True)
class Form:
    """What is fixed when the kernels are compiled."""

    threads: int  # of a block
    items: int  # assignments a thread in a tile
    alone: bool  # one block holds all assignments in one tile, and one launch does all
    overlap: bool  # the second launch starts before the first has ended (programmatic dependent launch, sm_90 on)
    padded: bool  # every expert has the same number of rows
    align: int  # else: rows of an expert are rounded up to a multiple


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
    return cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)


@cute.kernel
def count_kernel(ids: cute.Tensor, partial: cute.Tensor, order: cute.Tensor, form: cutlass.Constexpr):
    """One block: how often each expert occurs in its chunk; clears its share of `order`."""
    experts, threads, items = cutlass.const_expr(partial.shape[1]), form.threads, form.items
    if cutlass.const_expr(form.overlap):
        cute.arch.griddepcontrol_launch_dependents()
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
def scan(sizes: cute.Tensor, starts: cute.Tensor, lane: Int32):
    """By one warp: the sum of the sizes before each, (E,) -> (E + 1,)."""
    experts = cutlass.const_expr(cute.size(sizes))
    each = cutlass.const_expr(-(-experts // WARP))
    held = cute.make_rmem_tensor((each,), Int32)
    held.fill(0)
    total = Int32(0)
    for v in cutlass.range_constexpr(each):
        if lane * each + v < experts:
            held[v] = sizes[lane * each + v]
        total += held[v]
    ending = total
    for step in cutlass.range_constexpr(int(math.log2(WARP))):
        other = cute.arch.shuffle_sync_up(ending, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            ending += other
    running = ending - total
    for v in cutlass.range_constexpr(each):
        if lane * each + v < experts:
            starts[lane * each + v] = running
        running += held[v]
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
    form: cutlass.Constexpr,
):
    """One block: the rows of its chunk's assignments."""
    experts, threads, items = cutlass.const_expr(partial.shape[1]), form.threads, form.items
    bits, warps = cutlass.const_expr(max(1, (experts - 1).bit_length())), cutlass.const_expr(threads // WARP)
    counters = shared((experts, warps))  # of each warp: its counts, then where in the tile its first of an expert is
    sorted_tile = shared(threads * items)  # expert << 16 | position in the tile
    before, loads = shared(experts), shared(experts)  # of each expert: assignments before this tile, and in all
    sizes, starts = shared(experts), shared(experts + 1)  # rows of each expert, and the first of them
    tile_loads, tile_starts = shared(experts), shared(experts + 1)
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    lane, warp = cute.arch.lane_idx(), thread // WARP
    n = ids.shape[0]
    for expert in range(thread, experts, threads):
        before[expert] = 0
        loads[expert] = 0
        tile_loads[expert] = 0
    for expert in range(lane, experts, WARP):
        counters[expert, warp] = 0
    if cutlass.const_expr(form.alone):
        for row in range(thread, order.shape[0], threads):
            order[row] = -1
    cute.arch.sync_threads()

    tiles = Int32(1)
    if cutlass.const_expr(not form.alone):
        tiles = cute.ceil_div(n, cute.arch.grid_dim()[0] * threads * items)
    below = Uint32(cute.arch.lanemask_lt())
    for tile in range(tiles):
        # A warp's assignments are contiguous, so ranks by round, then lane, are ranks by position.
        first = (block * tiles + tile) * (threads * items)
        mine = warp * (WARP * items) + lane
        held = cute.make_rmem_tensor((items,), Int32)
        rank = cute.make_rmem_tensor((items,), Int32)
        held.fill(-1)
        for r in cutlass.range_constexpr(items):
            if first + mine + r * WARP < n:
                held[r] = ids[first + mine + r * WARP]
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
        if cutlass.const_expr(not form.alone):
            if tile == 0:
                if cutlass.const_expr(form.overlap):  # all above needs nothing from the first launch
                    cute.arch.griddepcontrol_wait()
                add_chunks(partial, before, loads, thread, block, threads)
        cute.arch.sync_threads()
        for expert in range(thread, experts, threads):
            before[expert] += tile_loads[expert]  # of the tile before
            each = cute.make_rmem_tensor((warps,), Int32)
            for w in cutlass.range_constexpr(warps):
                each[w] = counters[expert, w]
            running = Int32(0)
            for w in cutlass.range_constexpr(warps):
                counters[expert, w] = running
                running += each[w]
            tile_loads[expert] = running
            if cutlass.const_expr(form.alone):
                loads[expert] = running
            if tile == 0:
                sizes[expert] = (cutlass.min(loads[expert], limit) + (form.align - 1)) // form.align * form.align
                if cutlass.const_expr(form.padded):
                    sizes[expert] = limit
        cute.arch.sync_threads()
        if warp == 0:
            scan(tile_loads, tile_starts, lane)
        if tile == 0 and warp == cutlass.const_expr(min(1, warps - 1)):
            scan(sizes, starts, lane)
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(items):
            expert, row = held[r], Int32(-1)
            if expert >= 0 and expert < experts:
                at = counters[expert, warp] + rank[r]
                sorted_tile[tile_starts[expert] + at] = (expert << 16) | (mine + r * WARP)
                if before[expert] + at < limit:
                    row = starts[expert] + before[expert] + at
            if first + mine + r * WARP < n:
                inverse[first + mine + r * WARP] = row
        cute.arch.sync_threads()
        # Written in sorted order, an expert's rows are neighbours in memory.
        for at in range(thread, tile_starts[experts], threads):
            expert = sorted_tile[at] >> 16
            place = before[expert] + at - tile_starts[expert]
            if place < limit:
                order[starts[expert] + place] = first + (sorted_tile[at] & 0xFFFF)
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
    form: cutlass.Constexpr,
    stream: Any,
):
    grid, block = (partial.shape[0], 1, 1), (form.threads, 1, 1)
    if cutlass.const_expr(not form.alone):
        count_kernel(ids, partial, order, form).launch(grid=grid, block=block, stream=stream)
    place_kernel(ids, partial, counts, offsets, order, inverse, limit, form).launch(
        grid=grid, block=block, stream=stream, use_pdl=form.overlap
    )


@cute_cache.cached
def compile_for(arch: str, experts: int, form: Form, keep: bool = False) -> Any:
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
        form,
    ]
    return support.compile_kernel(permute_host, arguments, arch, keep)


def choose(n: int, experts: int) -> tuple[int, int, int]:
    """(threads, assignments a thread in a tile, blocks) for n assignments: a tile is what a block sorts at once."""
    if n <= 1024:
        threads = WARP << (-(-n // WARP) - 1).bit_length()
        return threads, 1, 1
    tile = next(size for most, size in TILES if n <= most)
    tile = min(tile, 2048) if experts > MAX_EXPERTS // 2 else tile  # shared memory
    threads = min(1024, tile)
    return threads, tile // threads, min(MAX_BLOCKS, -(-n // tile))


def supports(cell: Any) -> str | None:
    """Why the kernels cannot run a cell, or None."""
    return None if cell.experts <= MAX_EXPERTS else f"the cute permute takes up to {MAX_EXPERTS} experts"


def form_of(cell: Any, arch: str) -> tuple[Form, int]:
    """The form of the kernels for a cell, and their number of blocks."""
    threads, items, blocks = choose(cell.tokens * cell.top_k, cell.experts)
    alone = blocks == 1
    overlap = not alone and not arch.startswith("sm_8")
    return Form(threads, items, alone, overlap, cell.layout == "padded", cell.block), blocks


def precompile(cell: Any, arch: str) -> None:
    """Put the kernels of a cell into the cache; needs no GPU."""
    compile_for(arch, cell.experts, form_of(cell, arch)[0])


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind permute: topk_ids (T, k) -> counts (E,), offsets (E + 1,), order (R,), inverse (T, k), all int32."""
    ids, arch = inputs["topk_ids"].view(-1), support.current_arch()
    form, blocks = form_of(cell, arch)
    kernel = compile_for(arch, cell.experts, form)
    partial = ids.new_empty(blocks, cell.experts)
    limit = len(ids) if cell.capacity is None else cell.capacity
    held = (outputs["counts"], outputs["offsets"], outputs["order"], outputs["inverse"].view(-1))
    return functools.partial(kernel, ids, partial, *held, limit)
