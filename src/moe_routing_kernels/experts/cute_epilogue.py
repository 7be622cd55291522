"""Both ends of a tile of `cute_swapped`: sums as (weight row, token) begin with their biases; they are activated, rounded, transposed
and stored as (token, column).

Invariant: a warpgroup's buffer is written and read by its own threads alone, between barriers of that warpgroup, and never by TMA:
no proxy fence is needed.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from moe_routing_kernels.experts import activation_of
from moe_routing_kernels.experts.cute_tiles import VECTOR, WARPGROUP, Product

LOG2_E = math.log2(math.e)


def activate(gate: Any, up: Any, activation: str) -> Any:
    """An activation of float32 sums; `relu2` and none look at the gate alone."""
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


def bias_of(column: Any, slab: int, half: int, product: Product) -> tuple[Any, Any]:
    """Of a thread's rows of weights in half a slab: the column of the result, and the place in the expert's biases (N,).

    `column` is the warpgroup's first.
    """
    of_warp = cute.arch.warp_idx() % 4 * (8 if product.gated else 16) + cute.arch.lane_idx() // 4
    column = column + slab * (product.width // product.tile.slabs) + of_warp
    if product.gated:
        return column, column + half * product.columns  # ups are behind all gates
    return column + half * 8, column + half * 8


@cute.jit
def begin(sums: cute.Tensor, biases: cute.Tensor | None, expert: Int32, column: Int32, product: cutlass.Constexpr):
    """Set a warpgroup's sums, (2 tokens, 2 rows 8 apart, tokens / 8, slabs), to the biases (E, N) of their rows, or to zero."""
    if cutlass.const_expr(biases is None):
        sums.fill(0.0)
    else:
        for slab in cutlass.range_constexpr(product.tile.slabs):
            for half in cutlass.range_constexpr(2):
                mine, place = bias_of(column, slab, half, product)
                value = Float32(0.0)
                if mine < product.columns:
                    value = Float32(biases[expert, place])
                sums[None, half, None, slab].fill(value)


def blocks_of(sums: cute.Tensor, slab: int, column: int, product: Product) -> list[tuple[Any, Any]]:
    """A thread's elements of the 8 x 8 blocks of the result that its warp's 16 rows of a slab and 8 tokens make.

    `sums` is (2 tokens, 2 rows 8 apart, tokens / 8, slabs).
    """
    both = [[sums[token, half, column, slab] for token in range(2)] for half in range(2)]
    if product.gated:
        return [tuple(activate(both[0][token], both[1][token], product.activation) for token in range(2))]
    return [tuple(activate(value, None, product.activation) for value in half) for half in both]


@cute.jit
def transpose(sums: cute.Tensor, buffer: cute.Tensor, chunk: cutlass.Constexpr, product: cutlass.Constexpr):
    """Write a chunk of tokens of a warpgroup's sums, activated and rounded, to `buffer` as (token, column)."""
    dtype = buffer.element_type
    lane = cute.arch.lane_idx()
    warp_of_group = cute.arch.warp_idx() % 4
    columns = cutlass.const_expr(product.chunk // 8)  # of 8 tokens
    halves = cutlass.const_expr(1 if product.gated else 2)  # blocks of 8 rows that a warp has of a slab
    matrices = cutlass.const_expr(min(4, halves * (columns & -columns)))  # of one instruction
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices), dtype)
    matrix = (lane // 8) % matrices  # lanes 8 q to 8 q + 7 give the addresses of the q-th block
    token = matrix // halves * 8 + lane % 8
    place = token * product.pitch + (warp_of_group * halves + matrix % halves) * 8
    for slab in cutlass.range_constexpr(product.tile.slabs):
        for first in cutlass.range_constexpr(0, columns, matrices // halves):
            values = cute.make_rmem_tensor((2 * matrices,), Float32)
            for n in cutlass.range_constexpr(matrices // halves):
                blocks = blocks_of(sums, slab, chunk * columns + first + n, product)
                for half in cutlass.range_constexpr(halves):
                    for i in cutlass.range_constexpr(2):
                        values[(n * halves + half) * 2 + i] = blocks[half][i]
            rounded = cute.make_rmem_tensor((2 * matrices,), dtype)
            rounded.store(values.load().to(dtype))
            offset = place + (first * 8 * product.pitch + slab * (product.width // product.tile.slabs))
            target = buffer.iterator + cute.assume(offset, divby=VECTOR)
            cute.copy(atom, rounded, cute.make_tensor(target, rounded.layout))


@cute.jit
def store_chunk(buffer: cute.Tensor, out: cute.Tensor, row: Any, end: Any, column: Any, product: cutlass.Constexpr):
    """Copy a chunk of (token, column) from `buffer` to rows `row` to `end` of out (R, columns) from `column` on."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    lanes = cutlass.const_expr(product.width // VECTOR)  # of a token
    passes = cutlass.const_expr(math.ceil(product.chunk * lanes / WARPGROUP))
    token, part = thread // lanes, thread % lanes * VECTOR
    held = cute.make_rmem_tensor((VECTOR, passes), out.element_type)
    for n in cutlass.range_constexpr(passes):
        mine = token + n * (WARPGROUP // lanes)
        source = buffer.iterator + cute.assume(mine * product.pitch + part, divby=VECTOR)
        vector = cute.make_tensor(source, cute.make_layout(VECTOR))
        if cutlass.const_expr(product.chunk * lanes % WARPGROUP == 0):
            cute.autovec_copy(vector, held[None, n])
        else:
            if mine < product.chunk:
                cute.autovec_copy(vector, held[None, n])
    for n in cutlass.range_constexpr(passes):
        mine = token + n * (WARPGROUP // lanes)
        if (mine < product.chunk) & (row + mine < end) & (column + part < product.columns):
            offset = Int64(row + mine) * product.columns + Int64(column + part)
            target = out.iterator + cute.assume(offset, divby=VECTOR)
            cute.autovec_copy(held[None, n], cute.make_tensor(target, cute.make_layout(VECTOR)))
