"""Pack, combine and the backward of combine in plain torch: what the CPU runs, and what the kernels are compared with.

Any floating-point dtype on any device; sums in float32, in float64 for float64 data. Same contracts as `triton_ops`.
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which data of `dtype` is summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x (T, H), order (R,), inverse (T, k) -> packed (R, H); rows of padding are zero."""
    packed, kept = x.new_zeros(len(order), x.shape[1]), order >= 0
    packed[kept] = x[order[kept].long() // inverse.shape[1]]
    return packed


def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """y (R, H), inverse (T, k), weights (T, k), residual (T, H) or None -> combined (T, H), y's dtype."""
    total = y.new_zeros(len(inverse), y.shape[1], dtype=wide(y.dtype))
    if residual is not None:
        total += residual
    for j, rows in enumerate(inverse.long().unbind(1)):
        kept = rows >= 0
        total[kept] += weights[kept, j, None].to(total.dtype) * y[rows[kept]].to(total.dtype)
    return total.to(y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    """grad (T, H) of combined -> those of y (rows, H), of grad's dtype, and of weights (T, k).

    Without `rows` the first, without y (R, H) the second is not needed, and is of shape (0,).
    """
    d_y = grad.new_empty(0) if rows is None else grad.new_zeros(rows, grad.shape[1])
    d_weights = weights.new_empty(0) if y is None else torch.zeros_like(weights)
    g = grad.to(wide(grad.dtype))
    for j, row in enumerate(inverse.long().unbind(1)):
        kept = row >= 0
        if rows is not None:
            d_y[row[kept]] = (g[kept] * weights[kept, j, None].to(g.dtype)).to(grad.dtype)
        if y is not None:
            d_weights[kept, j] = (g[kept] * y[row[kept]].to(g.dtype)).sum(1).to(weights.dtype)
    return d_y, d_weights
