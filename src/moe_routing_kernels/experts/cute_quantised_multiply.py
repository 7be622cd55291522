"""The main loop of `cute_quantised_product`: a warpgroup dequantises a tile's codes in registers and multiplies them, stage by stage.

The registers are the left operand of wgmma, which reads only the tokens from shared memory. Half of a stage, 4 steps of 16 per slab, is
issued at a time. While the tensor cores work at a half, the next one is dequantised in other registers. With more than two batches per
stage ptxas (13.0) makes each instruction wait for the one before: it takes a loop apart where branches do, and finds registers written
while others are read. The release of a stage is such a branch.

Invariants:
- Registers of a batch are written after the `wgmma.wait_group` that covers the batch before the last, which read them.
- A stage is released after the `wgmma.wait_group` that covers all its batches: its codes were in registers before they began.
- Ping-pong, a warpgroup waits for its turn before its first stage and hands it on after its last instruction.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from moe_routing_kernels.experts.cute_dequantise import both, masks, register, subtrahends
from moe_routing_kernels.experts.cute_multiply import TURN, release
from moe_routing_kernels.experts.cute_quantised_tiles import K16, QuantisedProduct
from moe_routing_kernels.experts.cute_tiles import SLAB, WARPGROUP, advance
from moe_routing_kernels.experts.quantised_layout import DEPTH, Codes

BATCHES = 2  # of a stage
BATCH = K16 // BATCHES  # steps of 16
_VECTOR = 4  # words that a thread loads at a time
FRAGMENT = 4  # registers of a step of 16


def words_of(block: cute.Tensor, batch: int, product: QuantisedProduct) -> cute.Tensor:
    """A thread's words of codes of a batch."""
    count = product.codes.words // BATCHES
    width = min(count, _VECTOR)
    held = cute.make_rmem_tensor((width, count // width), Uint32)
    for n in range(count // width):
        vector, inside = divmod(batch * count + n * width, _VECTOR)
        place = (vector * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP) * _VECTOR + inside
        source = block.iterator + cute.assume(place, divby=width)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((width,))), held[None, n])
    return held


def parameters_of(block: cute.Tensor, product: QuantisedProduct) -> cute.Tensor:
    """A thread's words of scales and zero points of a block: (words of a group, groups), each of two rows 8 apart."""
    codes = product.codes
    held = cute.make_rmem_tensor((codes.parameters, codes.groups), Uint32)
    each = codes.parameters * codes.groups
    place = codes.words * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP // 4 * each
    source = block.iterator + cute.assume(place, divby=each)
    flat = cute.make_tensor(held.iterator, cute.make_layout((each,)))
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((each,))), flat)
    return held


def factors(parameters: cute.Tensor, group: int, codes: Codes) -> list[tuple[Any, dict]]:
    """Of both rows of a thread: the scale of a group in both halves of a register, and what is subtracted from its codes."""
    scales = [both(parameters[0, group], half) for half in range(2)]
    return list(zip(scales, offsets_of(parameters, group, codes), strict=True))


def offsets_of(parameters: cute.Tensor, group: int, codes: Codes) -> list[dict]:
    """Of both rows of a thread: what is subtracted from the codes of a group."""
    zeros = [both(parameters[1, group], half) if codes.zeros else None for half in range(2)]
    return [subtrahends(zeros[half], codes) for half in range(2)]


def dequantise(
    blocks: list, parameters: list, batch: int, mask: dict[int, Any], product: QuantisedProduct
) -> cute.Tensor:
    """The left operand of a batch, (registers of a step, slabs, steps) of two numbers each, by the `masks` of codes."""
    codes, slabs = product.codes, product.tile.slabs
    operand = cute.make_rmem_tensor((FRAGMENT, slabs, BATCH), Uint32)
    for slab in range(slabs):
        words = words_of(blocks[slab], batch, product)
        known = {}  # factors of the groups that the batch has
        for step in range(BATCH):
            group = (batch * BATCH + step) * codes.groups // K16
            if group not in known:
                known[group] = factors(parameters[slab], group, codes)
            for n in range(FRAGMENT):
                word, place = divmod(step * FRAGMENT + n, codes.fields)
                operand[n, slab, step] = register(words[word], place, *known[group][n % 2], mask, codes)
    return operand


@cute.jit
def multiply(
    tokens: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    sums: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    share: Int32,
    consumer: Int32,
    zero: Int32,
    product: cutlass.Constexpr,
):
    """By a warpgroup: add the product of its share of a tile's weights and of its first `tokens` tokens to sums, from stage `index` on.

    w_stages (words, slabs, stages) Uint32; sums have room for the tile's widest form: (2 tokens, 2 rows 8 apart, tokens / 8, slabs).
    `zero` is that of `masks`.
    """
    tile, stages, dtype = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages), x_stages.element_type
    k_major, registers = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (SLAB, tokens, 16), registers, k_major, k_major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    mine = mma.get_slice(0)
    b = mma.make_fragment_B(mine.partition_B(cute.local_tile(x_stages, (tokens, DEPTH, stages), (0, 0, 0))))
    layout = cute.make_layout(
        ((2, 2, tokens // 8), tile.slabs, 1), stride=((1, 2, 4), SLAB * tile.tokens // WARPGROUP, 0)
    )
    results = cute.make_tensor(sums.iterator, layout)
    a_layout = cute.make_layout(
        ((2, 2, 2), tile.slabs, BATCH), stride=((1, 2, 4), 2 * FRAGMENT, 2 * FRAGMENT * tile.slabs)
    )
    if cutlass.const_expr(tile.pingpong):
        cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=2 * WARPGROUP)
    mask = masks(Uint32(zero), product.codes)
    previous = index
    for k in cutlass.range(product.steps, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        blocks = [w_stages[None, share * tile.slabs + slab, index] for slab in range(tile.slabs)]
        parameters = [parameters_of(block, product) for block in blocks]
        for batch in cutlass.range_constexpr(BATCHES):
            a = dequantise(blocks, parameters, batch, mask, product)
            operand = cute.make_tensor(cute.recast_ptr(a.iterator, dtype=dtype), a_layout)
            warpgroup.fence()
            for n in cutlass.range_constexpr(BATCH):
                cute.gemm(mma, results, operand[None, None, n], b[None, None, batch * BATCH + n, index], results)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if cutlass.const_expr(batch == 0):
                if k > 0:
                    release(empty + previous)
        previous = index
        index, phase = advance(index, phase, stages)
    if cutlass.const_expr(tile.pingpong):
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
    warpgroup.wait_group(0)
    release(empty + previous)
