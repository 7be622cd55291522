"""The backward of combine in Triton: allocation, launch, kernel.

Strategy: token-major, one program per token. It reads the token's gradient once, column tile by column
tile, and for it the k rows of y (for the dot products) while it writes the k rows of d_y; rows of d_y that no
assignment uses get zeros from the programs in turn, as in triton_pack. A row is not split among programs, because its
dot product would then need atomics or a second pass: few tokens use the GPU poorly.
Compulsory bytes: (T + kept + R) * H * itemsize + 12 * T * k; floor: a stream of that mix.

Invariant: a dot product is summed in fp32, in an order that depends on H and the launch shape alone, so the same bits every run.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_kernels.pack import MAX_CHECKED_ROWS
from moe_routing_kernels.target import Target

ELEMENTS = 32  # of a tile, that a thread holds of each of y and the partial dot products
ENOUGH_PROGRAMS = 4  # per multiprocessor: fewer leave it partly idle, and programs then have more threads


def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    """grad (T, H) of combined -> those of y (rows, H), of grad's dtype, and of weights (T, k).

    Without `rows` the first, without y (R, H) the second is not needed, and is of shape (0,).
    """
    (tokens, top_k), hidden = inverse.shape, grad.shape[1]
    d_y = grad.new_empty(0) if rows is None else grad.new_empty(rows, hidden)
    d_weights = weights.new_empty(0 if y is None else inverse.shape)
    if not grad.numel():
        return d_y.zero_(), d_weights.zero_()
    grad, inverse, weights = grad.contiguous(), inverse.contiguous(), weights.contiguous()
    y = None if y is None else y.contiguous()
    height = rows or 0
    used = inverse.new_zeros(height + 1, dtype=torch.int8)
    if height:
        at = torch.where(inverse < 0, height, inverse).reshape(-1).long()  # a dropped assignment marks the spare entry
        used.scatter_(0, at, 1)  # by a kernel: a scalar from the host could not be captured in a CUDA graph
    checked = _checked_rows(height, tokens)
    num_warps = 4 if tokens >= ENOUGH_PROGRAMS * Target.here(grad.device).multiprocessors else 16
    k_padded = triton.next_power_of_2(top_k)
    columns = min(triton.next_power_of_2(hidden), max(32, ELEMENTS * 32 * num_warps // k_padded))
    backward_kernel[(max(tokens, math.ceil(height / checked)),)](
        grad,
        y,
        used,
        inverse,
        weights,
        None if rows is None else d_y,
        d_weights,
        tokens,
        height,
        hidden,
        top_k,
        k_padded,
        columns,
        checked,
        num_warps=num_warps,
    )
    return d_y, d_weights


def _checked_rows(rows: int, tokens: int) -> int:
    """Rows that each token checks for padding: an even share, a power of two of at most `MAX_CHECKED_ROWS`."""
    return min(MAX_CHECKED_ROWS, triton.next_power_of_2(max(1, math.ceil(rows / tokens))))


@triton.jit
def backward_kernel(
    grad_ptr,
    y_ptr,
    used_ptr,
    inverse_ptr,
    weights_ptr,
    d_y_ptr,
    d_weights_ptr,
    tokens,
    rows,
    H: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """One program: the K assignments of a token, and CHECKED rows of d_y that may be padding.

    y is None where the gradient of the weights is not needed, d_y where that is not.
    """
    token = tl.program_id(0)
    choice = tl.arange(0, K_PADDED)
    live = (choice < K) & (token < tokens)
    row = tl.load(inverse_ptr + token * K + choice, mask=live, other=-1)
    kept = row >= 0
    scale = tl.load(weights_ptr + token * K + choice, mask=kept, other=0.0)
    slot = token * CHECKED + tl.arange(0, CHECKED)
    padding = tl.load(used_ptr + slot, mask=slot < rows, other=1) == 0

    products = tl.zeros([K_PADDED, COLUMNS], tl.float32)
    for first in range(0, H, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = column < H
        at = row[:, None].to(tl.int64) * H + column
        g = tl.load(grad_ptr + token.to(tl.int64) * H + column, mask=inside & (token < tokens), other=0.0)
        if y_ptr is not None:
            terms = tl.load(y_ptr + at, mask=kept[:, None] & inside, other=0.0)
            products += terms.to(tl.float32) * g.to(tl.float32)
        if d_y_ptr is not None:
            value = (scale[:, None] * g.to(tl.float32)).to(d_y_ptr.dtype.element_ty)
            tl.store(d_y_ptr + at, value, mask=kept[:, None] & inside)
    if y_ptr is not None:
        # The gradient may hold inf: a dropped assignment is zero all the same.
        tl.store(d_weights_ptr + token * K + choice, tl.where(kept, tl.sum(products, 1), 0.0), mask=live)
    if d_y_ptr is not None:
        if tl.max(padding.to(tl.int32), 0) > 0:
            zero = tl.zeros([CHECKED, COLUMNS], d_y_ptr.dtype.element_ty)
            for first in range(0, H, COLUMNS):
                column = first + tl.arange(0, COLUMNS)[None, :]
                at = slot[:, None].to(tl.int64) * H + column
                tl.store(d_y_ptr + at, zero, mask=padding[:, None] & (column < H))
