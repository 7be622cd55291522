"""Every operation on CUDA: allocation, and the launch of the kernel that `choices.chooser` names; else `reference`.

Kernels need data in float32 or less; what they do not take (float64, no elements) runs in plain torch: experts in `blocks`, where
offsets are not read on the host, all else in `reference`. Nothing here waits for the GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe_routing_kernels.choices import chooser
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.experts import Experts, torch_experts
from moe_routing_kernels.experts.common import activate, experts_of_rows
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import backends, blocks, reference
from moe_routing_kernels.ops.backends import FORMAT_NAMES, ready
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import RowLayout
from moe_routing_kernels.routers import ROUTERS, scaled

# Major compute capabilities for which torch has a grouped GEMM of 16-bit numbers; for others it loops and reads offsets on the host.
_GROUPED = (9, 10)


def gate(logits: Tensor, bias: Tensor | None, top_k: int, rule: str, scale: float | None) -> tuple[Tensor, Tensor]:
    """logits (T, E), bias (E,) or None -> ids (T, k) int32, weights (T, k); -1 and NaN for a token with a NaN."""
    tokens, experts = logits.shape
    problem = Gate(tokens, experts, top_k, FORMAT_NAMES.get(logits.dtype, ""), scaled(rule, scale))
    if (bind := _bind(problem, logits)) is None:
        return reference.gate(logits, bias, top_k, rule, scale)
    if ROUTERS[rule].bias:
        bias = logits.new_zeros(experts, dtype=torch.float32) if bias is None else ready(bias)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32)
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    bind(problem, logits=ready(logits), topk_ids=ids, topk_weights=weights, bias=bias)()
    return ids, weights


def permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> reference.Indices:
    """ids (T, k) int32 or int64 -> counts (E,), offsets (E + 1,), order (R,), inverse (T, k), all int32. Ids of no expert take no row."""
    problem = RowLayout(topk_ids.shape[0], topk_ids.shape[1], experts, capacity, layout).problem
    problem = replace(problem, ids=str(topk_ids.dtype).removeprefix("torch."))
    if (bind := _bind(problem, topk_ids)) is None:
        return reference.permute(topk_ids, experts, capacity, layout)
    sizes = (experts,), (experts + 1,), (problem.rows,), topk_ids.shape
    counts, offsets, order, inverse = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    bind(problem, topk_ids=ready(topk_ids), counts=counts, offsets=offsets, order=order, inverse=inverse)()
    return counts, offsets, order, inverse


def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x (T, H), order (R,), inverse (T, k) -> packed (R, H); rows of padding are zero."""
    dtype = FORMAT_NAMES.get(x.dtype, "")
    problem = Pack(x.shape[0], x.shape[1], inverse.shape[1], len(order), dtype, dtype, padding=True)
    if not len(order) or (bind := _bind(problem, x)) is None:
        return reference.pack(x, order, inverse)
    packed = x.new_empty(len(order), x.shape[1])
    bind(problem, x=ready(x), order=ready(order), inverse=ready(inverse), packed=packed)()
    return packed


def experts(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> Tensor:
    """rows (R, H), offsets (E + 1,), w13 (E, N, H), w2 (E, H, I), biases -> y (R, H); undefined in rows of no expert."""
    problem = _experts(rows, w2, activation)
    if (bind := _bind(problem, rows)) is None:
        return blocks.experts(rows, offsets, w13, w2, activation, b13, b2)
    y = rows.new_empty(rows.shape)
    bind(problem, packed=ready(rows), **_weights(offsets, w13, w2, b13, b2), y=y)()
    return y


def _weights(offsets: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None) -> dict[str, Tensor]:
    """What kernels of experts read beside rows, by their names; biases where there are any."""
    given = {"offsets": offsets, "w13": w13, "w2": w2} | ({} if b13 is None or b2 is None else {"b13": b13, "b2": b2})
    return {name: ready(tensor) for name, tensor in given.items()}


def keeps_preact(rows: Tensor, w2: Tensor, activation: str, backend: str) -> bool:
    """Whether kernels of ours train experts of rows (R, H) and w2 (E, H, I): they keep the pre-activations.

    For other formats, activations and sizes, and for another `backend` (`backends.training`), the backward pass computes them again.
    """
    if not backend:
        return False
    from moe_routing_kernels.experts import cute_training

    return cute_training.unsupported(_experts(rows, w2, activation), backends.trained_on(backend)) is None


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
    """`experts`, and what the backward pass wants of it: the pre-activations (R, N), or (0,) where it computes them again."""
    if not keeps_preact(rows, w2, activation, backend):
        return experts(rows, offsets, w13, w2, activation, b13, b2), rows.new_empty(0)
    if not rows.numel():
        return rows.new_empty(rows.shape), rows.new_empty(len(rows), w13.shape[1])
    from moe_routing_kernels.experts import cute_training

    problem = _experts(rows, w2, activation)
    return cute_training.forward(problem, ready(rows), ready(offsets), ready(w13), ready(w2))


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
    """`pack`, `experts_training` and `combine` -> combined (T, H), packed (R, H), and y (R, H) or pre-activations (R, N), the other being (0,)."""
    packed = pack(x, order, inverse)
    y, preact = experts_training(packed, offsets, w13, w2, activation, b13, b2, backend)
    combined = combine(y, inverse, weights, residual)
    return combined, packed, y if preact.dim() == 1 else y.new_empty(0), preact


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
) -> Sequence[Tensor | None]:
    """grad (T, H) of combined, and the pre-activations that `layer_training` kept -> the gradients of packed, weights (T, k), w13 and w2.

    Those that are not `wanted` are None; packed may be None where that of w13 is not. The gradient of a weight is that of its row's
    activated ones, times these: y is not needed.
    """
    of_packed, of_weights, of_w13, of_w2 = wanted = wanted or [True] * 4
    if not grad.numel() or not len(order):
        likes = (grad.new_empty(len(order), grad.shape[1]), weights, w13, w2)
        return tuple(torch.zeros_like(like) if of_it else None for like, of_it in zip(likes, wanted, strict=True))
    if not keeps_preact(
        grad, w2, activation, backends.training(grad.device)
    ):  # `layer_training` keeps none then: a call of its own, which waits
        return reference.layer_backward(
            grad, packed, order, inverse, offsets, weights, w13, w2, activation, preact, wanted
        )
    from moe_routing_kernels.experts import cute_training

    scales = weights.reshape(-1).index_select(0, order.clamp_min(0)).masked_fill_(order < 0, 0)  # a weight may be NaN
    d_y = pack(grad, order, inverse)
    given = (d_y, None if packed is None else ready(packed), ready(offsets), ready(w13), ready(w2), preact, scales)
    of_all = (of_packed, of_w13, of_w2, of_weights)
    d_packed, d_w13, d_w2, d_scales = cute_training.backward(_experts(d_y, w2, activation), *given, wanted=of_all)
    if d_scales is None:
        return d_packed, None, d_w13, d_w2
    of_kept = d_scales.index_select(0, inverse.clamp_min(0).reshape(-1)).view(inverse.shape)
    return d_packed, of_kept.masked_fill_(inverse < 0, 0), d_w13, d_w2


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
    """`pack` and `experts`: x (T, H), order (R,), inverse (T, k) -> y (R, H), in the way that is chosen for these sizes."""
    (tokens, top_k), (count, hidden, intermediate), dtype = inverse.shape, w2.shape, FORMAT_NAMES.get(x.dtype, "")
    layout = RowLayout(tokens, top_k, count, capacity, ranks=ranks)
    problem = Layer(layout, hidden, intermediate, dtype, dtype, dtype, router="", activation=activation)
    way = chooser.way(problem, backends.target(x.device), phase) if x.numel() and dtype else None
    if way is None:
        return experts(pack(x, order, inverse), offsets, w13, w2, activation, b13, b2)
    y = x.new_empty(len(order), hidden)
    rows = (
        {"x": ready(x), "order": ready(order), "inverse": ready(inverse)}
        if way.gathers
        else {"packed": pack(x, order, inverse)}
    )
    weights = _weights(offsets, w13, w2, b13, b2)
    returned = way.module.bind(problem if way.gathers else problem.experts, **rows, **weights, y=y)()
    return returned["y"] if returned else y  # torch allocates its result


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
) -> Sequence[Tensor | None]:
    """grad (R, H) of y -> those of rows (undefined in rows of no expert), w13, w2, b13 and b2 that are `wanted`, None for each other one.

    Kernels of ours where `experts_training` kept the pre-activations; else grouped GEMMs of torch where they can; else `blocks`. Nothing
    waits for the GPU.
    """
    problem, wanted = _experts(grad, w2, activation), wanted or [True] * 5
    if preact is not None and grad.numel():
        from moe_routing_kernels.experts import cute_training

        given = (ready(grad), None if rows is None else ready(rows), ready(offsets), ready(w13), ready(w2), preact)
        return *cute_training.backward(problem, *given, wanted=(*wanted[:3], False))[:3], None, None
    rows = grad if rows is None else rows  # of which there are none
    in_groups = (
        backends.target(grad.device).capability[0] in _GROUPED and torch_experts.unsupported_grouped_mm(problem) is None
    )
    if not (in_groups and grad.numel() and any(wanted)):
        return blocks.experts_backward(grad, rows, offsets, w13, w2, activation, b13, b2, wanted)
    return _grouped_backward(ready(grad), ready(rows), ready(offsets), ready(w13), ready(w2), activation, b13, wanted)


def _grouped_backward(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    """`experts_backward` in grouped GEMMs of torch. Gradients of biases are GEMMs with a column of ones, of which torch takes 8."""
    of_rows, of_w13, of_w2, of_b13, of_b2 = wanted
    d_rows = d_w13 = d_w2 = d_b13 = d_b2 = None
    ends, ones = offsets[1:], grad.new_ones(len(grad), 8)
    if of_b2:
        d_b2 = grouped_mm(grad.T, ones, offs=ends)[..., 0]
    if of_w2 or of_rows or of_w13 or of_b13:
        preact = grouped_mm(rows, w13.transpose(1, 2), offs=ends).float()
        if b13 is not None:
            preact += b13.index_select(0, experts_of_rows(offsets, len(rows)))
        if of_w2:
            d_w2 = grouped_mm(grad.T, activate(activation, preact).to(rows.dtype), offs=ends)
    if of_rows or of_w13 or of_b13:
        d_inner = grouped_mm(grad, w2, offs=ends).float()
        d_preact = reference.activation_gradient(activation, preact, d_inner).to(rows.dtype)
        d_rows = grouped_mm(d_preact, w13, offs=ends) if of_rows else None
        d_w13 = grouped_mm(d_preact.T, rows, offs=ends) if of_w13 else None
        d_b13 = grouped_mm(d_preact.T, ones, offs=ends)[..., 0] if of_b13 else None
    return d_rows, d_w13, d_w2, d_b13, d_b2


def _experts(rows: Tensor, w2: Tensor, activation: str) -> Experts:
    """The problem of rows (R, H) and w2 (E, H, I); weights have the format of the rows."""
    (experts, hidden, intermediate), dtype = w2.shape, FORMAT_NAMES.get(rows.dtype, "")
    return Experts(rows.shape[0], hidden, intermediate, experts, dtype, dtype, dtype, activation=activation)


def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """y (R, H), inverse (T, k), weights (T, k), residual (T, H) or None -> combined (T, H), y's dtype."""
    tokens, top_k = inverse.shape
    formats = FORMAT_NAMES.get(y.dtype, ""), FORMAT_NAMES.get(weights.dtype, "")
    problem = Combine(tokens, y.shape[1], top_k, formats[0], dropping=True, weights=formats[1])
    if not tokens or (bind := _bind(problem, y)) is None:
        return reference.combine(y, inverse, weights, residual)
    combined = y.new_empty(tokens, y.shape[1])
    residual = None if residual is None else ready(residual)
    tensors = {"y": ready(y), "inverse": ready(inverse), "topk_weights": ready(weights), "residual": residual}
    bind(problem, **tensors, combined=combined)()
    return combined


def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    """grad (T, H) of combined -> those of y (rows, H), of grad's dtype, and of weights (T, k).

    Without `rows` the first, without y (R, H) the second is not needed, and is of shape (0,).
    """
    if grad.dtype == torch.float64 or chooser.unmet(("gpu", "triton"), backends.target(grad.device)):
        return reference.combine_backward(grad, y, inverse, weights, rows)
    from moe_routing_kernels.ops import triton_backward

    return triton_backward.combine_backward(grad, y, inverse, weights, rows)


def _bind(problem: Any, data: Tensor) -> Callable | None:
    """The `bind` of the kernel of a problem; None where `reference` must do it."""
    if not data.numel() or data.dtype == torch.float64:
        return None
    chosen = chooser.kernel(problem, backends.target(data.device))
    return None if chosen is None else chosen.bind
