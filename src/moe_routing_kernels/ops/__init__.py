"""An MoE layer for a model: ``from moe_routing_kernels import ops``, then `ops.route`, `ops.experts` and `ops.combine`, or `ops.layer` for all.

=============  ==========================================================  ===========================================
operator       from                                                        to
=============  ==========================================================  ===========================================
gate           logits (T, E)                                               expert ids (T, k), weights (T, k)
permute        expert ids (T, k)                                           counts (E,), offsets (E + 1,), order (R,), inverse (T, k)
pack           x (T, H), order, inverse                                    packed rows (R, H), grouped by expert
experts        packed rows (R, H), offsets, w13 (E, 2 I, H), w2 (E, H, I)  expert rows y (R, H)
combine        expert rows y (R, H), inverse, weights, residual (T, H)     combined (T, H)
route          x, logits                                                   gate, permute and pack in one call: a `Routed`
fused_experts  x, expert ids, weights, w13, w2                             combined (T, H): permute, pack, experts and combine
layer          x, logits, w13, w2                                          combined (T, H): gate and fused_experts
=============  ==========================================================  ===========================================

`order` (R,) int32 is the assignment t * k + j in each row, or -1 for padding; `inverse` (T, k) int32 is the row of each
assignment, or -1 where it was dropped. R is `RowLayout.rows`, which is known without waiting for the GPU and suffices
whatever the routing; ``offsets[-1]`` rows are in use. `order` and `inverse` that pack and combine are given must be each
other's inverse. Their values are not checked, because that would wait for the GPU.

Logits and data may be bfloat16, float16, float32 or float64. On CUDA the kernels of this package run, in CuTe DSL where they
can and it is installed, else in Triton; float64 and the CPU take plain torch, and so do experts in float32, whose GEMMs are
batched over blocks of rows: up to three times the multiplications, but without waiting for the GPU.

Under ``torch.autocast`` operators compute in the dtypes of their arguments, as without it: nothing is cast, and arguments of two
dtypes are refused in one line. Cast them, as `ops.transformers` does for the experts of a model.

gate is differentiable in the logits for every rule of `routers.ROUTERS`, pack in x, experts in rows, weights and biases, combine
in y, weights and residual; gate and pack also twice. Other second derivatives, forward mode (`jvp`) and derivatives of `torch.func` are
refused; `torch.vmap` calls an operator for each element. What needs no gradient costs nothing in a backward pass. Gradients of experts are
grouped GEMMs: of kernels in CuTe DSL on Hopper, in bfloat16 and float16, with a gate and without biases; else of torch in bfloat16, on
Hopper and Blackwell; else batched GEMMs over blocks of rows.

A first call compiles its kernels, for seconds; `prepare` compiles all that a model needs beforehand, and a capture never compiles.

`ops.ep` (``from moe_routing_kernels.ops import ep``) has `layer` and `fused_experts` for experts that are divided among ranks.

All are `torch.library` operators (``torch.ops.moe_routing_kernels``), so `torch.compile` takes them without a graph break, as one graph for
any number of tokens, and after a first call with the same sizes a CUDA graph may capture them: none waits for the GPU. Results are
contiguous, and the same bits in each run. Kernels take contiguous tensors at multiples of 16 bytes: any other layout, such as
transposed weights, is copied on every call, of which the first warns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_routing_kernels.choices import check_phase
from moe_routing_kernels.errors import bad
from moe_routing_kernels.implementations import KERNELS
from moe_routing_kernels.ops import arguments, backends, library, library_experts
from moe_routing_kernels.ops.preparation import prepare
from moe_routing_kernels.ops.reference import wide
from moe_routing_kernels.permute import RowLayout, capacity_of

__all__ = [
    "Routed",
    "RowLayout",
    "capacity_of",
    "combine",
    "experts",
    "fused_experts",
    "gate",
    "layer",
    "pack",
    "permute",
    "prepare",
    "route",
]


_RULES = library.leave_out(KERNELS, library, library_experts)


class Routed(NamedTuple):
    """What experts and `combine` need of a routing."""

    packed: Tensor  # (R, H) token rows grouped by expert; rows of padding are zero
    topk_ids: Tensor  # (T, k) int32
    topk_weights: Tensor  # (T, k) float32
    counts: Tensor  # (E,) int32: kept rows of each expert
    offsets: Tensor  # (E + 1,) int32: first row of each expert, and the number of rows in use
    order: Tensor  # (R,) int32: assignment of each row, -1 for padding
    inverse: Tensor  # (T, k) int32: row of each assignment, -1 where it was dropped


def gate(
    logits: Tensor,
    top_k: int,
    rule: str = "softmax_topk_renorm",
    bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token: logits (T, E) -> topk_ids (T, k) int32, topk_weights (T, k) float32.

    `rule` is a name of `routers.ROUTERS`; `bias` (E,) float32 is the selection bias of rules that take one: it changes the
    choice, not the weights. `scale` multiplies the weights, as `routed_scaling_factor` of a model's config does; None is the
    rule's own factor. For float64 logits, weights and bias are float64. Weights are differentiable in logits, but with
    `top_k` 1 a rule that renormalises has the weight `scale` whatever the logits, so the router gets no gradient.

    The result is the same on all devices, up to rounding: ids are in the order of falling scores, and among equal scores
    the lowest id comes first. A token with a NaN among its scores (plus bias) gets ids -1, which are of no expert, and NaN
    weights. Logits may be infinite, and weights are then the limit: experts at +inf share a softmax equally, experts at
    -inf get 0 and, where all are at -inf, equal shares. A sum that renormalises is ``sum + 1e-20``, so weights whose scores
    all vanish are 0. Raises `UserError`.
    """
    arguments.check_gate(logits, top_k, rule, bias, scale)
    backends.warn_of_copies("gate", logits=logits)
    return library.gate(logits, bias, top_k, rule, float(scale) if isinstance(scale, int) else scale)


def permute(
    topk_ids: Tensor, experts: int, capacity: int | None = None, layout: str = "compact"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort assignments by expert: topk_ids (T, k) -> counts (E,), offsets (E + 1,), order (R,), inverse (T, k), int32.

    An expert keeps its first `capacity` assignments in token order (None: all); `capacity_of` gives that of a capacity
    factor. Layouts: ``compact``, ``padded`` (every expert has `capacity` rows), ``block64`` and ``block128`` (each expert's
    rows rounded up). Ids are int32, or int64 as `torch.topk` has them; those outside 0 .. experts - 1 take no row. Raises
    `UserError`.
    """
    arguments.check_permute(topk_ids, experts, capacity, layout)
    return library.permute(topk_ids, experts, capacity, layout)


def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Copy token rows to expert rows: x (T, H), order (R,), inverse (T, k) -> packed (R, H); padding rows are zero.

    Differentiable in x: a token's gradient is the sum over its kept rows. Raises `UserError`.
    """
    arguments.check_pack(x, order, inverse)
    backends.warn_of_copies("pack", x=x)
    return library.pack(x, order, inverse)


def experts(
    rows: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Tensor:
    """Feed rows (R, H), grouped by expert, through the network of their expert -> y (R, H).

    offsets (E + 1,) int32 says which rows are whose; w13 (E, 2 I, H) holds gates above ups, or (E, I, H) of `relu2`; w2 is
    (E, H, I). Activations: ``swiglu``, ``geglu``, ``relu2``, ``swiglu_limit10`` (or another number:
    clamped), ``swiglu_oai``, which has biases b13 (E, 2 I) and b2 (E, H), and ``swiglu_oai_unbiased`` (`moe_routing_kernels.experts`).
    In float16 an activated number or a row beyond 65504 is infinite, on every device, and what `combine` makes of it infinite or NaN,
    whatever its weight: use bfloat16 for models made in it.
    Rows from offsets[E] on are of no expert: what y and the gradient hold there is undefined, and `combine` never reads it.
    Differentiable in all but offsets; frozen weights have no part in the backward pass. On CUDA weights that are not contiguous are
    copied on every call. Raises `UserError`.
    """
    arguments.check_experts(rows, offsets, w13, w2, activation, b13, b2)
    backends.warn_of_copies("experts", rows=rows, w13=w13, w2=w2, b13=b13, b2=b2)
    if _learns(rows, w13, w2, b13, b2):
        backend = backends.training(rows.device)
        return library_experts.experts_training(rows, offsets, w13, w2, activation, b13, b2, backend)[0]
    return library_experts.experts(rows, offsets, w13, w2, activation, b13, b2)


def _learns(*tensors: Tensor | None) -> bool:
    """Whether any of these wants a gradient."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """Sum every token's expert rows: y (R, H), inverse (T, k), weights (T, k) -> combined (T, H), of y's dtype.

    Weights are float32 or of y's dtype (float64 for float64 y). A residual (T, H) of y's dtype, such as the output of shared
    experts, is added in the same pass. Sums are in float32 and rounded once. Dropped assignments add nothing, whatever their
    weight, and get no gradient. Differentiable in y, weights and residual. Raises `UserError`.
    """
    arguments.check_combine(y, inverse, weights, residual)
    backends.warn_of_copies("combine", y=y, residual=residual)
    if _learns(y, weights, residual):  # whose gradient is rounded to the dtype of weights once
        weights = weights.to(wide(y.dtype))
    return library.combine(y, inverse, weights, residual)


def route(
    x: Tensor,
    logits: Tensor,
    top_k: int,
    rule: str = "softmax_topk_renorm",
    bias: Tensor | None = None,
    capacity: int | None = None,
    layout: str = "compact",
    scale: float | None = None,
) -> Routed:
    """gate, permute and pack: token rows x (T, H) and router logits (T, E) -> the packed rows, and what `combine` needs.

    Raises `UserError` for arguments that one of the three does not take.
    """
    topk_ids, topk_weights = gate(logits, top_k, rule, bias, scale)
    counts, offsets, order, inverse = permute(topk_ids, logits.shape[1], capacity, layout)
    return Routed(pack(x, order, inverse), topk_ids, topk_weights, counts, offsets, order, inverse)


def fused_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    capacity: int | None = None,
    activation: str = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
    phase: str | None = None,
    ranks: int = 1,
) -> Tensor:
    """A layer behind a router of its own: x (T, H), topk_ids (T, k), topk_weights (T, k) -> combined (T, H), plus residual (T, H).

    Ids are as of `permute`, weights of the layer as of `experts`, those of tokens as of `combine`.

    Which kernels run the experts on a GPU, and whether they gather the tokens' rows or are given packed ones, is chosen by sizes
    from a table of measured layers (`choices`), without waiting for the GPU; a `phase`, ``prefill`` or ``decode``, is a hint
    that leaves only such cells. With `ranks` the experts are those of one of so many ranks, and kernels are chosen for its
    share of the assignments. Where rows or weights of experts need a gradient, rows are packed.

    Raises `UserError` for arguments that `permute`, `experts` or `combine` does not take, and for an unknown phase.
    """
    check_phase(phase)
    _, offsets, order, inverse = permute(topk_ids, w2.shape[0], capacity)
    arguments.check_pack(x, order, inverse)
    arguments.check_experts(x, offsets, w13, w2, activation, b13, b2)
    backends.warn_of_copies("fused_experts", x=x, w13=w13, w2=w2, b13=b13, b2=b2, residual=residual)
    if _learns(x, w13, w2, b13, b2):
        arguments.check_combine(x, inverse, topk_weights, residual)
        weights = (topk_weights.to(wide(x.dtype)), w13, w2, activation, b13, b2)
        return library_experts.layer_training(
            x, order, inverse, offsets, *weights, residual, backends.training(x.device)
        )[0]
    y = library_experts.feed(x, order, inverse, offsets, w13, w2, activation, b13, b2, capacity, phase, ranks)
    return combine(y, inverse, topk_weights, residual)


def layer(
    x: Tensor,
    logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    rule: str = "softmax_topk_renorm",
    bias: Tensor | None = None,
    capacity: int | None = None,
    activation: str = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
    phase: str | None = None,
    scale: float | None = None,
) -> Tensor:
    """A whole MoE layer: x (T, H), router logits (T, E), and what `fused_experts` takes -> combined (T, H), plus residual (T, H).

    `rule`, `bias` and `scale` are as of `gate`. A token with a NaN among its scores is of no expert: its row is that of the residual, or 0,
    and the gradient of its logits NaN.

    Raises `UserError` for arguments that `gate` or `fused_experts` does not take, and for logits of another number of experts.
    """
    topk_ids, topk_weights = gate(logits, top_k, rule, bias, scale)
    if logits.shape[1] != w2.shape[0]:
        raise bad("logits", tuple(logits.shape), f"(T, {w2.shape[0]}): w2 has {w2.shape[0]} experts")
    return fused_experts(x, topk_ids, topk_weights, w13, w2, capacity, activation, b13, b2, residual, phase)
