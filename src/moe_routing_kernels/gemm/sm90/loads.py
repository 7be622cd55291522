"""The producer: brings weights and token rows to shared memory, stage by stage.

Weights come by TMA, issued by one warp; in a cluster each block loads a part of them, which all get (multicast). Packed rows
come by TMA, too (`load_packed`). Rows that are gathered through `order` come by 16-byte asynchronous copies of the four warps of the
producer's warpgroup (`load_gathered`), each thread the same eighth of every 16th row, to the places that TMA would have given them:
vector v of row r of a stage lies at v ^ (r % 8) of its 8 (the swizzle of 128 bytes).

Invariants:
- The `full` barrier of a stage counts each thread's copies as they come (`cp.async.mbarrier.arrive.noinc`). Consumers then fence for the
  asynchronous proxy, through which the tensor cores read: writes, barrier, fence and reads stand in this order.
- Rows beyond an expert's last are copies of its last row; elements beyond K are zero in both operands.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gemm.sm90.schedule import advance, begin_at, locate, n_of
from moe_routing_kernels.gemm.sm90.tile import TILE_K, VECTOR, WARPGROUP, GroupedGemm

VECTORS = TILE_K // VECTOR  # of a row in a stage
ROWS = WARPGROUP // VECTORS  # rows that a warpgroup copies at a time


def place(thread: Any) -> Any:
    """Where in a stage of rows a thread's first vector lies, in elements; its others lie ROWS rows apart."""
    row, vector = thread // VECTORS, thread % VECTORS
    return row * TILE_K + (vector ^ (row % 8)) * VECTOR


def weight_boxes(w_atom: cute.CopyAtom, w: cute.Tensor, w_stages: cute.Tensor, gemm: GroupedGemm) -> tuple:
    """For `load_weights`: the atom, the stages, and the boxes (m_tile, k_tile, expert), or the part of them that a block brings to its cluster."""
    tiles = cute.local_tile(w, (gemm.tile.m, TILE_K), (None, None, None))
    cluster = gemm.tile.cluster
    rank = cute.arch.block_idx_in_cluster() if cluster > 1 else 0
    stages, boxes = cpasync.tma_partition(
        w_atom, rank, cute.make_layout(cluster), cute.group_modes(w_stages, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return w_atom, stages, boxes


@cute.jit
def load_weights(
    weights: tuple,
    expert: Int32,
    m_tile: Int32,
    k: Int32,
    index: Int32,
    full: cute.Pointer,
    gemm: cutlass.Constexpr,
):
    """By one warp: tell `full` how many bytes TMA brings to a stage, and issue the copy of its box of `weights`, as `weight_boxes` gives them."""
    atom, stages, boxes = weights
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + index, gemm.tma_bytes)
    source = boxes[None, m_tile, k, expert]
    if cutlass.const_expr(gemm.tile.cluster > 1):
        mask = cutlass.Int16(2**gemm.tile.cluster - 1)
        cute.copy(atom, source, stages[None, index], tma_bar_ptr=full + index, mcast_mask=mask)
    else:
        cute.copy(atom, source, stages[None, index], tma_bar_ptr=full + index)


@cute.jit
def load_packed(
    load: cutlass.Constexpr,
    weights: tuple,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    x_stages: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    tiles: Int32,
    gemm: cutlass.Constexpr,
):
    """By one warp: load the weights, by `load(weights, ...)`, and packed rows x (R, inner) of the block's tiles.

    The second of two kernels that overlap loads the first weights while the first is still writing `x`.
    """
    tile, stride = begin_at(gemm)
    index, phase, ahead = Int32(0), Int32(1), Int32(gemm.prefetched)
    if cutlass.const_expr(gemm.waits == "rows"):
        if tile < tiles:
            expert, _, _, m_tile = locate(tile, starts, first_tiles, gemm)
            for k in cutlass.range(gemm.prefetched, unroll=1):
                load(weights, expert, m_tile, k, k, full, gemm)
        cute.arch.griddepcontrol_wait()  # in every block: none may end before the first kernel
    while tile < tiles:
        expert, row, _, m_tile = locate(tile, starts, first_tiles, gemm)
        x_tiles = cute.local_tile(cute.domain_offset((row, 0), x), (gemm.tile.tokens, gemm.tile_k), (0, None))
        x_to, x_from = cpasync.tma_partition(
            x_atom, 0, cute.make_layout(1), cute.group_modes(x_stages, 0, 2), cute.group_modes(x_tiles, 0, 2)
        )
        for k in cutlass.range(gemm.k_tiles, unroll=1):
            if ahead > 0:
                ahead -= 1
            else:
                cute.arch.mbarrier_wait(empty + index, phase)
                load(weights, expert, m_tile, k, index, full, gemm)
            cute.copy(x_atom, x_from[None, k], x_to[None, index], tma_bar_ptr=full + index)
            index, phase = advance(index, phase, gemm.stages)
        tile += stride
    if cutlass.const_expr(gemm.signals == "late"):  # no sooner: the next kernel's loads would compete with these
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_indices(
    order: cute.Tensor,
    tile: Int32,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    indices: cute.Tensor,
    gemm: cutlass.Constexpr,
):
    """Load the assignments of the calling thread's rows of a tile from order (R,)."""
    _, row, end, _ = locate(tile, starts, first_tiles, gemm)
    first = row + cute.arch.thread_idx()[0] % WARPGROUP // VECTORS
    for n in cutlass.range_constexpr(cute.size(indices)):
        indices[n] = order[cutlass.min(first + n * ROWS, end - 1)]


@cute.jit
def copy_vector(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, inside: cute.Tensor, gemm: cutlass.Constexpr
):
    """Issue the copy of a vector, or of zeros where it is not `inside`, as in the last k tile."""
    if cutlass.const_expr(gemm.inner % TILE_K == 0):
        cute.copy(atom, source, target)
    else:
        cute.copy(atom, source, target, pred=inside)


@cute.jit
def copy_rows(
    x: cute.Tensor,
    tokens: cute.Tensor,
    k: Int32,
    x_stages: cute.Tensor,
    index: Int32,
    live: Int32,
    gemm: cutlass.Constexpr,
):
    """Issue the calling thread's copies of k tile k of its rows of x (T, inner), one group of copies, to a stage.

    Rows from `live` on, which the tile's variant does not multiply, are left as they are.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    cache = cpasync.LoadCacheMode.GLOBAL
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cache), x.element_type, num_bits_per_copy=128)
    vector = cute.make_layout((VECTOR, 1))
    column = k * TILE_K + thread % VECTORS * VECTOR
    inside = cute.make_rmem_tensor(cute.make_layout((VECTOR, 1), stride=(0, 0)), Boolean)  # the rest is zero
    inside[0] = column < gemm.inner
    start = index * (gemm.tile.tokens * TILE_K) + place(thread)
    stage = cute.recast_ptr(x_stages.iterator) + cute.assume(start, divby=VECTOR)
    for n in cutlass.range_constexpr(cute.size(tokens)):
        offset = Int64(tokens[n]) * gemm.inner + Int64(column)
        source = cute.make_tensor(x.iterator + cute.assume(offset, divby=VECTOR), vector)
        target = cute.make_tensor(stage + n * ROWS * TILE_K, vector)
        if cutlass.const_expr((n + 1) * ROWS <= gemm.tile.n_sizes[0]) or thread // VECTORS + n * ROWS < live:
            copy_vector(atom, source, target, inside, gemm)
    cute.arch.cp_async_commit_group()


@cute.jit
def load_gathered(
    weights: tuple,
    x: cute.Tensor,
    order: cute.Tensor,
    x_stages: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    tiles: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup: load the weights, and the rows x[order // top_k] of x (T, inner), of the block's tiles.

    The numbers of the next tile's rows are loaded while this one's are copied.
    """
    tile, stride = begin_at(gemm)
    warp_index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
    passes = cutlass.const_expr((gemm.tile.tokens + ROWS - 1) // ROWS)
    tokens, following = cute.make_rmem_tensor((passes,), Int32), cute.make_rmem_tensor((passes,), Int32)
    index, phase = Int32(0), Int32(1)
    if tile < tiles:
        load_indices(order, tile, starts, first_tiles, following, gemm)
    while tile < tiles:
        for n in cutlass.range_constexpr(passes):
            tokens[n] = cutlass.max(following[n], 0) // gemm.top_k
        expert, row, end, m_tile = locate(tile, starts, first_tiles, gemm)
        live = n_of(row, end, gemm.tile)
        tile += stride
        load_indices(order, cutlass.min(tile, tiles - 1), starts, first_tiles, following, gemm)
        for k in cutlass.range(gemm.k_tiles, unroll=1):
            cute.arch.mbarrier_wait(empty + index, phase)
            if warp_index == 0:
                load_weights(weights, expert, m_tile, k, index, full, gemm)
            copy_rows(x, tokens, k, x_stages, index, live, gemm)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
            index, phase = advance(index, phase, gemm.stages)
    cute.arch.cp_async_wait_group(0)  # no thread ends before its copies
