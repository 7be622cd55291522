"""The main loop of an upright `fp8` GEMM whose tiles lie across its warpgroups (`Tile.across`): each has 64 tokens and all weights of a tile.

Where warpgroups divide the weights, both have columns of a scale of the result and meet once per tile to exchange their largest values; from
then on they wait for the tensor cores and scale at the same time. Here they meet nowhere but at stages: if the first begins a tile `lead`
sums ahead, it stays ahead, and one scales or stores while the other multiplies. They read as much from shared memory, and all sums and
factors are those of `fp8_upright`, in the same order.

A stage's weights are two MMAs of 128 rows, or one of 192, whose rows have the scales of two blocks.

Invariants:
- The wait for a stage comes ahead of the wait for the MMAs of the one before: both need nothing of each other, and the first is over soon.
- The scales of a stage are read before that, too, so all of its reads are over once its MMAs are.
- A warpgroup without tokens waits for each stage and releases it, as its arrivals are counted.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from moe_routing_kernels.gemm.sm90.fp8_mainloop import BLOCK, Fp8Gemm, fragments, multiply_block
from moe_routing_kernels.gemm.sm90.fp8_upright import announce, await_lead, first_token, promote, scale_places
from moe_routing_kernels.gemm.sm90.schedule import advance, release
from moe_routing_kernels.gemm.sm90.tile import MMA_M


def places_of(expert: Any, column: Any, gemm: Fp8Gemm) -> list[list]:
    """For each MMA of a stage's weights, of a tile from `column` on: where the scales of their blocks begin among those of all (E, N / 128, K / 128)."""
    if gemm.mma_rows > BLOCK:
        return [[scale_places(expert, column + shift, gemm)[0] for shift in (0, BLOCK)]]
    columns = gemm.width * gemm.mma_rows // gemm.tile.m  # of an MMA
    first = scale_places(expert, column, gemm)
    if gemm.gated and gemm.columns % BLOCK == 0:  # all gates of a tile have one scale, and so have its ups
        return [first, first]
    return [first, scale_places(expert, column + columns, gemm)]


def kinds_of(column: int, gemm: Fp8Gemm) -> list[int]:
    """For the eights of an MMA, which of a token's factors is their own, in a tile from `column` on: gates and ups in turns, or block by block."""
    eights = gemm.mma_rows // 8
    if gemm.mma_rows == BLOCK:
        return [eight % 2 if gemm.gated else 0 for eight in range(eights)]
    return [(column % BLOCK + 8 * eight) // BLOCK for eight in range(eights)]


@cute.jit
def load_weight_scales(w_scales: cute.Tensor, scales: cute.Tensor, places: list, k: Int32):
    """Load the scales of block k to w_scales (factors per token, MMAs)."""
    for n in cutlass.range_constexpr(len(places)):
        for kind in cutlass.range_constexpr(len(places[0])):
            if cutlass.const_expr(n and places[n] is places[0]):
                w_scales[kind, n] = w_scales[kind, 0]
            else:
                w_scales[kind, n] = scales[places[n][kind] + k]


@cute.jit
def load_token_scales(of_tokens: cute.Tensor, x_scales: cute.Tensor, token: Int32, index: Int32):
    """Load the scales of a thread's two tokens from those of a stage to of_tokens (2,)."""
    for half in cutlass.range_constexpr(2):
        of_tokens[half] = x_scales[token + 8 * half, index]


@cute.jit
def sums(
    kinds: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    x_scales: cute.Tensor,
    scales: cute.Tensor,
    places: list,
    acc: cute.Tensor,
    share: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup that has tokens: the main loop of a tile, where `kinds` are as for `promote`."""
    rows, count, factors_of = cutlass.const_expr(gemm.mma_rows), cutlass.const_expr(len(places)), len(places[0])
    of_share = cute.local_tile(x_stages, (MMA_M, BLOCK, gemm.stages), (share, 0, 0))
    a, b = fragments(of_share, w_stages, rows)
    block_acc = cute.make_rmem_tensor((2, 2, rows // 8), Float32)
    parts = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, rows // 8, count)))
    factors = cute.make_rmem_tensor((2, factors_of), Float32)
    w_scales, of_tokens = (cute.make_rmem_tensor(shape, Float32) for shape in ((factors_of, count), (2,)))
    # Through a shuffle, as ptxas would work it out from the thread's number in each stage, between MMAs.
    token = cute.arch.shuffle_sync(first_token(share), cute.arch.lane_idx())
    await_lead(share, gemm)
    load_weight_scales(w_scales, scales, places, Int32(0))
    cute.arch.mbarrier_wait(full + index, phase)
    load_token_scales(of_tokens, x_scales, token, index)
    for k in cutlass.range(gemm.k_tiles, unroll=1):
        following, following_phase = advance(index, phase, gemm.stages)
        for n in cutlass.range_constexpr(count):
            multiply_block(a, b, block_acc, 0, index, n)
            for half in cutlass.range_constexpr(2):
                for kind in cutlass.range_constexpr(factors_of):
                    factors[half, kind] = of_tokens[half] * w_scales[kind, n]
            if cutlass.const_expr(n == count - 1):
                if k + 1 < gemm.k_tiles:
                    load_weight_scales(w_scales, scales, places, k + 1)
                    cute.arch.mbarrier_wait(full + following, following_phase)
                    load_token_scales(of_tokens, x_scales, token, following)
            warpgroup.wait_group(0)
            announce(n, k, share, gemm)
            if cutlass.const_expr(n == count - 1):
                release(empty + index)
            promote(parts, block_acc, n, factors, kinds)
        index, phase = following, following_phase


@cute.jit
def mainloop(
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    x_scales: cute.Tensor,
    scales: cute.Tensor,
    expert: Int32,
    column: Int32,
    acc: cute.Tensor,
    live: Int32,
    share: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup: add the gemm of a tile's weights (rows, 128, stages) and of its own half of the tokens (tokens, 128, stages) to acc.

    The half has no tokens if `live` is not positive. `scales` are those of all weights, flat, and `column` is the tile's first.
    """
    places = places_of(expert, column, gemm)
    arguments = (w_stages, x_stages, x_scales, scales, places, acc, share, full, empty, index, phase, gemm)
    if live > 0:
        if cutlass.const_expr(gemm.mma_rows == BLOCK):
            sums(kinds_of(0, gemm), *arguments)
        elif column % BLOCK == 0:
            sums(kinds_of(0, gemm), *arguments)
        else:  # every other tile begins in the middle of a block
            sums(kinds_of(MMA_M, gemm), *arguments)
    else:
        await_lead(share, gemm)
        for _ in cutlass.range(gemm.k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + index, phase)
            cute.arch.sync_warp()
            release(empty + index)
            index, phase = advance(index, phase, gemm.stages)
