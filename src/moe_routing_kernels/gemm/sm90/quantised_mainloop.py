"""The main loop of `quantised`: a warpgroup dequantises a tile's codes in registers and multiplies them, stage by stage.

The registers are the left operand of wgmma, which reads only the tokens from shared memory. Half of a stage, 4 MMAs of 16 per 64 rows, is
issued at a time. While the tensor cores work at a half, the next one is dequantised in other registers. With more than two batches per
stage ptxas (13.0) makes each instruction wait for the one before: it takes a loop apart where branches do, and finds registers written
while others are read. The release of a stage is such a branch.

Invariants:
- Registers of a batch are written after the `wgmma.wait_group` that covers the batch before the last, which read them.
- A stage is released after the `wgmma.wait_group` that covers all its batches: its codes were in registers before they began.
- Ping-pong, a warpgroup waits for its turn before its first stage and hands it on after its last MMA.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from moe_routing_kernels.gemm.sm90.dequantise import both, masks, register, subtrahends
from moe_routing_kernels.gemm.sm90.mainloop import accumulator_of, begin_turn, end_turn
from moe_routing_kernels.gemm.sm90.quantised_layout import DEPTH, Codes
from moe_routing_kernels.gemm.sm90.quantised_tile import K16, QuantisedGemm
from moe_routing_kernels.gemm.sm90.schedule import advance, release
from moe_routing_kernels.gemm.sm90.tile import MMA_M, WARPGROUP

BATCHES = 2  # of a stage
BATCH = K16 // BATCHES  # MMAs
_VECTOR = 4  # words that a thread loads at a time
FRAGMENT = 4  # registers of an MMA's left operand


def words_of(block: cute.Tensor, batch: int, gemm: QuantisedGemm) -> cute.Tensor:
    """A thread's words of codes of a batch."""
    count = gemm.codes.words // BATCHES
    width = min(count, _VECTOR)
    words = cute.make_rmem_tensor((width, count // width), Uint32)
    for n in range(count // width):
        vector, inside = divmod(batch * count + n * width, _VECTOR)
        place = (vector * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP) * _VECTOR + inside
        source = block.iterator + cute.assume(place, divby=width)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((width,))), words[None, n])
    return words


def parameters_of(block: cute.Tensor, gemm: QuantisedGemm) -> cute.Tensor:
    """A thread's words of scales and zero points of a block: (words of a group, groups), each of two rows 8 apart."""
    codes = gemm.codes
    words = cute.make_rmem_tensor((codes.parameters, codes.groups), Uint32)
    each = codes.parameters * codes.groups
    place = codes.words * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP // 4 * each
    source = block.iterator + cute.assume(place, divby=each)
    flat = cute.make_tensor(words.iterator, cute.make_layout((each,)))
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((each,))), flat)
    return words


def factors(parameters: cute.Tensor, group: int, codes: Codes) -> list[tuple[Any, dict]]:
    """For both rows of a thread: the scale of a group in both halves of a register, and the number subtracted from its codes."""
    scales = [both(parameters[0, group], half) for half in range(2)]
    return list(zip(scales, offsets_of(parameters, group, codes), strict=True))


def offsets_of(parameters: cute.Tensor, group: int, codes: Codes) -> list[dict]:
    """For both rows of a thread: the number subtracted from the codes of a group."""
    zeros = [both(parameters[1, group], half) if codes.zeros else None for half in range(2)]
    return [subtrahends(zeros[half], codes) for half in range(2)]


def dequantise(blocks: list, parameters: list, batch: int, mask: dict[int, Any], gemm: QuantisedGemm) -> cute.Tensor:
    """The left operand of a batch, (registers of an MMA, m_atoms, MMAs) of two numbers each, by the `masks` of codes."""
    codes, m_atoms = gemm.codes, gemm.tile.m_atoms
    operand = cute.make_rmem_tensor((FRAGMENT, m_atoms, BATCH), Uint32)
    for m_atom in range(m_atoms):
        words = words_of(blocks[m_atom], batch, gemm)
        of_group = {}  # factors of the groups that the batch has
        for step in range(BATCH):
            group = (batch * BATCH + step) * codes.groups // K16
            if group not in of_group:
                of_group[group] = factors(parameters[m_atom], group, codes)
            for n in range(FRAGMENT):
                word, place = divmod(step * FRAGMENT + n, codes.fields)
                operand[n, m_atom, step] = register(words[word], place, *of_group[group][n % 2], mask, codes)
    return operand


@cute.jit
def mainloop(
    tokens: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    acc: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    share: Int32,
    consumer: Int32,
    zero: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup: add the gemm of its share of a tile's weights and of its first `tokens` tokens to acc, from stage `index` on.

    w_stages (words, m_blocks, stages) Uint32. `zero` is that of `masks`.
    """
    tile, stages, dtype = cutlass.const_expr(gemm.tile), cutlass.const_expr(gemm.stages), x_stages.element_type
    k_major, registers = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (MMA_M, tokens, 16), registers, k_major, k_major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(cute.local_tile(x_stages, (tokens, DEPTH, stages), (0, 0, 0))))
    results = accumulator_of(acc, tokens, gemm)
    a_layout = cute.make_layout(
        ((2, 2, 2), tile.m_atoms, BATCH), stride=((1, 2, 4), 2 * FRAGMENT, 2 * FRAGMENT * tile.m_atoms)
    )
    begin_turn(consumer, gemm)
    mask = masks(Uint32(zero), gemm.codes)
    previous = index
    for k in cutlass.range(gemm.k_tiles, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        blocks = [w_stages[None, share * tile.m_atoms + m_atom, index] for m_atom in range(tile.m_atoms)]
        parameters = [parameters_of(block, gemm) for block in blocks]
        for batch in cutlass.range_constexpr(BATCHES):
            a = dequantise(blocks, parameters, batch, mask, gemm)
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
    end_turn(consumer, gemm)
    warpgroup.wait_group(0)
    release(empty + previous)
