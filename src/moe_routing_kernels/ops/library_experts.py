"""The operators that run experts, as `torch.library` knows them: what runs on which device, shapes without data, and derivatives.

``torch.ops.moe_routing_kernels.experts`` and ``feed``, pack and experts in one, whose backward passes compute all again; ``experts_training`` and ``layer_training``, which keep
what a backward pass reads, and the backward operators of these. The backward of experts computes the pre-activations of their up GEMM
again, unless ``experts_training`` kept them. ``layer_training`` is pack, experts and combine in one, whose backward weighs rows where
the slope of the activation is computed.
Both are told the `backend` (`backends.training`), because it decides what they keep: the shapes of an operator's outputs depend on its
arguments alone, as torch keeps compiled graphs on disk, also for a process with other packages. Backward operators are told which
gradients are wanted: what belongs to no other one is neither allocated nor computed, nor kept for it. The invariant of outputs is that
of `library`.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.library import custom_op

from moe_routing_kernels.implementations import KERNELS
from moe_routing_kernels.ops import reference
from moe_routing_kernels.ops.arguments import check_transforms
from moe_routing_kernels.ops.library import combine_backward, contiguous, first_only, on_cuda, pack, sum_of_rows


@custom_op(f"{KERNELS}::experts", mutates_args=(), device_types="cpu")
def experts(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> Tensor:
    return contiguous(reference.experts(rows, offsets, w13, w2, activation, b13, b2), rows)


@custom_op(f"{KERNELS}::experts_training", mutates_args=(), device_types="cpu")
def experts_training(
    rows: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    keep = _keeps_preact(rows, w2, activation, backend)
    return contiguous(reference.experts_training(rows, offsets, w13, w2, activation, b13, b2, keep), rows)


@custom_op(f"{KERNELS}::experts_backward", mutates_args=(), device_types="cpu")
def experts_backward(
    grad: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    preact: Tensor | None,
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of rows, w13, w2, b13 and b2 that are `wanted`; rows are None where pre-activations are given and w13 needs no gradient."""
    given = (rows, offsets, w13, w2, activation, b13, b2, preact, _asked(wanted, 5))
    return contiguous(reference.experts_backward(grad, *given), grad)


@custom_op(f"{KERNELS}::layer_training", mutates_args=(), device_types="cpu")
def layer_training(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    residual: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed = reference.pack(x, order, inverse)
    keep = _keeps_preact(packed, w2, activation, backend)
    y, preact = reference.experts_training(packed, offsets, w13, w2, activation, b13, b2, keep)
    return contiguous((reference.combine(y, inverse, weights, residual), packed, None if keep else y, preact), x)


@custom_op(f"{KERNELS}::layer_backward", mutates_args=(), device_types="cpu")
def layer_backward(
    grad: Tensor,
    packed: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    preact: Tensor,
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of packed rows, weights, w13 and w2 that are `wanted`; `packed` is None where w13 needs no gradient."""
    given = (packed, order, inverse, offsets, weights, w13, w2, activation, preact, _asked(wanted, 4))
    return contiguous(reference.layer_backward(grad, *given), grad)


@custom_op(f"{KERNELS}::feed", mutates_args=(), device_types="cpu")
def feed(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    capacity: int | None,
    phase: str | None,
    ranks: int = 1,
) -> Tensor:
    packed = reference.pack(x, order, inverse)
    return contiguous(reference.experts(packed, offsets, w13, w2, activation, b13, b2), x)


experts.register_kernel("cuda", on_cuda("experts"))
experts_training.register_kernel("cuda", on_cuda("experts_training"))
experts_backward.register_kernel("cuda", on_cuda("experts_backward"))
layer_training.register_kernel("cuda", on_cuda("layer_training"))
layer_backward.register_kernel("cuda", on_cuda("layer_backward"))
feed.register_kernel("cuda", on_cuda("feed"))


@experts.register_fake
def _(rows, offsets, w13, w2, activation, b13, b2):
    return rows.new_empty(rows.shape)


@experts_training.register_fake
def _(rows, offsets, w13, w2, activation, b13, b2, backend):
    kept = _keeps_preact(rows, w2, activation, backend)
    return rows.new_empty(rows.shape), rows.new_empty((rows.shape[0], w13.shape[1]) if kept else 0)


@experts_backward.register_fake
def _(grad, rows, offsets, w13, w2, activation, b13, b2, preact, wanted=None):
    return _wanted_like(grad, (grad, w13, w2, b13, b2), _asked(wanted, 5))


@layer_training.register_fake
def _(x, order, inverse, offsets, weights, w13, w2, activation, b13, b2, residual, backend):
    packed = x.new_empty(order.shape[0], x.shape[1])
    kept = _keeps_preact(packed, w2, activation, backend)
    preact = x.new_empty((order.shape[0], w13.shape[1]) if kept else 0)
    return x.new_empty(x.shape), packed, x.new_empty(0 if kept else packed.shape), preact


@layer_backward.register_fake
def _(grad, packed, order, inverse, offsets, weights, w13, w2, activation, preact, wanted=None):
    d_packed = grad.new_empty(order.shape[0], grad.shape[1])
    return _wanted_like(grad, (d_packed, weights, w13, w2), _asked(wanted, 4))


@feed.register_fake
def _(x, order, inverse, offsets, w13, w2, activation, b13, b2, capacity, phase, ranks=1):
    return x.new_empty(order.shape[0], x.shape[1])


def _asked(wanted: Sequence[bool] | None, count: int) -> Sequence[bool]:
    """Which of `count` gradients are wanted: all for None, as compiled graphs have it that torch kept before there was a choice."""
    return [True] * count if wanted is None else wanted


def _wanted_like(grad: Tensor, tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Empty tensors like those whose gradient is wanted, (0,) for all others."""
    pairs = zip(tensors, wanted, strict=True)
    return tuple(
        like.new_empty(like.shape) if of_it and like is not None else grad.new_empty(0) for like, of_it in pairs
    )


def _keeps_preact(rows: Tensor, w2: Tensor, activation: str, backend: str) -> bool:
    """Whether a training operator keeps its pre-activations: by its arguments alone, on every device."""
    if not backend:
        return False
    from moe_routing_kernels.ops import cuda

    return cuda.keeps_preact(rows, w2, activation, backend)


def _save_for_experts(ctx, inputs, output) -> None:
    rows, offsets, w13, w2, ctx.activation, b13, b2 = inputs
    ctx.save_for_backward(rows, offsets, w13, w2, b13, b2, None)


def _save_for_training(ctx, inputs, output) -> None:
    rows, offsets, w13, w2, ctx.activation, b13, b2, _ = inputs
    preact = _kept(output[1])
    # The pre-activations stay differentiable, as only so a second derivative is refused; but zeros as large would be written for nothing.
    ctx.set_materialize_grads(False)
    rows = rows if preact is None or ctx.needs_input_grad[2] else None
    ctx.save_for_backward(rows, offsets, w13, w2, b13, b2, preact)


def _kept(preact: Tensor) -> Tensor | None:
    """The pre-activations (R, N) that a training operator returns, None where it kept none: (0,)."""
    return preact if preact.dim() > 1 else None


def _experts_gradients(ctx, grad):
    check_transforms("experts", grad)
    if grad is None:
        return (None,) * 7
    rows, offsets, w13, w2, b13, b2, preact = ctx.saved_tensors
    of_rows, _, of_w13, of_w2, _, of_b13, of_b2 = ctx.needs_input_grad[:7]
    wanted = [of_rows, of_w13, of_w2, of_b13, of_b2]
    gradients = experts_backward(grad, rows, offsets, w13, w2, ctx.activation, b13, b2, preact, wanted)
    d_rows, d_w13, d_w2, d_b13, d_b2 = _or_none(gradients, wanted)
    return d_rows, None, d_w13, d_w2, None, d_b13, d_b2


def _save_for_feed(ctx, inputs, output) -> None:
    x, order, inverse, offsets, w13, w2, ctx.activation, b13, b2, *_ = inputs
    ctx.save_for_backward(x, order, inverse, offsets, w13, w2, b13, b2)


def _feed_gradients(ctx, grad):
    check_transforms("feed", grad)
    x, order, inverse, offsets, w13, w2, b13, b2 = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[i] for i in (0, 4, 5, 7, 8)]
    rows = pack(x, order, inverse)
    gradients = experts_backward(grad, rows, offsets, w13, w2, ctx.activation, b13, b2, None, wanted)
    d_rows, d_w13, d_w2, d_b13, d_b2 = _or_none(gradients, wanted)
    d_x = None if d_rows is None else sum_of_rows(d_rows, inverse)
    return d_x, None, None, None, d_w13, d_w2, None, d_b13, d_b2, None, None, None


def _or_none(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients that are wanted, and None for each other one."""
    return [gradient if of_it else None for gradient, of_it in zip(gradients, wanted, strict=True)]


def _training_gradients(ctx, grad, of_preact):
    return *_experts_gradients(ctx, grad), None


def _save_for_layer(ctx, inputs, output) -> None:
    _, order, inverse, offsets, weights, w13, w2, ctx.activation, b13, b2, *_ = inputs
    _, packed, y, preact = output
    ctx.set_materialize_grads(False)
    preact = _kept(preact)
    y = y if preact is None and ctx.needs_input_grad[4] else None
    packed = packed if preact is None or ctx.needs_input_grad[5] else None
    ctx.save_for_backward(order, inverse, offsets, weights, w13, w2, b13, b2, packed, y, preact)


def _layer_gradients(ctx, grad, *_):
    check_transforms("layer", grad)
    if grad is None:
        return (None,) * 12
    order, inverse, offsets, weights, w13, w2, b13, b2, packed, y, preact = ctx.saved_tensors
    of_x, of_weights, of_w13, of_w2, of_b13, of_b2, of_residual = (
        ctx.needs_input_grad[i] for i in (0, 4, 5, 6, 8, 9, 10)
    )
    d_b13 = d_b2 = None
    if preact is not None:
        given, wanted = (packed, order, inverse, offsets, weights, w13, w2), [of_x, of_weights, of_w13, of_w2]
        gradients = layer_backward(grad, *given, ctx.activation, preact, wanted)
        d_packed, d_weights, d_w13, d_w2 = _or_none(gradients, wanted)
    else:
        wanted = [of_x, of_w13, of_w2, of_b13, of_b2]
        d_y, d_weights = combine_backward(grad, y, inverse, weights, order.shape[0])
        d_weights = d_weights if of_weights else None
        gradients = experts_backward(d_y, packed, offsets, w13, w2, ctx.activation, b13, b2, None, wanted)
        d_packed, d_w13, d_w2, d_b13, d_b2 = _or_none(gradients, wanted)
    d_x = None if d_packed is None else sum_of_rows(d_packed, inverse)
    d_residual = grad if of_residual else None
    return d_x, None, None, None, d_weights, d_w13, d_w2, None, d_b13, d_b2, d_residual, None


experts.register_autograd(_experts_gradients, setup_context=_save_for_experts)
feed.register_autograd(_feed_gradients, setup_context=_save_for_feed)
experts_training.register_autograd(_training_gradients, setup_context=_save_for_training)
layer_training.register_autograd(_layer_gradients, setup_context=_save_for_layer)
experts_backward.register_autograd(first_only("experts"))
layer_backward.register_autograd(first_only("layer"))
