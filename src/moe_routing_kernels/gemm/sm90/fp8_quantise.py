"""The epilogue of an upright `fp8` GEMM that quantises: activated results of the first GEMM become rows of the second.

They are rounded to bf16 and then quantised, with a scale per 128 columns of a row: the numbers that `cute_pack_fp8` makes of bf16 rows, bit
by bit, without writing and reading those. A warpgroup has 128 columns of a row, or 64 of gated ones; the largest values of 64 are exchanged
with the other warpgroup through shared memory. Bytes then pass through a warp's part of the buffer, to be stored 16 at a time.

Invariants:
- Largest values of a tile and of the next one lie in different places, so one barrier per tile is enough: a warpgroup that overwrites those
  of a tile has passed the barrier of the next, which the other warpgroup reaches after it has read them.
- A warp alone writes and reads its part of the buffer.
"""

import functools
from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.formats import LEAST_AMAX
from moe_routing_kernels.gemm.sm90.epilogue import activate
from moe_routing_kernels.gemm.sm90.fp8_mainloop import BLOCK, WARP_ROWS, Fp8Gemm
from moe_routing_kernels.gemm.sm90.fp8_upright import matrix_place
from moe_routing_kernels.gemm.sm90.schedule import MAINLOOP
from moe_routing_kernels.gemm.sm90.tile import MMA_M, WARPGROUP
from moe_routing_kernels.pack import LARGEST
from moe_routing_kernels.pack.cute_pack_fp8 import over_lanes

EXCHANGE = MAINLOOP  # the named barrier of both warpgroups
_LANES = 4  # of a token


def activated_pairs(acc: cute.Tensor, m_atom: int, gemm: Fp8Gemm) -> Iterator[tuple[int, list]]:
    """A thread's activated accumulators of an MMA: which of its tokens, 8 apart, and two columns of it; in the order (2 eights, 2 tokens, pairs of eights).

    `acc` is (2 columns, 2 tokens 8 apart, eights, m_atoms), where gates and ups are eights in turns.
    """
    for pair in range(gemm.width // 16):
        for half in range(2):
            for eight in (2 * pair, 2 * pair + 1):
                if gemm.gated:
                    both = [(acc[i, half, 2 * eight, m_atom], acc[i, half, 2 * eight + 1, m_atom]) for i in range(2)]
                else:
                    both = [(acc[i, half, eight, m_atom], None) for i in range(2)]
                yield half, [activate(gate, up, gemm.activation) for gate, up in both]


def rounded_pair(low: Any, high: Any) -> Any:
    """Two float32 in bf16, in one word: one by one, the conversion would take a slower unit."""
    code = "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[high, low])


def numbers_of(word: Any) -> list:
    """Both bf16 of a word in float32, the lower first."""
    codes = "shl.b32 {$w0}, {$r0}, 16;", "and.b32 {$w0}, {$r0}, 0xffff0000;"
    return [cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[word]) for code in codes]


def magnitudes(word: Any) -> Any:
    """The absolute values of both bf16 of a word."""
    return cute.arch.inline_ptx("abs.bf16x2 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word])


def larger(first: Any, second: Any) -> Any:
    """The larger of the lower, and of the upper, bf16 of two words."""
    code = "max.bf16x2 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[first, second])


def round_mma(acc: cute.Tensor, rounded: cute.Tensor, m_atom: int, gemm: Fp8Gemm) -> list:
    """Activate and round an MMA's accumulators to rounded (words of two, MMAs): the largest absolute value of each of a thread's two tokens."""
    of_tokens: tuple[list, list] = [], []
    for word, (half, values) in enumerate(activated_pairs(acc, m_atom, gemm)):
        rounded[word, m_atom] = rounded_pair(*values)
        of_tokens[half].append(magnitudes(rounded[word, m_atom]))
    return [cute.arch.fmax(*numbers_of(functools.reduce(larger, words))) for words in of_tokens]


def token_of(m_atom: int, half: int) -> Any:
    """The token of a tile that a thread has in half an MMA."""
    return m_atom * MMA_M + cute.arch.warp_idx() % 4 * WARP_ROWS + half * 8 + cute.arch.lane_idx() // _LANES


def scale_and_factor(amax: Any) -> tuple[Any, Any]:
    """The scale of numbers whose largest is amax, and the factor that they are multiplied by, as in `cute_pack_fp8`."""
    small = amax < LEAST_AMAX
    scale = cutlass.select_(small, Float32(1.0), amax * Float32(1 / LARGEST))
    return scale, cutlass.select_(small, Float32(1.0), LARGEST * cute.arch.rcp_approx(amax))


def in_order(words: list) -> list:
    """16 bytes of a token as four lanes have written them, each two columns of one eight and two of the next -> as columns follow each other."""
    first = [(words[n] & 0xFFFF) | (words[n + 1] << 16) for n in (0, 2)]
    return first + [(words[n] >> 16) | (words[n + 1] >> 16 << 16) for n in (0, 2)]


def quantise_part(words: list, factors: cute.Tensor, of_warp: cute.Pointer, pitch: int) -> None:
    """By a warp: write 16 tokens and 64 columns, two numbers per word, times the factors (2,) of a thread's tokens, as e4m3 to `of_warp`, (token, byte)."""
    values = cute.make_rmem_tensor((2 * len(words),), Float32)
    for word, pair in enumerate(words):
        for i, number in enumerate(numbers_of(pair)):
            values[2 * word + i] = number * factors[word // 2 % 2]
    quantised = cute.make_rmem_tensor((2 * len(words),), Float8E4M3FN)
    quantised.store(values.load().to(Float8E4M3FN))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16)
    pairs = cute.recast_tensor(quantised, BFloat16)  # the matrices' elements are two bytes
    place = matrix_place(cute.arch.lane_idx(), pitch, VECTOR_BYTES)
    for n in range(2):
        target = cute.recast_ptr(
            of_warp + cute.assume(place + n * 2 * VECTOR_BYTES, divby=VECTOR_BYTES), dtype=BFloat16
        )
        fragment = cute.make_tensor(pairs.iterator + n * 8, cute.make_layout(8))
        cute.copy(atom, fragment, cute.make_tensor(target, cute.make_layout(8)))


@cute.jit
def store_part(
    of_warp: cute.Pointer,
    out: cute.Tensor,
    row: Int32,
    end: Int32,
    column: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warp: store 16 tokens times 64 columns of `of_warp` to rows `row` to `end` of out (R, columns) from `column` on."""
    lane = cute.arch.lane_idx()
    lanes = cutlass.const_expr(MMA_M // VECTOR_BYTES)  # of a token
    token, part = lane // lanes, lane % lanes * VECTOR_BYTES
    for n in cutlass.range_constexpr(WARP_ROWS * lanes // WARP):
        at = token + n * (WARP // lanes)
        if (row + at < end) & (column + part < gemm.columns):
            source = of_warp + cute.assume(at * gemm.epi_pitch + part, divby=VECTOR_BYTES)
            vector = cute.make_rmem_tensor((4,), Uint32)
            cute.autovec_copy(cute.make_tensor(cute.recast_ptr(source, dtype=Uint32), cute.make_layout(4)), vector)
            words = in_order([vector[i] for i in range(4)])
            for i in cutlass.range_constexpr(4):
                vector[i] = words[i]
            offset = Int64(row + at) * gemm.columns + Int64(column + part)
            target = out.iterator + cute.assume(offset, divby=VECTOR_BYTES)
            cute.autovec_copy(vector, cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(4)))


@cute.jit
def store(
    acc: cute.Tensor,
    buffer: cute.Tensor,
    places: cute.Tensor,
    slot: Int32,
    out: cute.Tensor,
    out_scales: cute.Tensor,
    row: Int32,
    end: Int32,
    column: Int32,
    share: Int32,
    gemm: cutlass.Constexpr,
):
    """Activate, round and quantise a warpgroup's accumulators, and store them to rows `row` to `end` of bytes out (R, columns) from `column` on.

    Their scales go to out_scales (R, blocks of columns).
    """
    m_atoms, lane = cutlass.const_expr(gemm.mmas), cute.arch.lane_idx()
    rounded = cute.make_rmem_tensor((gemm.width // 4, m_atoms), Uint32)
    shared = cutlass.const_expr(gemm.width < BLOCK)  # both warpgroups have columns of a scale
    first = row + cute.arch.warp_idx() % 4 * WARP_ROWS
    for m_atom in cutlass.range_constexpr(m_atoms):
        # Rows beyond the last are rounded, too: without them words of this MMA and accumulators of the next spill.
        largest = round_mma(acc, rounded, m_atom, gemm)
        for half in cutlass.range_constexpr(2):
            amax = over_lanes(largest[half], _LANES)
            if lane % _LANES == 0:
                places[token_of(m_atom, half), share, slot] = amax
    if cutlass.const_expr(shared):
        cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=2 * WARPGROUP)
    else:
        cute.arch.sync_warp()
    of_warp = buffer.iterator + cute.assume(cute.arch.warp_idx() % 4 * (WARP_ROWS * gemm.epi_pitch), divby=VECTOR_BYTES)
    writes = (lane % _LANES == 0) & (column < gemm.columns)
    if cutlass.const_expr(shared):
        writes = writes & (share == 0)
    for m_atom in cutlass.range_constexpr(m_atoms):
        if first + m_atom * MMA_M < end:
            factors = cute.make_rmem_tensor((2,), Float32)
            for half in cutlass.range_constexpr(2):
                amax = places[token_of(m_atom, half), share, slot]
                if cutlass.const_expr(shared):
                    amax = cute.arch.fmax(amax, places[token_of(m_atom, half), 1 - share, slot])
                scale, factors[half] = scale_and_factor(amax)
                token = row + token_of(m_atom, half)
                if writes & (token < end):
                    out_scales[Int64(token), column // BLOCK] = scale
            for start in cutlass.range_constexpr(0, gemm.width, MMA_M):
                cute.arch.sync_warp()  # all lanes have read the previous contents
                words = [rounded[start // 4 + n, m_atom] for n in range(MMA_M // 4)]
                quantise_part(words, factors, of_warp, gemm.epi_pitch)
                cute.arch.sync_warp()
                store_part(of_warp, out, first + m_atom * MMA_M, end, column + start, gemm)
