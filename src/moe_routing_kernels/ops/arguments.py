"""What the operators take: every check raises `UserError` in one line. Values are not read, which would wait for the GPU."""

import torch
import torch.autograd.forward_ad
from torch import Tensor

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.errors import UserError, bad, pick, positive, whole
from moe_routing_kernels.gate import FUSED, FUSED_FORMULAS
from moe_routing_kernels.ops.reference import wide
from moe_routing_kernels.permute import LAYOUTS, MOST_ROWS, RowLayout
from moe_routing_kernels.routers import POSITIVE, ROUTERS

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_gate(logits: Tensor, top_k: int, rule: str, bias: Tensor | None, scale: float | None = None) -> None:
    """A known rule, logits (T, E) and bias (E,) that it takes, a choice that it can make, and a scale of weights or None."""
    if not isinstance(rule, str) or rule not in ROUTERS:
        pick("rule", rule, ROUTERS)
    if ROUTERS[rule].formula not in FUSED_FORMULAS:
        raise bad("rule", rule, ", ".join(FUSED), "route with your own function, then call fused_experts")
    _check_data(logits, "logits")
    check_transforms("gate", logits)
    experts = logits.shape[1]
    if not _whole(top_k) or not 1 <= top_k <= experts:
        raise bad("top_k", top_k, f"1 to {experts}, the number of experts")
    ROUTERS[rule].check(experts, top_k)
    if bias is not None:
        _check_bias(bias, rule, logits)
    if scale is not None and not isinstance(scale, torch.SymFloat) and not positive(scale):
        raise bad("scale", scale, POSITIVE)


def _check_bias(bias: Tensor, rule: str, logits: Tensor) -> None:
    """A rule with a selection bias, and (E,) of the dtype in which scores of `logits` are summed."""
    experts = logits.shape[1]
    if not ROUTERS[rule].bias:
        raise bad("bias", _shape_and_dtype(bias), f"None: {rule} has no selection bias")
    if bias.shape != (experts,) or bias.dtype != wide(logits.dtype):
        raise bad("bias", _shape_and_dtype(bias), f"({experts},) of {wide(logits.dtype)}")
    _check_device(bias, "bias", logits)


def check_permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> None:
    """ids (T, k) int32 or int64, a known layout, and no more rows than int32 counts."""
    if layout not in LAYOUTS:
        pick("layout", layout, LAYOUTS)
    _check_index(topk_ids, "topk_ids", torch.int32, torch.int64)
    if not _whole(experts) or experts < 1:
        raise bad("experts", experts, "a whole number, at least 1")
    if capacity is None and layout == "padded":
        raise bad("capacity", None, "a number of rows for layout padded", "capacity_of gives that of a capacity factor")
    # No tokens have a capacity of 0, whatever its factor.
    if capacity is not None and (not _whole(capacity) or (capacity < 1 and topk_ids.shape[0])):
        raise bad("capacity", capacity, "a whole number, at least 1, or None for no limit")
    _check_count("rows", RowLayout(topk_ids.shape[0], topk_ids.shape[1], experts, capacity, layout).rows)


def check_pack(x: Tensor, order: Tensor, inverse: Tensor) -> None:
    """x (T, H), order (R,) and inverse (T, k) int32."""
    _check_data(x, "x")
    check_transforms("pack", x)
    _check_index(inverse, "inverse")
    if order.dim() != 1 or order.dtype != torch.int32:
        raise bad("order", _shape_and_dtype(order), "(R,) of torch.int32")
    _check_count("rows", order.shape[0])
    if x.shape[0] != inverse.shape[0]:
        raise bad("x", _shape_and_dtype(x), f"{inverse.shape[0]} rows, as inverse has")
    for name, tensor in (("order", order), ("inverse", inverse)):
        _check_device(tensor, name, x)


def check_experts(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> None:
    """rows (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), and biases where the activation has them."""
    known = activation_of(activation)
    _check_data(rows, "rows")
    check_transforms("experts", rows, w13, w2, b13, b2)
    hidden = rows.shape[1]
    if w2.dim() != 3 or w2.shape[1] != hidden or w2.dtype != rows.dtype:
        raise bad("w2", _shape_and_dtype(w2), f"(E, {hidden}, I) of {rows.dtype}")
    experts, _, intermediate = w2.shape
    wide_rows = intermediate * (2 if known.gated else 1)
    if w13.shape != (experts, wide_rows, hidden) or w13.dtype != rows.dtype:
        raise bad("w13", _shape_and_dtype(w13), f"({experts}, {wide_rows}, {hidden}) of {rows.dtype}")
    if offsets.shape != (experts + 1,) or offsets.dtype != torch.int32:
        raise bad("offsets", _shape_and_dtype(offsets), f"({experts + 1},) of torch.int32")
    for name, bias, columns in (("b13", b13, wide_rows), ("b2", b2, hidden)):
        if (bias is not None) != known.biased:
            hint = "swiglu_oai_unbiased has none" if known.biased else ""
            got = "none" if bias is None else "a bias"
            raise bad(name, got, "biases with activation swiglu_oai, and with no other", hint)
        if bias is not None and (bias.shape != (experts, columns) or bias.dtype != rows.dtype):
            raise bad(name, _shape_and_dtype(bias), f"({experts}, {columns}) of {rows.dtype}")
    for name, tensor in (("offsets", offsets), ("w13", w13), ("w2", w2), ("b13", b13), ("b2", b2)):
        if tensor is not None:
            _check_device(tensor, name, rows)


def check_combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> None:
    """y (R, H), inverse (T, k) int32, weights (T, k), residual (T, H) or None."""
    _check_data(y, "y")
    check_transforms("combine", y, weights, residual)
    _check_index(inverse, "inverse")
    allowed = list(dict.fromkeys([wide(y.dtype), y.dtype]))
    if weights.shape != inverse.shape or weights.dtype not in allowed:
        raise bad("weights", _shape_and_dtype(weights), f"{tuple(inverse.shape)} of {' or '.join(map(str, allowed))}")
    shape = (inverse.shape[0], y.shape[1])
    if residual is not None and (residual.shape != shape or residual.dtype != y.dtype):
        raise bad("residual", _shape_and_dtype(residual), f"{shape} of {y.dtype}")
    for name, tensor in (("inverse", inverse), ("weights", weights), ("residual", residual)):
        if tensor is not None:
            _check_device(tensor, name, y)


def check_transforms(operator: str, *tensors: Tensor | None) -> None:
    """No derivative that an operator does not offer: torch would take forward mode for zero, without a word.

    Offered are backward passes of torch.autograd, and `torch.vmap`, which calls an operator for each element.
    """
    forward = torch.autograd.forward_ad._current_level >= 0
    if torch.compiler.is_compiling():  # tensors cannot be looked at
        if forward:
            raise _not_offered(operator, "forward mode in compiled code")
        return
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if not forward and functorch.peek_interpreter_stack() is None:
        return
    for tensor in tensors:
        while tensor is not None:
            if not functorch.is_batchedtensor(tensor) and _has_tangent(tensor):
                raise _not_offered(operator, "forward mode (jvp)")
            if functorch.is_gradtrackingtensor(tensor):
                raise _not_offered(operator, "a derivative of torch.func")
            tensor = functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else None


def _has_tangent(tensor: Tensor) -> bool:
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0:
        return False
    # Compiled for itself, where the caller could not be, it would see none.
    return torch.compiler.is_compiling() or forward_ad.unpack_dual(tensor).tangent is not None


def _not_offered(operator: str, transform: str) -> UserError:
    return bad(f"derivative of {operator}", transform, "backward passes of torch.autograd")


def refuse_second(operator: str) -> UserError:
    """The error of a backward pass through a gradient that has none."""
    return bad(f"derivative of {operator}", "the second", "the first; the second of gate and pack alone")


def _whole(value: object) -> bool:
    return isinstance(value, torch.SymInt) or whole(value)


def _check_data(data: Tensor, name: str) -> None:
    if data.dim() != 2 or data.dtype not in DTYPES:
        raise bad(name, _shape_and_dtype(data), f"two dimensions of {', '.join(map(str, DTYPES))}")
    _check_count(f"rows of {name}", data.shape[0])


def _check_index(index: Tensor, name: str, *dtypes: torch.dtype) -> None:
    allowed = dtypes or (torch.int32,)
    if index.dim() != 2 or index.dtype not in allowed or not index.shape[1]:
        raise bad(name, _shape_and_dtype(index), f"(T, k) of {' or '.join(map(str, allowed))}")
    _check_count("assignments", index.shape[0] * index.shape[1])


def _check_count(what: str, count: int) -> None:
    if count > MOST_ROWS:
        raise bad(what, count, f"at most {MOST_ROWS}: kernels count in int32")


def _check_device(tensor: Tensor, name: str, data: Tensor) -> None:
    if tensor.device != data.device:
        raise bad(f"device of {name}", str(tensor.device), data.device)


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
