"""The operators as `torch.library` knows them: what runs on which device, shapes without data, and derivatives.

``torch.ops.moe_routing_bench.gate``, ``permute``, ``pack``, ``experts`` and ``combine``, with ``experts_backward``,
``combine_backward``, ``layer_backward`` and ``feed``, pack and experts in one, which are not differentiable themselves. Arguments are checked by the functions in `ops`, not here. The
backward of pack is a combine with unit weights; that of combine is a pack of weighted rows and k dot products per token; that
of gate is plain torch; that of experts computes the sums of their first product again, unless ``experts_training`` kept them.
``layer_training`` is pack, experts and combine in one, whose backward weighs rows where the slope of the activation is computed.
Both are told the `backend` (`backends.training`), because it decides what they keep: the shapes of an operator's outputs depend on its
arguments alone, as torch keeps compiled graphs on disk, also for a process with other packages.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op

from moe_routing_bench.kernels.permute.layout import RowLayout
from moe_routing_bench.ops import reference


@custom_op("moe_routing_bench::gate", mutates_args=(), device_types="cpu")
def gate(logits: Tensor, bias: Tensor | None, top_k: int, rule: str, scale: float | None) -> tuple[Tensor, Tensor]:
    return reference.gate(logits, bias, top_k, rule, scale)


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
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return reference.experts(rows, offsets, w13, w2, activation, b13, b2), rows.new_empty(0)


@custom_op("moe_routing_bench::layer_training", mutates_args=(), device_types="cpu")
def layer_training(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None, residual: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    packed = reference.pack(x, order, inverse)
    y = reference.experts(packed, offsets, w13, w2, activation, b13, b2)
    return reference.combine(y, inverse, weights, residual), packed, y, x.new_empty(0)


@custom_op("moe_routing_bench::layer_backward", mutates_args=(), device_types="cpu")
def layer_backward(
    grad: Tensor, packed: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: str, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y = reference.experts(packed, offsets, w13, w2, activation, None, None)
    d_y, d_weights = reference.combine_backward(grad, y, inverse, weights, len(packed))
    d_packed, d_w13, d_w2, *_ = reference.experts_backward(d_y, packed, offsets, w13, w2, activation, None, None)
    return d_packed, d_weights, d_w13, d_w2


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
layer_training.register_kernel("cuda", _on_cuda("layer_training"))
layer_backward.register_kernel("cuda", _on_cuda("layer_backward"))
experts_backward.register_kernel("cuda", _on_cuda("experts_backward"))
feed.register_kernel("cuda", _on_cuda("feed"))


@gate.register_fake
def _(logits, bias, top_k, rule, scale):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=reference.wide(logits.dtype))


@permute.register_fake
def _(topk_ids, experts, capacity, layout):
    rows = RowLayout(topk_ids.shape[0], topk_ids.shape[1], experts, capacity, layout).rows
    shapes = (experts,), (experts + 1,), (rows,), topk_ids.shape
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


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
def _(rows, offsets, w13, w2, activation, b13, b2, backend):
    kept = _keeps_sums(rows, w2, activation, backend)
    return torch.empty_like(rows), rows.new_empty((rows.shape[0], w13.shape[1]) if kept else 0)


@layer_training.register_fake
def _(x, order, inverse, offsets, weights, w13, w2, activation, b13, b2, residual, backend):
    packed = x.new_empty(order.shape[0], x.shape[1])
    kept = _keeps_sums(packed, w2, activation, backend)
    sums = x.new_empty((order.shape[0], w13.shape[1]) if kept else 0)
    return torch.empty_like(x), packed, x.new_empty(0) if kept else torch.empty_like(packed), sums


@layer_backward.register_fake
def _(grad, packed, order, inverse, offsets, weights, w13, w2, activation, sums):
    return tuple(torch.empty_like(one) for one in (packed, weights, w13, w2))


@feed.register_fake
def _(x, order, inverse, offsets, w13, w2, activation, b13, b2, capacity, phase):
    return x.new_empty(order.shape[0], x.shape[1])


@experts_backward.register_fake
def _(grad, rows, offsets, w13, w2, activation, b13, b2, sums):
    biases = (w13.new_empty(0) if bias is None else torch.empty_like(bias) for bias in (b13, b2))
    return torch.empty_like(rows), torch.empty_like(w13), torch.empty_like(w2), *biases


def _keeps_sums(rows: Tensor, w2: Tensor, activation: str, backend: str) -> bool:
    from moe_routing_bench.ops import cuda

    return cuda.keeps_sums(rows, w2, activation, backend)


def _save_for_gate(ctx, inputs, output) -> None:
    ctx.rule, ctx.scale = inputs[3:]
    ctx.save_for_backward(inputs[0], output[0])


def _gate_gradients(ctx, _, grad):
    logits, ids = ctx.saved_tensors
    return reference.gate_backward(grad, logits, ids, ctx.rule, ctx.scale), None, None, None, None


def _save_for_pack(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _pack_gradients(ctx, grad):
    (inverse,) = ctx.saved_tensors
    return _sum_of_rows(grad, inverse), None, None


def _sum_of_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """The sum of each token's kept rows: rows (R, H), inverse (T, k) -> (T, H)."""
    return combine(rows, inverse, torch.ones(inverse.shape, dtype=reference.wide(rows.dtype), device=rows.device), None)


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
    rows, offsets, w13, w2, ctx.activation, b13, b2, _ = inputs
    sums = output[1]
    ctx.mark_non_differentiable(sums)
    ctx.set_materialize_grads(False)  # zeros as large as the sums would be written for nothing
    ctx.save_for_backward(rows, offsets, w13, w2, b13, b2, sums if sums.dim() > 1 else None)


def _experts_gradients(ctx, grad):
    rows, offsets, w13, w2, b13, b2, sums = ctx.saved_tensors
    gradients = experts_backward(grad, rows, offsets, w13, w2, ctx.activation, b13, b2, sums)
    d_rows, d_w13, d_w2, d_b13, d_b2 = gradients
    biases = (None, None) if b13 is None else (d_b13, d_b2)
    return d_rows, None, d_w13, d_w2, None, *biases


def _training_gradients(ctx, grad, of_sums):
    return *_experts_gradients(ctx, grad), None


def _save_for_layer(ctx, inputs, output) -> None:
    _, order, inverse, offsets, weights, w13, w2, ctx.activation, b13, b2, *_ = inputs
    _, packed, y, sums = output
    ctx.mark_non_differentiable(packed, y, sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(order, inverse, offsets, weights, w13, w2, b13, b2, packed, y, sums)


def _layer_gradients(ctx, grad, *_):
    order, inverse, offsets, weights, w13, w2, b13, b2, packed, y, sums = ctx.saved_tensors
    d_b13 = d_b2 = None
    if sums.dim() > 1:
        given = (order, inverse, offsets, weights, w13, w2, ctx.activation, sums)
        d_packed, d_weights, d_w13, d_w2 = layer_backward(grad, packed, *given)
    else:
        d_y, d_weights = combine_backward(grad, y, inverse, weights, packed.shape[0])
        found = experts_backward(d_y, packed, offsets, w13, w2, ctx.activation, b13, b2, None)
        d_packed, d_w13, d_w2 = found[:3]
        d_b13, d_b2 = (None, None) if b13 is None else found[3:]
    d_x, d_residual = _sum_of_rows(d_packed, inverse), grad if ctx.needs_input_grad[10] else None
    return d_x, None, None, None, d_weights, d_w13, d_w2, None, d_b13, d_b2, d_residual, None


gate.register_autograd(_gate_gradients, setup_context=_save_for_gate)
pack.register_autograd(_pack_gradients, setup_context=_save_for_pack)
combine.register_autograd(_combine_gradients, setup_context=_save_for_combine)
experts.register_autograd(_experts_gradients, setup_context=_save_for_experts)
layer_training.register_autograd(_layer_gradients, setup_context=_save_for_layer)
experts_training.register_autograd(_training_gradients, setup_context=_save_for_training)
