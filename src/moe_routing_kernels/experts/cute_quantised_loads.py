"""How `cute_quantised_product` brings blocks of codes and token rows to shared memory, step by step through the ring of stages.

One warp asks for both: a bulk copy per slab, as a block lies in one piece in memory, and a tensor map for the rows. Slabs beyond an
expert's last are copies of it, whose results are never stored.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.experts.cute_tiles import advance, locate
from moe_routing_kernels.experts.quantised_layout import DEPTH


@cute.jit
def ask_for_codes(
    w: cute.Tensor,
    w_stages: cute.Tensor,
    expert: Int32,
    part: Int32,
    k: Int32,
    index: Int32,
    full: cute.Pointer,
    product: cutlass.Constexpr,
):
    """By one warp: announce what comes to a stage, and start the copies of its blocks of w (E, slabs, blocks, words)."""
    words = cutlass.const_expr(product.codes.block_words)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), w.element_type, num_bits_per_copy=32 * words)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + index, product.loaded_bytes)
        for n in cutlass.range_constexpr(product.slabs_together):
            slab = cutlass.min(part * product.slabs_together + n, product.slabs - 1)
            offset = Int64((expert * product.slabs + slab) * product.steps + k) * words
            source = cute.make_tensor(w.iterator + cute.assume(offset, divby=32), cute.make_layout((words,)))
            cute.copy(atom, source, w_stages[None, n, index], mbar_ptr=full + index)


@cute.jit
def stream(
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
    """By one warp: load codes and packed rows x (R, inner) of the block's tiles.

    The second of two kernels that overlap loads the first codes while the first is still writing `x`.
    """
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    index, phase, ahead = Int32(0), Int32(1), Int32(product.ahead)
    if cutlass.const_expr(product.waits == "rows"):
        if tile < tiles:
            expert, _, _, part = locate(tile, starts, first_tiles, product)
            for k in cutlass.range(product.ahead, unroll=1):
                ask_for_codes(w, w_stages, expert, part, k, k, full, product)
        cute.arch.griddepcontrol_wait()  # in every block: none may end before the first kernel
    while tile < tiles:
        expert, row, _, part = locate(tile, starts, first_tiles, product)
        x_tiles = cute.local_tile(cute.domain_offset((row, 0), x), (product.tile.tokens, DEPTH), (0, None))
        x_to, x_from = cpasync.tma_partition(
            x_atom, 0, cute.make_layout(1), cute.group_modes(x_stages, 0, 2), cute.group_modes(x_tiles, 0, 2)
        )
        for k in cutlass.range(product.steps, unroll=1):
            if ahead > 0:
                ahead -= 1
            else:
                cute.arch.mbarrier_wait(empty + index, phase)
                ask_for_codes(w, w_stages, expert, part, k, index, full, product)
            cute.copy(x_atom, x_from[None, k], x_to[None, index], tma_bar_ptr=full + index)
            index, phase = advance(index, phase, product.stages)
        tile += stride
