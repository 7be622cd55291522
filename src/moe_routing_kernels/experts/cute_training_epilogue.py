"""What the products of `cute_training` do with a tile's sums, (weight row, token), in chunks of tokens: as (token, column) through a buffer.

- The first product of the forward pass stores what it activates, and its sums, gates beside ups, which the backward pass needs.
- The gradient of the activated rows is multiplied by the activation's slope, which takes those sums: stored are the gradient of the
  sums, and what was activated, again. It is rounded to 16 bits on the way, as it is where a matrix product of its own computes it.
  A tile goes to the buffer as a whole, because the slope needs the registers that its sums have: chunk by chunk, they spill.

Invariant: as in `cute_epilogue`, a warpgroup's buffer is its own, and TMA never touches it.
"""

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from moe_routing_kernels.experts import activation_of
from moe_routing_kernels.experts.cute_epilogue import LOG2_E, activate, clamp
from moe_routing_kernels.experts.cute_tiles import VECTOR, WARPGROUP, Product

TOGETHER = 4  # vectors whose gates and ups a thread loads at a time: 64 bytes of each

Pairs = Callable[[int, int], list[tuple[Any, Any]]]


def transpose(pairs: Pairs, buffer: cute.Tensor, start: int, chunk: int, product: Product) -> None:
    """Write a chunk of tokens to `buffer` from element `start` on, as (token, column), rounded.

    ``pairs(slab, n)`` are a thread's elements of the 8 x 8 blocks of the result that its warp has of a slab and the n-th 8 tokens.
    """
    dtype, lane, warp_of_group = buffer.element_type, cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    columns, halves = product.chunk // 8, 1 if product.gated else 2
    matrices = min(4, halves * (columns & -columns))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices), dtype)
    matrix = (lane // 8) % matrices  # lanes 8 q to 8 q + 7 give the addresses of the q-th block
    place = (matrix // halves * 8 + lane % 8) * product.pitch + (warp_of_group * halves + matrix % halves) * 8
    for slab in range(product.tile.slabs):
        for first in range(0, columns, matrices // halves):
            values = cute.make_rmem_tensor((2 * matrices,), Float32)
            blocks = [pair for n in range(matrices // halves) for pair in pairs(slab, chunk * columns + first + n)]
            for i in range(2 * matrices):
                values[i] = blocks[i // 2][i % 2]
            rounded = cute.make_rmem_tensor((2 * matrices,), dtype)
            rounded.store(values.load().to(dtype))
            offset = place + (start + first * 8 * product.pitch + slab * (product.width // product.tile.slabs))
            target = buffer.iterator + cute.assume(offset, divby=VECTOR)
            cute.copy(atom, rounded, cute.make_tensor(target, rounded.layout))


def plain(sums: cute.Tensor) -> Pairs:
    """The pairs of sums (2 tokens, 2 rows 8 apart, tokens / 8, slabs) as they are."""
    return lambda slab, n: [(sums[0, half, n, slab], sums[1, half, n, slab]) for half in range(2)]


def gate_or_up(sums: cute.Tensor, half: int) -> Pairs:
    """The pairs of gates, or of ups."""
    return lambda slab, n: [(sums[0, half, n, slab], sums[1, half, n, slab])]


def activated(sums: cute.Tensor, activation: str) -> Pairs:
    """The pairs of what gates and ups become."""
    return lambda slab, n: [
        tuple(activate(sums[token, 0, n, slab], sums[token, 1, n, slab], activation) for token in range(2))
    ]


def derive(gate: Any, up: Any, grad: Any, activation: str) -> tuple[Any, Any, Any]:
    """float32 gate, up and gradient of the activated -> gradients of both, and the activated: value(gate') (up' + shift), if gated.

    Values are gate' sigmoid(z(gate')), and their slopes sigmoid(z) + gate' sigmoid(z) (1 - sigmoid(z)) z'. What is beyond a limit, or
    NaN, gets no gradient.
    """
    known, sums = activation_of(activation), (gate, up)
    if known.limit is not None:
        gate, up = clamp(gate, up, known.limit)
    if known.shift:
        up = up + known.shift
    z, slope = gate if known.alpha == 1 else known.alpha * gate, Float32(known.alpha)
    if known.value == "gelu":  # gelu made of tanh, as in `cute_epilogue`
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    share = cute.arch.rcp_approx(1.0 + cute.math.exp2(z * -LOG2_E, fastmath=True))
    value = gate * share
    of_gate, of_up = grad * up * (share + value * (1.0 - share) * slope), grad * value
    if known.limit is not None:
        limit, none = Float32(known.limit), Float32(0.0)
        of_gate = cutlass.select_(sums[0] <= limit, of_gate, none)
        of_up = cutlass.select_((sums[1] <= limit) & (sums[1] >= -limit), of_up, none)
    return of_gate, of_up, value * up


def vector_at(tensor: cute.Tensor, row: Any, column: Any, pitch: int) -> cute.Tensor:
    """8 elements of a row of a contiguous tensor of `pitch` columns."""
    offset = Int64(row) * pitch + Int64(column)
    return cute.make_tensor(tensor.iterator + cute.assume(offset, divby=VECTOR), cute.make_layout(VECTOR))


def passes_of(product: Product) -> int:
    """Vectors of a chunk that a thread moves."""
    return math.ceil(product.chunk * (product.width // VECTOR) / WARPGROUP)


def mine(n: int, product: Product) -> tuple[Any, Any]:
    """The token and the column of a thread's n-th vector of a chunk."""
    thread, lanes = cute.arch.thread_idx()[0] % WARPGROUP, product.width // VECTOR
    return thread // lanes + n * (WARPGROUP // lanes), thread % lanes * VECTOR


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
    product: cutlass.Constexpr,
):
    """Copy a chunk from element `start` of `buffer` on to rows `row` to `end` of out (R, pitch), `shift` columns further right."""
    passes = cutlass.const_expr(passes_of(product))
    held = cute.make_rmem_tensor((VECTOR, passes), out.element_type)
    for n in cutlass.range_constexpr(passes):
        token, part = mine(n, product)
        if token < product.chunk:
            cute.autovec_copy(vector_at(buffer, token, part + start, product.pitch), held[None, n])
    for n in cutlass.range_constexpr(passes):
        token, part = mine(n, product)
        if (token < product.chunk) & (row + token < end) & (column + part < product.columns):
            cute.autovec_copy(held[None, n], vector_at(out, row + token, column + part + shift, pitch))


def share_of(n: int, first: Any, product: Product) -> tuple[Any, Any]:
    """The token and the column of the n-th of the vectors of a thread from token `first` on: lanes beside each other share a token."""
    thread, lanes = cute.arch.thread_idx()[0] % WARPGROUP, product.width // VECTOR
    return first + n * (WARPGROUP // lanes) + thread // lanes, thread % lanes * VECTOR


@cute.jit
def fetch(
    sums: cute.Tensor,
    scales: cute.Tensor | None,
    held: cute.Tensor,
    scale: cute.Tensor,
    first: Int32,
    row: Int32,
    end: Int32,
    column: Int32,
    product: cutlass.Constexpr,
):
    """Start to load a thread's gates and ups from sums (R, 2 columns) to held (8, gate or up, TOGETHER), and scales (R,) of their rows."""
    for n in cutlass.range_constexpr(TOGETHER):
        token, part = share_of(n, first, product)
        if (row + token < end) & (token < product.tile.tokens) & (column + part < product.columns):
            for half in cutlass.range_constexpr(2):
                source = vector_at(sums, row + token, column + part + half * product.columns, 2 * product.columns)
                cute.autovec_copy(source, held[None, half, n])
            if cutlass.const_expr(scales is not None):
                scale[n] = scales[row + token]


@cute.jit
def store_gradients(
    buffer: cute.Tensor,
    sums: cute.Tensor,
    scales: cute.Tensor | None,
    held: cute.Tensor,
    scale: cute.Tensor,
    d_sums: cute.Tensor,
    inner: cute.Tensor,
    dots: cute.Tensor | None,
    row: Int32,
    end: Int32,
    column: Int32,
    product: cutlass.Constexpr,
):
    """Of a tile of gradients in `buffer` and sums (R, 2 columns): write d_sums (R, 2 columns) and the activated to inner (R, columns).

    With scales (R,), both are multiplied by those of their rows, and dots (R, parts) gets the product of each row's part of the
    gradient and of the activated. The first vectors are in held (8, gate or up, TOGETHER) and scale (TOGETHER,) already; the next
    ones are loaded while these are computed.
    """
    dtype, columns = buffer.element_type, cutlass.const_expr(product.columns)
    following = cute.make_rmem_tensor((VECTOR, 2, TOGETHER), dtype)
    scale_of_following = cute.make_rmem_tensor((TOGETHER,), Float32)
    following.fill(0.0)
    scale_of_following.fill(1.0)
    step = cutlass.const_expr(TOGETHER * (WARPGROUP // (product.width // VECTOR)))
    for first in cutlass.range(0, cutlass.min(end - row, product.tile.tokens), step, unroll=1):
        fetch(sums, scales, following, scale_of_following, first + step, row, end, column, product)
        results = cute.make_rmem_tensor((VECTOR, 3, TOGETHER), dtype)
        products = cute.make_rmem_tensor((TOGETHER,), Float32)
        for n in cutlass.range_constexpr(TOGETHER):  # without branches, so that all are computed at a time
            token, part = share_of(n, first, product)
            grads = cute.make_rmem_tensor((VECTOR,), dtype)
            inside = cutlass.min(token, product.tile.tokens - 1)
            cute.autovec_copy(vector_at(buffer, inside, part, product.pitch), grads)
            wide = cute.make_rmem_tensor((VECTOR, 3), Float32)
            products[n] = 0.0
            for i in cutlass.range_constexpr(VECTOR):
                gate, up, grad = (one.to(Float32) for one in (held[i, 0, n], held[i, 1, n], grads[i]))
                d_gate, d_up, activated_again = derive(gate, up, grad * scale[n], product.derivative)
                products[n] += grad * activated_again
                wide[i, 0], wide[i, 1], wide[i, 2] = d_gate, d_up, activated_again * scale[n]
            results[None, None, n].store(wide.load().to(dtype))
        for n in cutlass.range_constexpr(TOGETHER):
            token, part = share_of(n, first, product)
            of_row = (row + token < end) & (token < product.tile.tokens)
            if of_row & (column + part < columns):
                for half in cutlass.range_constexpr(2):
                    target = vector_at(d_sums, row + token, column + part + half * columns, 2 * columns)
                    cute.autovec_copy(results[None, half, n], target)
                cute.autovec_copy(results[None, 2, n], vector_at(inner, row + token, column + part, columns))
            if cutlass.const_expr(dots is not None):
                dot = cutlass.select_(column + part < columns, products[n], Float32(0.0))
                for distance in cutlass.range_constexpr((product.width // VECTOR).bit_length() - 1):
                    dot += cute.arch.shuffle_sync_bfly(dot, offset=1 << distance)
                if of_row & (part == 0):
                    dots[row + token, column // product.width] = dot
        held.store(following.load())
        scale.store(scale_of_following.load())
