"""The epilogue of training GEMMs: derivatives of activations, multiplied into gradients on their way to memory.

The gradient of the activated rows is multiplied by the activation's derivative, which takes the pre-activations: stored are the gradient
of these and the activated values, again. It is rounded to 16 bits on the way, as in a separate GEMM.
A tile goes to the buffer as a whole, because the derivative needs the registers of the accumulators: subtile by subtile, they spill.

Invariant: as in `epilogue`, a warpgroup's buffer is its own, and TMA never touches it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.gemm.sm90.epilogue import LOG2_E, Pairs, clamp, vector_at
from moe_routing_kernels.gemm.sm90.tile import VECTOR, WARPGROUP, GroupedGemm

TOGETHER = 4  # vectors whose gates and ups a thread loads at a time: 64 bytes of each


def gate_or_up(acc: cute.Tensor, half: int) -> Pairs:
    """The pairs of gates, or of ups."""
    return lambda m_atom, n: [(acc[0, half, n, m_atom], acc[1, half, n, m_atom])]


def derive(gate: Any, up: Any, grad: Any, activation: str) -> tuple[Any, Any, Any]:
    """float32 gate, up and gradient of the activated -> gradients of both, and the activated: value(gate') (up' + shift), if gated.

    Values are gate' sigmoid(z(gate')), and their derivatives sigmoid(z) + gate' sigmoid(z) (1 - sigmoid(z)) z'. What is beyond a limit, or
    NaN, gets no gradient.
    """
    known, preact = activation_of(activation), (gate, up)
    if known.limit is not None:
        gate, up = clamp(gate, up, known.limit)
    if known.shift:
        up = up + known.shift
    z, slope = gate if known.alpha == 1 else known.alpha * gate, Float32(known.alpha)
    if known.value == "gelu":  # gelu made of tanh, as in `epilogue`
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    share = cute.arch.rcp_approx(1.0 + cute.math.exp2(z * -LOG2_E, fastmath=True))
    value = gate * share
    of_gate, of_up = grad * up * (share + value * (1.0 - share) * slope), grad * value
    if known.limit is not None:
        limit, none = Float32(known.limit), Float32(0.0)
        of_gate = cutlass.select_(preact[0] <= limit, of_gate, none)
        of_up = cutlass.select_((preact[1] <= limit) & (preact[1] >= -limit), of_up, none)
    return of_gate, of_up, value * up


def vector_of(n: int, first: Any, gemm: GroupedGemm) -> tuple[Any, Any]:
    """The token and the column of a thread's n-th vector from token `first` on: neighbouring lanes share a token."""
    thread, lanes = cute.arch.thread_idx()[0] % WARPGROUP, gemm.width // VECTOR
    return first + n * (WARPGROUP // lanes) + thread // lanes, thread % lanes * VECTOR


@cute.jit
def fetch(
    preact: cute.Tensor,
    scales: cute.Tensor | None,
    gates_and_ups: cute.Tensor,
    scale: cute.Tensor,
    first: Int32,
    row: Int32,
    end: Int32,
    column: Int32,
    gemm: cutlass.Constexpr,
):
    """Load a thread's gates and ups from preact (R, 2 columns) to gates_and_ups (8, gate or up, TOGETHER), and scales (R,) of their rows."""
    for n in cutlass.range_constexpr(TOGETHER):
        token, part = vector_of(n, first, gemm)
        if (row + token < end) & (token < gemm.tile.tokens) & (column + part < gemm.columns):
            for half in cutlass.range_constexpr(2):
                source = vector_at(preact, row + token, column + part + half * gemm.columns, 2 * gemm.columns)
                cute.autovec_copy(source, gates_and_ups[None, half, n])
            if cutlass.const_expr(scales is not None):
                scale[n] = scales[row + token]


@cute.jit
def store_gradients(
    buffer: cute.Tensor,
    preact: cute.Tensor,
    scales: cute.Tensor | None,
    gates_and_ups: cute.Tensor,
    scale: cute.Tensor,
    d_preact: cute.Tensor,
    inner: cute.Tensor,
    dots: cute.Tensor | None,
    row: Int32,
    end: Int32,
    column: Int32,
    gemm: cutlass.Constexpr,
):
    """Read a tile of gradients in `buffer` and preact (R, 2 columns); write d_preact (R, 2 columns) and the activated to inner (R, columns).

    With scales (R,), both are multiplied by those of their rows, and dots (R, `gemm.dots`) gets, per part of a row, the dot product of the
    gradient and the activated values. The first vectors are in gates_and_ups (8, gate or up, TOGETHER) and scale (TOGETHER,) already; the next
    ones are loaded while these are computed.
    """
    dtype, columns = buffer.element_type, cutlass.const_expr(gemm.columns)
    following = cute.make_rmem_tensor((VECTOR, 2, TOGETHER), dtype)
    scale_of_following = cute.make_rmem_tensor((TOGETHER,), Float32)
    following.fill(0.0)
    scale_of_following.fill(1.0)
    step = cutlass.const_expr(TOGETHER * (WARPGROUP // (gemm.width // VECTOR)))
    for first in cutlass.range(0, cutlass.min(end - row, gemm.tile.tokens), step, unroll=1):
        fetch(preact, scales, following, scale_of_following, first + step, row, end, column, gemm)
        results = cute.make_rmem_tensor((VECTOR, 3, TOGETHER), dtype)
        dot_parts = cute.make_rmem_tensor((TOGETHER,), Float32)
        for n in cutlass.range_constexpr(TOGETHER):  # without branches, so that all are computed at a time
            token, part = vector_of(n, first, gemm)
            grads = cute.make_rmem_tensor((VECTOR,), dtype)
            inside = cutlass.min(token, gemm.tile.tokens - 1)
            cute.autovec_copy(vector_at(buffer, inside, part, gemm.epi_pitch), grads)
            wide = cute.make_rmem_tensor((VECTOR, 3), Float32)
            dot_parts[n] = 0.0
            for i in cutlass.range_constexpr(VECTOR):
                gate, up, grad = (
                    value.to(Float32) for value in (gates_and_ups[i, 0, n], gates_and_ups[i, 1, n], grads[i])
                )
                d_gate, d_up, activated_again = derive(gate, up, grad * scale[n], gemm.derivative)
                dot_parts[n] += grad * activated_again
                wide[i, 0], wide[i, 1], wide[i, 2] = d_gate, d_up, activated_again * scale[n]
            results[None, None, n].store(wide.load().to(dtype))
        for n in cutlass.range_constexpr(TOGETHER):
            token, part = vector_of(n, first, gemm)
            of_row = (row + token < end) & (token < gemm.tile.tokens)
            if of_row & (column + part < columns):
                for half in cutlass.range_constexpr(2):
                    target = vector_at(d_preact, row + token, column + part + half * columns, 2 * columns)
                    cute.autovec_copy(results[None, half, n], target)
                cute.autovec_copy(results[None, 2, n], vector_at(inner, row + token, column + part, columns))
            if cutlass.const_expr(dots is not None):
                dot = cutlass.select_(column + part < columns, dot_parts[n], Float32(0.0))
                for distance in cutlass.range_constexpr((gemm.width // VECTOR).bit_length() - 1):
                    dot += cute.arch.shuffle_sync_bfly(dot, offset=1 << distance)
                if of_row & (part == 0):
                    dots[row + token, column // gemm.width] = dot
        gates_and_ups.store(following.load())
        scale.store(scale_of_following.load())
