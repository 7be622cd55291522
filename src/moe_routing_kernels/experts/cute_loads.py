"""How the grouped products of `cute_swapped` bring weights and token rows to shared memory, step by step through the ring of stages.

Weights come by TMA, issued by one warp; in a cluster each block asks for a part of them, which all get (multicast). Packed rows
come by TMA, too (`stream`). Rows that are gathered through `order` come by 16-byte asynchronous copies of the four warps of the
first warpgroup (`gather`), each thread the same eighth of every 16th row, to the places that TMA would have given them: vector v of
row r of a stage lies at v ^ (r % 8) of its 8 (the swizzle of 128 bytes).

Invariants:
- The `full` barrier of a stage counts each thread's copies as they come (`cp.async.mbarrier.arrive.noinc`), and whoever multiplies
  them fences for the asynchronous proxy, through which the tensor cores read, after waiting and before multiplying: writes,
  barrier, fence and reads stand in this order.
- Rows beyond an expert's last are copies of its last row; what lies beyond the inner dimension is zero in both operands.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.experts.cute_tiles import (
    STEP,
    VECTOR,
    WARPGROUP,
    Product,
    advance,
    begin_at,
    locate,
    width_of,
)

VECTORS = STEP // VECTOR  # of a row of a stage; as many threads copy one
ROWS = WARPGROUP // VECTORS  # that a warpgroup copies at a time


def place(thread: Any) -> Any:
    """Where in a stage of rows a thread's first vector lies, in elements; its others lie ROWS rows apart."""
    row, vector = thread // VECTORS, thread % VECTORS
    return row * STEP + (vector ^ (row % 8)) * VECTOR


def weights_of(w_atom: cute.CopyAtom, w: cute.Tensor, w_stages: cute.Tensor, product: Product) -> tuple[Any, Any]:
    """The stages, and the boxes (part, step, expert), of weights, or of the part of them that a block brings to its cluster."""
    tiles = cute.local_tile(w, (product.tile.rows, STEP), (None, None, None))
    cluster = product.tile.cluster
    rank = cute.arch.block_idx_in_cluster() if cluster > 1 else 0
    return cpasync.tma_partition(
        w_atom, rank, cute.make_layout(cluster), cute.group_modes(w_stages, 0, 2), cute.group_modes(tiles, 0, 2)
    )


@cute.jit
def ask_for_weights(
    w_atom: cute.CopyAtom,
    source: cute.Tensor,
    w_to: cute.Tensor,
    index: Int32,
    full: cute.Pointer,
    product: cutlass.Constexpr,
):
    """By one warp: announce what TMA brings to a stage, and start the copy of its box of weights."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + index, product.loaded_bytes)
    if cutlass.const_expr(product.tile.cluster > 1):
        everyone = cutlass.Int16(2**product.tile.cluster - 1)
        cute.copy(w_atom, source, w_to[None, index], tma_bar_ptr=full + index, mcast_mask=everyone)
    else:
        cute.copy(w_atom, source, w_to[None, index], tma_bar_ptr=full + index)


@cute.jit
def stream(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    w_stages: cute.Tensor,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    x_stages: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    tiles: Int32,
    product: cutlass.Constexpr,
):
    """By one warp: load weights and packed rows x (R, inner) of the block's tiles.

    The second of two kernels that overlap loads the first weights while the first is still writing `x`.
    """
    tile, stride = begin_at(product)
    w_to, w_from = weights_of(w_atom, w, w_stages, product)
    index, phase, ahead = Int32(0), Int32(1), Int32(product.ahead)
    if cutlass.const_expr(product.waits == "rows"):
        if tile < tiles:
            expert, _, _, part = locate(tile, starts, first_tiles, product)
            for k in cutlass.range(product.ahead, unroll=1):
                ask_for_weights(w_atom, w_from[None, part, k, expert], w_to, k, full, product)
        cute.arch.griddepcontrol_wait()  # in every block: none may end before the first kernel
    while tile < tiles:
        expert, row, _, part = locate(tile, starts, first_tiles, product)
        x_tiles = cute.local_tile(cute.domain_offset((row, 0), x), (product.tile.tokens, STEP), (0, None))
        x_to, x_from = cpasync.tma_partition(
            x_atom, 0, cute.make_layout(1), cute.group_modes(x_stages, 0, 2), cute.group_modes(x_tiles, 0, 2)
        )
        for k in cutlass.range(product.steps, unroll=1):
            if ahead > 0:
                ahead -= 1
            else:
                cute.arch.mbarrier_wait(empty + index, phase)
                ask_for_weights(w_atom, w_from[None, part, k, expert], w_to, index, full, product)
            cute.copy(x_atom, x_from[None, k], x_to[None, index], tma_bar_ptr=full + index)
            index, phase = advance(index, phase, product.stages)
        tile += stride
    if cutlass.const_expr(product.signals == "late"):  # sooner, what starts would be in the way of loads
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def find_rows(
    order: cute.Tensor,
    tile: Int32,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    found: cute.Tensor,
    product: cutlass.Constexpr,
):
    """Load the assignments of the calling thread's rows of a tile from order (R,)."""
    _, row, end, _ = locate(tile, starts, first_tiles, product)
    first = row + cute.arch.thread_idx()[0] % WARPGROUP // VECTORS
    for n in cutlass.range_constexpr(cute.size(found)):
        found[n] = order[cutlass.min(first + n * ROWS, end - 1)]


@cute.jit
def copy_vector(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, inside: cute.Tensor, product: cutlass.Constexpr
):
    """Start the copy of a vector, or of zeros where it is not `inside`, which the last step alone may have."""
    if cutlass.const_expr(product.inner % STEP == 0):
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
    width: Int32,
    product: cutlass.Constexpr,
):
    """Start the calling thread's copies of step k of its rows of x (T, inner), one group of copies, to a stage.

    Rows from `width` on, which the tile's form does not multiply, are left as they are.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    cache = cpasync.LoadCacheMode.GLOBAL
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cache), x.element_type, num_bits_per_copy=128)
    vector = cute.make_layout((VECTOR, 1))
    column = k * STEP + thread % VECTORS * VECTOR
    inside = cute.make_rmem_tensor(cute.make_layout((VECTOR, 1), stride=(0, 0)), Boolean)  # what is not is zero
    inside[0] = column < product.inner
    start = index * (product.tile.tokens * STEP) + place(thread)
    stage = cute.recast_ptr(x_stages.iterator) + cute.assume(start, divby=VECTOR)
    for n in cutlass.range_constexpr(cute.size(tokens)):
        offset = Int64(tokens[n]) * product.inner + Int64(column)
        source = cute.make_tensor(x.iterator + cute.assume(offset, divby=VECTOR), vector)
        target = cute.make_tensor(stage + n * ROWS * STEP, vector)
        if cutlass.const_expr((n + 1) * ROWS <= product.tile.widths[0]):
            copy_vector(atom, source, target, inside, product)
        elif thread // VECTORS + n * ROWS < width:
            copy_vector(atom, source, target, inside, product)
    cute.arch.cp_async_commit_group()


@cute.jit
def gather(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    w_stages: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    x_stages: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    tiles: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup: load weights, and the rows x[order // top_k] of x (T, inner), of the block's tiles.

    The numbers of the next tile's rows are loaded while this one's are copied.
    """
    tile, stride = begin_at(product)
    warp_index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
    passes = cutlass.const_expr((product.tile.tokens + ROWS - 1) // ROWS)
    tokens, following = cute.make_rmem_tensor((passes,), Int32), cute.make_rmem_tensor((passes,), Int32)
    w_to, w_from = weights_of(w_atom, w, w_stages, product)
    index, phase = Int32(0), Int32(1)
    if tile < tiles:
        find_rows(order, tile, starts, first_tiles, following, product)
    while tile < tiles:
        for n in cutlass.range_constexpr(passes):
            tokens[n] = cutlass.max(following[n], 0) // product.top_k
        expert, row, end, part = locate(tile, starts, first_tiles, product)
        width = width_of(row, end, product.tile)
        tile += stride
        find_rows(order, cutlass.min(tile, tiles - 1), starts, first_tiles, following, product)
        for k in cutlass.range(product.steps, unroll=1):
            cute.arch.mbarrier_wait(empty + index, phase)
            if warp_index == 0:
                ask_for_weights(w_atom, w_from[None, part, k, expert], w_to, index, full, product)
            copy_rows(x, tokens, k, x_stages, index, width, product)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
            index, phase = advance(index, phase, product.stages)
    cute.arch.cp_async_wait_group(0)  # no thread ends before its copies
