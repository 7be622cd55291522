"""pack and combine as differentiable torch operators, for use in a model: ``from moe_routing_bench.ops import combine, pack``.

`order` (R,) and `inverse` (T, k) int32 are those of `row_map`: the assignment t * k + j in each row or -1 for padding,
and the row of each assignment or -1 where it was dropped. They must be each other's inverse; their values are not
checked, which would wait for the GPU. Data may be bfloat16, float16, float32 or float64; float64 runs in plain torch on
every device, the others in Triton on CUDA.

Both are `torch.library` operators (`moe_routing_bench::pack`, `::combine`, `::combine_backward`), so `torch.compile`
takes them without a graph break. Every result is the same bits each run: no atomics. The backward of `pack` is a combine
with unit weights; that of `combine` (not differentiable itself) is a pack of weighted rows and k dot products a token.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op

from moe_routing_bench.errors import bad
from moe_routing_bench.ops import reference

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Copy token rows to expert rows: x (T, H), order (R,), inverse (T, k) -> packed (R, H); padding rows are zero.

    Differentiable in x: a token's gradient is the sum over its kept rows. Raises `UserError` for shapes or dtypes that
    do not fit.
    """
    _check(x, "x", inverse)
    if order.dim() != 1 or order.dtype != torch.int32:
        raise bad("order", _form(order), "(R,) of torch.int32")
    if len(x) != len(inverse):
        raise bad("x", _form(x), f"{len(inverse)} rows, as inverse has")
    return _pack(x, order, inverse)


def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """Sum every token's expert rows: y (R, H), inverse (T, k), weights (T, k) -> combined (T, H), of y's dtype.

    Weights are float32 (float64 for float64 y). A residual (T, H) of y's dtype, such as the output of shared experts,
    is added in the same pass. Sums are in float32 and rounded once. Dropped assignments add nothing, whatever their
    weight, and get no gradient. Differentiable in y, weights and residual. Raises `UserError` for shapes or dtypes
    that do not fit.
    """
    _check(y, "y", inverse)
    if weights.shape != inverse.shape or weights.dtype != reference.wide(y.dtype):
        raise bad("weights", _form(weights), f"{tuple(inverse.shape)} of {reference.wide(y.dtype)}")
    if residual is not None and (residual.shape != (len(inverse), y.shape[1]) or residual.dtype != y.dtype):
        raise bad("residual", _form(residual), f"{(len(inverse), y.shape[1])} of {y.dtype}")
    return _combine(y, inverse, weights, residual)


def _check(data: Tensor, name: str, inverse: Tensor) -> None:
    """`UserError` unless data is a matrix of a known dtype and inverse one of int32, with at least one column."""
    if data.dim() != 2 or data.dtype not in _DTYPES:
        raise bad(name, _form(data), f"two dimensions of {', '.join(map(str, _DTYPES))}")
    if inverse.dim() != 2 or inverse.dtype != torch.int32 or not inverse.shape[1]:
        raise bad("inverse", _form(inverse), "(T, k) of torch.int32")


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


@custom_op("moe_routing_bench::pack", mutates_args=(), device_types="cpu")
def _pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return reference.pack(x, order, inverse)


@custom_op("moe_routing_bench::combine", mutates_args=(), device_types="cpu")
def _combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    return reference.combine(y, inverse, weights, residual)


@custom_op("moe_routing_bench::combine_backward", mutates_args=(), device_types="cpu")
def _combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    return reference.combine_backward(grad, y, inverse, weights, rows)


def _on_cuda(name: str) -> Callable:
    """The CUDA form of an operator, by the dtype of its first tensor; Triton is imported by the first call."""

    def run(data: Tensor, *rest):
        if data.dtype == torch.float64:
            return getattr(reference, name)(data, *rest)
        from moe_routing_bench.ops import triton_ops

        return getattr(triton_ops, name)(data, *rest)

    return run


_pack.register_kernel("cuda", _on_cuda("pack"))
_combine.register_kernel("cuda", _on_cuda("combine"))
_combine_backward.register_kernel("cuda", _on_cuda("combine_backward"))


@_pack.register_fake
def _(x, order, inverse):
    return x.new_empty(order.shape[0], x.shape[1])


@_combine.register_fake
def _(y, inverse, weights, residual):
    return y.new_empty(inverse.shape[0], y.shape[1])


@_combine_backward.register_fake
def _(grad, y, inverse, weights, rows):
    d_y = grad.new_empty(0) if rows is None else grad.new_empty(rows, grad.shape[1])
    return d_y, weights.new_empty(0 if y is None else inverse.shape)


def _save_for_pack(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _pack_backward(ctx, grad):
    (inverse,) = ctx.saved_tensors
    unit = torch.ones(inverse.shape, dtype=reference.wide(grad.dtype), device=grad.device)
    return _combine(grad, inverse, unit, None), None, None


def _save_for_combine(ctx, inputs, output) -> None:
    y, inverse, weights, _ = inputs
    ctx.rows = y.shape[0]
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, inverse, weights)


def _combine_gradients(ctx, grad):
    of_y, _, of_weights, of_residual = ctx.needs_input_grad
    y, inverse, weights = ctx.saved_tensors
    d_y = d_weights = None
    if of_y or of_weights:
        d_y, d_weights = _combine_backward(grad, y, inverse, weights, ctx.rows if of_y else None)
    return d_y if of_y else None, None, d_weights if of_weights else None, grad if of_residual else None


_pack.register_autograd(_pack_backward, setup_context=_save_for_pack)
_combine.register_autograd(_combine_gradients, setup_context=_save_for_combine)
