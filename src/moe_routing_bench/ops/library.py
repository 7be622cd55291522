"""The operators as `torch.library` knows them: what runs on which device, shapes without data, and derivatives.

``torch.ops.moe_routing_bench.gate``, ``permute``, ``pack``, ``experts`` and ``combine``, with ``experts_backward``,
``combine_backward`` and ``feed``, pack and experts in one, which are not differentiable themselves. Arguments are checked by the functions in `ops`, not here. The
backward of pack is a combine with unit weights; that of combine is a pack of weighted rows and k dot products per token; that
of gate is plain torch; that of experts computes the sums of their first product again, unless ``experts_training`` kept them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op

from moe_routing_bench.kernels.permute.layout import RowLayout
from moe_routing_bench.ops import reference


@custom_op("moe_routing_bench::gate", mutates_args=(), device_types="cpu")
def gate(logits: Tensor, bias: Tensor | None, top_k: int, rule: str) -> tuple[Tensor, Tensor]:
    return reference.gate(logits, bias, top_k, rule)


@custom_op("moe_routing_bench::permute", mutates_args=(), device_types="cpu")
def permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return reference.permute(topk_ids, experts, capacity, layout)


@custom_op("moe_routing_bench::pack", mutates_args=(), device_types="cpu")
def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return reference.pack(x, order, inverse)


@custom_op("moe_routing_bench::combine", mutates_args=(), device_types="cpu")
def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    return reference.combine(y, inverse, weights, residual)


@custom_op("moe_routing_bench::combine_backward", mutates_args=(), device_types="cpu")
def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    return reference.combine_backward(grad, y, inverse, weights, rows)


@custom_op("moe_routing_bench::experts", mutates_args=(), device_types="cpu")
def experts(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> Tensor:
    return reference.experts(rows, offsets, w13, w2, activation, b13, b2)


@custom_op("moe_routing_bench::experts_training", mutates_args=(), device_types="cpu")
def experts_training(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> tuple[Tensor, Tensor]:
    return reference.experts(rows, offsets, w13, w2, activation, b13, b2), rows.new_empty(0)


@custom_op("moe_routing_bench::feed", mutates_args=(), device_types="cpu")
def feed(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None, capacity: int | None, phase: str | None
) -> Tensor:  # fmt: skip
    return reference.experts(reference.pack(x, order, inverse), offsets, w13, w2, activation, b13, b2)


@custom_op("moe_routing_bench::experts_backward", mutates_args=(), device_types="cpu")
def experts_backward(
    grad: Tensor, rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None, sums: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return reference.experts_backward(grad, rows, offsets, w13, w2, activation, b13, b2)


def _on_cuda(name: str) -> Callable:
    """What runs an operator on CUDA, with its first tensor's device as the current one, on which kernels are launched."""

    def run(data: Tensor, *rest):
        from moe_routing_bench.ops import cuda

        with torch.cuda.device(data.device):
            return getattr(cuda, name)(data, *rest)

    return run


gate.register_kernel("cuda", _on_cuda("gate"))
permute.register_kernel("cuda", _on_cuda("permute"))
pack.register_kernel("cuda", _on_cuda("pack"))
combine.register_kernel("cuda", _on_cuda("combine"))
combine_backward.register_kernel("cuda", _on_cuda("combine_backward"))
experts.register_kernel("cuda", _on_cuda("experts"))
experts_training.register_kernel("cuda", _on_cuda("experts_training"))
experts_backward.register_kernel("cuda", _on_cuda("experts_backward"))
feed.register_kernel("cuda", _on_cuda("feed"))


@gate.register_fake
def _(logits, bias, top_k, rule):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=reference.wide(logits.dtype))


@permute.register_fake
def _(topk_ids, experts, capacity, layout):
    rows = RowLayout(topk_ids.shape[0], topk_ids.shape[1], experts, capacity, layout).rows
    return tuple(topk_ids.new_empty(shape) for shape in ((experts,), (experts + 1,), (rows,), topk_ids.shape))


@pack.register_fake
def _(x, order, inverse):
    return x.new_empty(order.shape[0], x.shape[1])


@combine.register_fake
def _(y, inverse, weights, residual):
    return y.new_empty(inverse.shape[0], y.shape[1])


@combine_backward.register_fake
def _(grad, y, inverse, weights, rows):
    d_y = grad.new_empty(0) if rows is None else grad.new_empty(rows, grad.shape[1])
    return d_y, weights.new_empty(0 if y is None else inverse.shape)


@experts.register_fake
def _(rows, offsets, w13, w2, activation, b13, b2):
    return torch.empty_like(rows)


@experts_training.register_fake
def _(rows, offsets, w13, w2, activation, b13, b2):
    kept = rows.is_cuda and _keeps_sums(rows, w2, activation)
    return torch.empty_like(rows), rows.new_empty((rows.shape[0], w13.shape[1]) if kept else 0)


@feed.register_fake
def _(x, order, inverse, offsets, w13, w2, activation, b13, b2, capacity, phase):
    return x.new_empty(order.shape[0], x.shape[1])


@experts_backward.register_fake
def _(grad, rows, offsets, w13, w2, activation, b13, b2, sums):
    biases = (w13.new_empty(0) if bias is None else torch.empty_like(bias) for bias in (b13, b2))
    return torch.empty_like(rows), torch.empty_like(w13), torch.empty_like(w2), *biases


def _keeps_sums(rows: Tensor, w2: Tensor, activation: str) -> bool:
    from moe_routing_bench.ops import cuda

    return cuda.keeps_sums(rows, w2, activation)


def _save_for_gate(ctx, inputs, output) -> None:
    ctx.rule = inputs[3]
    ctx.save_for_backward(inputs[0], output[0])


def _gate_gradients(ctx, _, grad):
    logits, ids = ctx.saved_tensors
    return reference.gate_backward(grad, logits, ids, ctx.rule), None, None, None


def _save_for_pack(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _pack_gradients(ctx, grad):
    (inverse,) = ctx.saved_tensors
    unit = torch.ones(inverse.shape, dtype=reference.wide(grad.dtype), device=grad.device)
    return combine(grad, inverse, unit, None), None, None


def _save_for_combine(ctx, inputs, output) -> None:
    y, inverse, weights, _ = inputs
    ctx.rows = y.shape[0]
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, inverse, weights)


def _combine_gradients(ctx, grad):
    of_y, _, of_weights, of_residual = ctx.needs_input_grad
    y, inverse, weights = ctx.saved_tensors
    d_y = d_weights = None
    if of_y or of_weights:
        d_y, d_weights = combine_backward(grad, y, inverse, weights, ctx.rows if of_y else None)
    return d_y if of_y else None, None, d_weights if of_weights else None, grad if of_residual else None


def _save_for_experts(ctx, inputs, output) -> None:
    rows, offsets, w13, w2, ctx.activation, b13, b2 = inputs
    ctx.save_for_backward(rows, offsets, w13, w2, b13, b2, None)


def _save_for_training(ctx, inputs, output) -> None:
    rows, offsets, w13, w2, ctx.activation, b13, b2 = inputs
    sums = output[1]
    ctx.mark_non_differentiable(sums)
    ctx.set_materialize_grads(False)  # zeros as large as the sums would be written for nothing
    ctx.save_for_backward(rows, offsets, w13, w2, b13, b2, sums if sums.dim() > 1 else None)


def _experts_gradients(ctx, grad, of_sums=None):
    rows, offsets, w13, w2, b13, b2, sums = ctx.saved_tensors
    gradients = experts_backward(grad, rows, offsets, w13, w2, ctx.activation, b13, b2, sums)
    d_rows, d_w13, d_w2, d_b13, d_b2 = gradients
    biases = (None, None) if b13 is None else (d_b13, d_b2)
    return d_rows, None, d_w13, d_w2, None, *biases


gate.register_autograd(_gate_gradients, setup_context=_save_for_gate)
pack.register_autograd(_pack_gradients, setup_context=_save_for_pack)
combine.register_autograd(_combine_gradients, setup_context=_save_for_combine)
experts.register_autograd(_experts_gradients, setup_context=_save_for_experts)
experts_training.register_autograd(_experts_gradients, setup_context=_save_for_training)
