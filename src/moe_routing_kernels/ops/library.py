"""The operators as `torch.library` knows them: what runs on which device, shapes without data, and derivatives; and autocast.

Operators take no part in autocast, and the experts of a model are cast as the library's own GEMMs are. Under ``torch.autocast`` an operator computes in the dtypes of its arguments, as without: its sums stay in float32, and arguments of two
dtypes are refused. Without a rule of its own, the plain torch inside an operator would be cast, and lose precision in silence.

``torch.ops.moe_routing_kernels.gate``, ``permute``, ``pack`` and ``combine``, with ``combine_backward``; those of the experts are in
`library_experts`. Arguments are checked by the functions in `ops`, not here. The backward of pack is a combine with unit weights;
that of combine is a pack of weighted rows and k dot products per token; that of gate is plain torch.

Invariant, of all operators: an output is contiguous, whatever strides the inputs have, and shares memory with no input and no other
output. A backward operator computes the gradients that are asked for; any other is of shape (0,).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from moe_routing_kernels.implementations import KERNELS
from moe_routing_kernels.ops import reference
from moe_routing_kernels.ops.arguments import check_transforms, refuse_second
from moe_routing_kernels.permute import RowLayout

_KEYS = ("AutocastCPU", "AutocastCUDA")


def leave_out(namespace: str, *modules: ModuleType) -> torch.library.Library:
    """Make the custom operators of modules run, on CPU and CUDA, as if autocast were off. The result must live as long as they do."""
    rules = torch.library.Library(namespace, "FRAGMENT")
    first, second = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in _KEYS)
    named = {
        name: value for module in modules for name, value in vars(module).items()
    }  # one may import another's operators
    for name, value in named.items():
        if (operator := getattr(value, "_opoverload", None)) is not None:
            for key in _KEYS:
                rules.impl(name, _without_autocast(operator, first | second), key, with_keyset=True)
    return rules


def _without_autocast(operator: Any, keys: Any) -> Any:
    def run(_: Any, *arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*arguments, **options)

    return run


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of GEMMs of x and weight: that of autocast where it is on and takes them, else that of the weights.

    So do the library's own GEMMs: an eager one under autocast, and a grouped one, which casts rows to the weights' dtype.
    """
    device = x.device.type
    on = torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, weight.dtype)
    return torch.get_autocast_dtype(device) if on else weight.dtype


def contiguous(results: Any, like: Tensor) -> Any:
    """What an operator returns: its results, all contiguous, and (0,) of `like`'s dtype for a gradient that is not asked for."""
    if isinstance(results, Tensor):
        return results.contiguous()
    return tuple(like.new_empty(0) if result is None else result.contiguous() for result in results)


@custom_op(f"{KERNELS}::gate", mutates_args=(), device_types="cpu")
def gate(logits: Tensor, bias: Tensor | None, top_k: int, rule: str, scale: float | None) -> tuple[Tensor, Tensor]:
    return contiguous(reference.gate(logits, bias, top_k, rule, scale), logits)


@custom_op(f"{KERNELS}::permute", mutates_args=(), device_types="cpu")
def permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return contiguous(reference.permute(topk_ids, experts, capacity, layout), topk_ids)


@custom_op(f"{KERNELS}::pack", mutates_args=(), device_types="cpu")
def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return contiguous(reference.pack(x, order, inverse), x)


@custom_op(f"{KERNELS}::combine", mutates_args=(), device_types="cpu")
def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    return contiguous(reference.combine(y, inverse, weights, residual), y)


@custom_op(f"{KERNELS}::combine_backward", mutates_args=(), device_types="cpu")
def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    return contiguous(reference.combine_backward(grad, y, inverse, weights, rows), grad)


def on_cuda(name: str) -> Callable:
    """What runs an operator on CUDA, with its first tensor's device as the current one, on which kernels are launched."""

    def run(data: Tensor, *rest):
        from moe_routing_kernels.ops import cuda

        with torch.cuda.device(data.device):
            return contiguous(getattr(cuda, name)(data, *rest), data)

    return run


gate.register_kernel("cuda", on_cuda("gate"))
permute.register_kernel("cuda", on_cuda("permute"))
pack.register_kernel("cuda", on_cuda("pack"))
combine.register_kernel("cuda", on_cuda("combine"))
combine_backward.register_kernel("cuda", on_cuda("combine_backward"))


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


def _save_for_gate(ctx, inputs, output) -> None:
    ctx.rule, ctx.scale = inputs[3:]
    ctx.set_materialize_grads(False)  # no zeros for ids, which have no gradient
    ctx.save_for_backward(inputs[0], output[0])


def _gate_gradients(ctx, _, grad):
    if grad is None:
        return (None,) * 5
    logits, ids = ctx.saved_tensors
    return reference.gate_backward(grad, logits, ids, ctx.rule, ctx.scale), None, None, None, None


def _save_for_pack(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _pack_gradients(ctx, grad):
    check_transforms("pack", grad)
    (inverse,) = ctx.saved_tensors
    return sum_of_rows(grad, inverse), None, None


def sum_of_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """The sum of each token's kept rows: rows (R, H), inverse (T, k) -> (T, H)."""
    return combine(rows, inverse, torch.ones(inverse.shape, dtype=reference.wide(rows.dtype), device=rows.device), None)


def _save_for_combine(ctx, inputs, output) -> None:
    y, inverse, weights, _ = inputs
    ctx.rows = y.shape[0]
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, inverse, weights)


def _combine_gradients(ctx, grad):
    check_transforms("combine", grad)
    of_y, _, of_weights, of_residual = ctx.needs_input_grad
    y, inverse, weights = ctx.saved_tensors
    d_y = d_weights = None
    if of_y or of_weights:
        d_y, d_weights = combine_backward(grad, y, inverse, weights, ctx.rows if of_y else None)
    return d_y if of_y else None, None, d_weights if of_weights else None, grad if of_residual else None


def first_only(operator: str) -> Callable:
    """The derivative of a backward operator: an error, as its outputs would else pass for constants."""

    def refuse(ctx, *grads):
        raise refuse_second(operator)

    return refuse


gate.register_autograd(_gate_gradients, setup_context=_save_for_gate)
pack.register_autograd(_pack_gradients, setup_context=_save_for_pack)
combine.register_autograd(_combine_gradients, setup_context=_save_for_combine)
combine_backward.register_autograd(first_only("combine"))
