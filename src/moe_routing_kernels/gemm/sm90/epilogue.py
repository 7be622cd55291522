"""Both ends of a tile: accumulators begin with their biases; in the end they are activated, rounded, transposed and stored.

Accumulators lie as (weight row, token) and results as (token, column). A warpgroup transposes 8 x 8 blocks with `stmatrix` into its buffer,
some tokens at a time, and then writes 16 bytes per thread. With `Tile.by_warp` no warp waits for another: each transposes and writes its own
16 columns, 32 bytes of a row at a time.

Invariant: only a warpgroup's (or warp's) own threads access its buffer, between its barriers, and TMA never does: no proxy fence is needed.
"""

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.gemm.sm90.tile import MMA_M, VECTOR, WARP_BUFFER, WARPGROUP, GroupedGemm

LOG2_E = math.log2(math.e)
# `pairs(m_atom, n)`: a thread's pairs of neighbouring tokens in the 8 x 8 blocks of the result that its warp has of an MMA and the n-th 8 tokens.
Pairs = Callable[[int, int], list[tuple[Any, Any]]]


def activate(gate: Any, up: Any, activation: str) -> Any:
    """An activation in float32; `relu2` and none look at the gate alone."""
    if activation == "":
        return gate
    known = activation_of(activation)
    if known.value == "relu2":
        positive = cutlass.max(gate, Float32(0.0))
        return positive * positive
    if known.limit is not None:
        gate, up = clamp(gate, up, known.limit)
    if known.shift:
        up = up + known.shift
    slope = gate if known.alpha == 1 else known.alpha * gate
    if known.value == "gelu":  # made of tanh: x (1 + tanh(z)) / 2 = x sigmoid(2 z)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * cute.arch.rcp_approx(1.0 + cute.math.exp2(slope * -LOG2_E, fastmath=True)) * up


def clamp(gate: Any, up: Any, limit: float) -> tuple[Any, Any]:
    """The smaller of gate and limit, and up no larger in size than that."""
    gate = cutlass.min(gate, Float32(limit))
    return gate, cutlass.max(cutlass.min(up, Float32(limit)), Float32(-limit))


def bias_of(column: Any, m_atom: int, half: int, gemm: GroupedGemm) -> tuple[Any, Any]:
    """For one of a thread's two rows of an MMA: the column of the result, and the place in the expert's biases (N,).

    `column` is the warpgroup's first.
    """
    if gemm.blocked:
        column = column + cute.arch.warp_idx() % 4 * 16 + half * 8 + cute.arch.lane_idx() // 4
        return column, column + m_atom * gemm.columns  # an MMA of gates, and one of their ups
    of_warp = cute.arch.warp_idx() % 4 * (8 if gemm.gated else 16) + cute.arch.lane_idx() // 4
    column = column + m_atom * (gemm.width // gemm.tile.m_atoms) + of_warp
    if gemm.gated:
        return column, column + half * gemm.columns  # ups follow all gates
    return column + half * 8, column + half * 8


@cute.jit
def init_accumulator(
    acc: cute.Tensor, biases: cute.Tensor | None, expert: Int32, column: Int32, gemm: cutlass.Constexpr
):
    """Set a warpgroup's accumulators, (2 tokens, 2 rows 8 apart, tokens / 8, m_atoms), to the biases (E, N) of their rows, or to zero."""
    if cutlass.const_expr(biases is None):
        acc.fill(0.0)
    else:
        for m_atom in cutlass.range_constexpr(gemm.tile.m_atoms):
            for half in cutlass.range_constexpr(2):
                of_row, place = bias_of(column, m_atom, half, gemm)
                value = Float32(0.0)
                if of_row < gemm.columns:
                    value = Float32(biases[expert, place])
                acc[None, half, None, m_atom].fill(value)


def activated(acc: cute.Tensor, gemm: GroupedGemm) -> Pairs:
    """The pairs of activated accumulators (2 tokens, 2 rows 8 apart, tokens / 8, m_atoms), whose two rows are a gate and its up, if gated.

    Where a warp stores by itself, the two MMAs are: a thread then has two rows of the result, as without a gate.
    """

    def pairs(m_atom: int, n: int) -> list[tuple[Any, Any]]:
        if gemm.blocked:
            gates, ups = ([[acc[token, half, n, part] for token in range(2)] for half in range(2)] for part in range(2))
            return [
                tuple(activate(gates[half][token], ups[half][token], gemm.activation) for token in range(2))
                for half in range(2)
            ]
        rows = [[acc[token, half, n, m_atom] for token in range(2)] for half in range(2)]
        if gemm.gated:
            return [tuple(activate(rows[0][token], rows[1][token], gemm.activation) for token in range(2))]
        return [tuple(activate(value, None, gemm.activation) for value in row) for row in rows]

    return pairs


@cute.jit
def transpose(
    pairs: cutlass.Constexpr,
    buffer: cute.Tensor,
    start: cutlass.Constexpr,
    subtile: cutlass.Constexpr,
    gemm: cutlass.Constexpr,
):
    """Round a subtile's `pairs` and write them to `buffer` from element `start` on, as (token, column)."""
    dtype = buffer.element_type
    lane = cute.arch.lane_idx()
    warp_of_group = cute.arch.warp_idx() % 4
    eights = cutlass.const_expr(gemm.epi_tokens // 8)  # of tokens
    halves = cutlass.const_expr(1 if gemm.gated else 2)  # blocks of 8 rows that a warp has of an MMA
    matrices = cutlass.const_expr(min(4, halves * (eights & -eights)))  # of one instruction
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices), dtype)
    matrix = (lane // 8) % matrices  # lanes 8 q to 8 q + 7 give the addresses of the q-th block
    token = matrix // halves * 8 + lane % 8
    place = token * gemm.epi_pitch + (warp_of_group * halves + matrix % halves) * 8
    for m_atom in cutlass.range_constexpr(gemm.tile.m_atoms):
        for first in cutlass.range_constexpr(0, eights, matrices // halves):
            values = cute.make_rmem_tensor((2 * matrices,), Float32)
            blocks = [pair for n in range(matrices // halves) for pair in pairs(m_atom, subtile * eights + first + n)]
            for i in cutlass.range_constexpr(2 * matrices):
                values[i] = blocks[i // 2][i % 2]
            rounded = cute.make_rmem_tensor((2 * matrices,), dtype)
            rounded.store(values.load().to(dtype))
            offset = place + (start + first * 8 * gemm.epi_pitch + m_atom * (gemm.width // gemm.tile.m_atoms))
            target = buffer.iterator + cute.assume(offset, divby=VECTOR)
            cute.copy(atom, rounded, cute.make_tensor(target, rounded.layout))


def vector_at(tensor: cute.Tensor, row: Any, column: Any, pitch: int) -> cute.Tensor:
    """8 elements of a row of a contiguous tensor of `pitch` columns."""
    offset = Int64(row) * pitch + Int64(column)
    return cute.make_tensor(tensor.iterator + cute.assume(offset, divby=VECTOR), cute.make_layout(VECTOR))


@cute.jit
def store(
    buffer: cute.Tensor,
    start: cutlass.Constexpr,
    out: cute.Tensor,
    shift: cutlass.Constexpr,
    pitch: cutlass.Constexpr,
    row: Int32,
    end: Int32,
    column: Int32,
    gemm: cutlass.Constexpr,
):
    """Copy a subtile from element `start` of `buffer` on to rows `row` to `end` of out (R, pitch), from column `column + shift` on."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    lanes = cutlass.const_expr(gemm.width // VECTOR)  # of a token
    passes = cutlass.const_expr(math.ceil(gemm.epi_tokens * lanes / WARPGROUP))
    token, part = thread // lanes, thread % lanes * VECTOR
    values = cute.make_rmem_tensor((VECTOR, passes), out.element_type)
    for n in cutlass.range_constexpr(passes):
        at = token + n * (WARPGROUP // lanes)
        source = buffer.iterator + cute.assume(at * gemm.epi_pitch + (part + start), divby=VECTOR)
        vector = cute.make_tensor(source, cute.make_layout(VECTOR))
        if cutlass.const_expr(gemm.epi_tokens * lanes % WARPGROUP == 0):
            cute.autovec_copy(vector, values[None, n])
        else:
            if at < gemm.epi_tokens:
                cute.autovec_copy(vector, values[None, n])
    for n in cutlass.range_constexpr(passes):
        at = token + n * (WARPGROUP // lanes)
        if (at < gemm.epi_tokens) & (row + at < end) & (column + part < gemm.columns):
            cute.autovec_copy(values[None, n], vector_at(out, row + at, column + part + shift, pitch))


def place_of(token: Any, half: Any) -> Any:
    """Where in a warp's buffer 8 of a token's 16 columns lie: no two of 8 tokens share banks, nor do 4 whole ones."""
    return token * 16 + (half ^ (token // 4 % 2)) * VECTOR


@cute.jit
def store_by_warp(
    pairs: cutlass.Constexpr,
    buffer: cute.Tensor,
    out: cute.Tensor,
    blocks: cutlass.Constexpr,
    row: Int32,
    end: Int32,
    column: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warp: round `blocks` of a tile, pairs (m_atom, sixteen tokens), and store them in rows `row` to `end` of out (R, columns).

    `column` is the warpgroup's first. A block is stored once the next one is on its way through shared memory, so that none waits for it.
    """
    lane, warp_of_group = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    of_warp = buffer.iterator + cute.assume(warp_of_group * WARP_BUFFER, divby=VECTOR)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), buffer.element_type)
    to = place_of(lane // 16 * 8 + lane % 8, lane // 8 % 2)  # lanes 8 q to 8 q + 7 give the addresses of the q-th 8 x 8
    target = of_warp + cute.assume(to, divby=VECTOR)
    back = cute.assume(place_of(lane // 2, lane % 2), divby=VECTOR)
    source = cute.make_tensor(of_warp + back, cute.make_layout(VECTOR))
    first = column + (warp_of_group * 16 + lane % 2 * VECTOR)
    rounded, values = (
        [cute.make_rmem_tensor((8,), buffer.element_type) for _ in range(2)] for _ in range(2)
    )  # in turns
    round_block(pairs, blocks[0], rounded[0])
    for n in cutlass.range_constexpr(len(blocks) + 1):
        if cutlass.const_expr(n < len(blocks)):
            cute.arch.sync_warp()
            cute.copy(atom, rounded[n % 2], cute.make_tensor(target, rounded[n % 2].layout))
            cute.arch.sync_warp()
            cute.autovec_copy(source, values[n % 2])
        if cutlass.const_expr(n + 1 < len(blocks)):
            round_block(pairs, blocks[n + 1], rounded[(n + 1) % 2])
        if cutlass.const_expr(n > 0):
            m_atom, sixteen = blocks[n - 1]
            at, of_row = row + (sixteen * 16 + lane // 2), first + m_atom * MMA_M
            if (at < end) & (of_row < gemm.columns):
                cute.autovec_copy(values[(n - 1) % 2], vector_at(out, at, of_row, gemm.columns))


@cute.jit
def round_block(pairs: cutlass.Constexpr, block: cutlass.Constexpr, rounded: cute.Tensor):
    """Activate and round 16 tokens by 16 columns of a warp."""
    m_atom, sixteen = block
    values = cute.make_rmem_tensor((8,), Float32)
    found = [pair for n in range(2) for pair in pairs(m_atom, 2 * sixteen + n)]
    for i in cutlass.range_constexpr(8):
        values[i] = found[i // 2][i % 2]
    rounded.store(values.load().to(rounded.element_type))
