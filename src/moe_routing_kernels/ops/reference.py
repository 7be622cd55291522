"""Every operation in plain torch: what the CPU runs, and what the kernels are compared with.

Any floating-point dtype on any device; sums in float32, in float64 for float64 data. But for experts, whose offsets are read
on the host, nothing waits for the GPU, so that float64 data can be captured in a CUDA graph too. Same contracts as `cuda`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_routing_kernels.activations import Activation, activation_of
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.gate import FusedRule, rule_of
from moe_routing_kernels.permute import RowLayout, torch_permute
from moe_routing_kernels.routers import formulas

_MOST_HALF = 65520.0  # from here on float16 rounds to infinity
Indices = tuple[Tensor, Tensor, Tensor, Tensor]  # counts, offsets, order, inverse


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which data of `dtype` is summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gate(logits: Tensor, bias: Tensor | None, top_k: int, rule: str, scale: float | None) -> tuple[Tensor, Tensor]:
    """logits (T, E), bias (E,) or None -> ids (T, k) int32, weights (T, k) of `wide`; -1 and NaN for a token with a NaN."""
    known = rule_of(rule)
    scores = _score(logits.to(wide(logits.dtype)), known.select)
    if bias is not None:
        scores = scores + bias
    ids = formulas.choose(scores, top_k, known.groups, known.keep_groups, known.group_best, ordered=True).int()
    broken = scores.isnan().any(1, keepdim=True)
    return ids.masked_fill(broken, -1), weigh(logits, ids, rule, scale).masked_fill(broken, torch.nan)


def weigh(logits: Tensor, ids: Tensor, rule: str, scale: float | None) -> Tensor:
    """The weights (T, k), of `wide`, that a rule gives the experts ids (T, k) of logits (T, E), times `scale` (None: the rule's)."""
    return _unscaled(logits.to(wide(logits.dtype)), ids.clamp_min(0).long(), rule_of(rule)) * _scale(rule, scale)


def _scale(rule: str, scale: float | None) -> float:
    """The factor on the weights: None is the rule's own."""
    return rule_of(rule).scale if scale is None else scale


def gate_backward(grad: Tensor, logits: Tensor, ids: Tensor, rule: str, scale: float | None) -> Tensor:
    """grad (T, k) of the weights -> that of logits (T, E), of logits' dtype; NaN for a token whose ids are -1.

    Written out, for automatic differentiation of `weigh` takes the host several times as long, and in few operations, as each is a
    launch. Itself differentiable. A weight w of score s has the slope w s'/s, of which neither factor is 0/0 where a score vanishes;
    renormalising takes away the mean of the gradients by weight.
    """
    known, wide_logits, at = rule_of(rule), logits.to(wide(logits.dtype)), ids.clamp_min(0).long()
    grad = grad if (factor := _scale(rule, scale)) == 1 else grad * factor
    if known.weigh == "softmax_all":
        shares = formulas.softmax(wide_logits)
        flow = shares.gather(1, at) * grad
        gradient = (shares * -flow.sum(1, keepdim=True)).scatter_add_(1, at, flow)
    else:
        chosen = wide_logits.gather(1, at)
        weights = _of_chosen(chosen, known)
        if known.renormalize or known.weigh == "softmax_chosen":
            grad = grad - (weights * grad).sum(1, keepdim=True)
        slope = weights * grad
        if known.weigh != "softmax_chosen":
            slope = slope * _relative_slope(chosen, known.weigh)
        gradient = slope.new_zeros(logits.shape).scatter_(1, at, slope)
    return gradient.masked_fill_(ids[:, :1] < 0, torch.nan).to(logits.dtype)


def _unscaled(logits: Tensor, at: Tensor, rule: FusedRule) -> Tensor:
    """The weights (T, k) of the experts `at` (T, k) int64 of logits (T, E), before the rule's scale."""
    if rule.weigh == "softmax_all":
        return formulas.softmax(logits).gather(1, at)
    return _of_chosen(logits.gather(1, at), rule)


def _of_chosen(chosen: Tensor, rule: FusedRule) -> Tensor:
    """The weights (T, k) of experts with the logits `chosen` (T, k), for rules that weigh by these alone."""
    if rule.weigh == "softmax_chosen":
        return formulas.softmax(chosen)
    scores = _score(chosen, rule.weigh)
    return formulas.renormalised(scores) if rule.renormalize else scores


def _score(logits: Tensor, kind: str) -> Tensor:
    """The score of every logit."""
    if kind == "sqrtsoftplus":
        return formulas.score_sqrtsoftplus_topk(logits)
    return logits.sigmoid() if kind == "sigmoid" else logits


def _relative_slope(logits: Tensor, kind: str) -> Tensor:
    """s'/s of the score s of every logit, from 0 to 1."""
    if kind == "sigmoid":
        return torch.sigmoid(-logits)
    tail = logits < formulas.TAIL
    rest = logits.masked_fill(tail, 0)
    return torch.where(tail, 0.5, rest.sigmoid() / (2 * torch.nn.functional.softplus(rest)))


def permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> Indices:
    """ids (T, k) -> counts (E,), offsets (E + 1,), order (R,), inverse (T, k), all int32. Ids of no expert take no row."""
    problem = RowLayout(topk_ids.shape[0], topk_ids.shape[1], experts, capacity, layout).problem
    counts, offsets, order, inverse = torch_permute.permute(replace(problem, outside=True), topk_ids)
    return counts.int(), offsets.int(), order.int(), inverse.int()


def pack(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x (T, H), order (R,), inverse (T, k) -> packed (R, H); rows of padding are zero."""
    if not x.numel():
        return x.new_zeros(len(order), x.shape[1])
    rows = x.index_select(0, order.clamp_min(0).long() // inverse.shape[1])
    return rows.masked_fill_((order < 0).unsqueeze(1), 0)


def combine(y: Tensor, inverse: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """y (R, H), inverse (T, k), weights (T, k), residual (T, H) or None -> combined (T, H), y's dtype."""
    total = y.new_zeros(len(inverse), y.shape[1], dtype=wide(y.dtype))
    if residual is not None:
        total += residual
    for j, (kept, terms) in enumerate(_choices(y, inverse)):
        total += torch.where(kept, weights[:, j, None].to(total.dtype) * terms.to(total.dtype), 0)
    return total.to(y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, weights: Tensor, rows: int | None
) -> tuple[Tensor, Tensor]:
    """grad (T, H) of combined -> those of y (rows, H), of grad's dtype, and of weights (T, k).

    Without `rows` the first, without y (R, H) the second is not needed, and is of shape (0,).
    """
    wide_grad = grad.to(wide(grad.dtype))
    d_y, d_weights = grad.new_empty(0), weights.new_empty(0)
    if rows is not None:
        # One more row takes what was dropped, so that nothing is chosen on the host.
        d_y = grad.new_zeros(rows + 1, grad.shape[1])
        for j, row in enumerate(inverse.long().unbind(1)):
            d_y[torch.where(row < 0, rows, row)] = (wide_grad * weights[:, j, None]).to(grad.dtype)
        d_y = d_y[:rows]
    if y is not None:
        parts = [
            torch.where(kept, wide_grad * terms.to(wide_grad.dtype), 0).sum(1) for kept, terms in _choices(y, inverse)
        ]
        d_weights = torch.stack(parts, 1).to(weights.dtype)
    return d_y, d_weights


def _choices(y: Tensor, inverse: Tensor):
    """Of each choice j in turn: which tokens kept it (T, 1), and their rows of y (T, H), anything where it was dropped."""
    for row in inverse.long().unbind(1):
        kept = (row >= 0).unsqueeze(1)
        yield kept, y.index_select(0, row.clamp_min(0)) if len(y) else y.new_zeros(len(row), y.shape[1])


def experts(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> Tensor:
    """rows (R, H), offsets (E + 1,), w13 (E, N, H), w2 (E, H, I), biases -> y (R, H); zero in rows of no expert."""
    return experts_training(rows, offsets, w13, w2, activation, b13, b2, keep=False)[0]


def experts_training(
    rows: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """`experts`, and where they are to be kept, the pre-activations (R, N)."""
    y = rows.new_zeros(rows.shape)
    kept = rows.new_zeros(rows.shape[0], w13.shape[1]) if keep else None
    for e, span in _spans(offsets):
        preact = _preact(rows[span], w13[e], None if b13 is None else b13[e])
        if kept is not None:
            kept[span] = preact.to(kept.dtype)
        out = activated(activation, preact, rows.dtype) @ w2[e].to(preact.dtype).T
        y[span] = (out if b2 is None else out + b2[e]).to(y.dtype)
    return y, kept


def activated(activation: str, preact: Tensor, dtype: torch.dtype) -> Tensor:
    """What `activate` makes of pre-activations (..., N), infinite where a row of `dtype` cannot hold it, as kernels write it: float16 ends at 65504."""
    inner = activate(activation, preact)
    return torch.where(inner.abs() < _MOST_HALF, inner, inner * torch.inf) if dtype == torch.float16 else inner


def _preact(rows: Tensor, w13: Tensor, b13: Tensor | None) -> Tensor:
    """The up GEMM of an expert, before its activation: rows (n, H), w13 (N, H), b13 (N,) or None -> (n, N), of `wide`."""
    preact = rows.to(wide(rows.dtype)) @ w13.to(wide(rows.dtype)).T
    return preact if b13 is None else preact + b13


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
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """grad (R, H) of y -> those of rows (zero in rows of no expert), w13, w2, b13 and b2 that are `wanted`, None for each other one.

    Pre-activations (R, N) that were kept are not computed again; rows are then read for the gradient of w13 alone.
    """
    likes = (grad, w13, w2, b13, b2)
    gradients = [
        like.new_zeros(like.shape) if of_it and like is not None else None
        for like, of_it in zip(likes, wanted, strict=True)
    ]
    d_rows, d_w13, d_w2, d_b13, d_b2 = gradients
    for e, span in _spans(offsets):
        d_y = grad[span].to(wide(grad.dtype))
        if d_b2 is not None:
            d_b2[e] = d_y.sum(0)
        if not any(wanted[:4]):
            continue
        if preact is None:
            assert rows is not None, "pre-activations are computed of rows"
            first = _preact(rows[span], w13[e], None if b13 is None else b13[e])
        else:
            first = preact[span].to(d_y.dtype)
        if d_w2 is not None:
            d_w2[e] = d_y.T @ activated(activation, first, grad.dtype)
        if d_rows is None and d_w13 is None and d_b13 is None:
            continue
        d_preact = activation_gradient(activation, first, d_y @ w2[e].to(d_y.dtype))
        if d_rows is not None:
            d_rows[span] = (d_preact @ w13[e].to(d_y.dtype)).to(d_rows.dtype)
        if d_w13 is not None:
            assert rows is not None, "w13 has a gradient by rows"
            d_w13[e] = d_preact.T @ rows[span].to(d_y.dtype)
        if d_b13 is not None:
            d_b13[e] = d_preact.sum(0)
    return gradients


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
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """grad (T, H) of combined, and the pre-activations (R, N) that were kept -> those of packed, weights (T, k), w13 and w2 that are `wanted`."""
    of_packed, of_weights, of_w13, of_w2 = wanted
    d_packed = d_weights = d_w13 = d_w2 = None
    if of_weights:
        y = grad.new_zeros(order.shape[0], grad.shape[1], dtype=wide(grad.dtype))
        for e, span in _spans(offsets):
            y[span] = activated(activation, preact[span].to(y.dtype), preact.dtype) @ w2[e].to(y.dtype).T
        d_weights = combine_backward(grad, y, inverse, weights, None)[1]
    if of_packed or of_w13 or of_w2:
        d_y, _ = combine_backward(grad, None, inverse, weights, order.shape[0])
        of_experts = (of_packed, of_w13, of_w2, False, False)
        gradients = experts_backward(d_y, packed, offsets, w13, w2, activation, None, None, preact, of_experts)
        d_packed, d_w13, d_w2, *_ = gradients
    return d_packed, d_weights, d_w13, d_w2


def activation_gradient(activation: str, preact: Tensor, grad: Tensor) -> Tensor:
    """grad (..., I) of what `activate` makes of pre-activations (..., N) -> that of the pre-activations.

    As torch's clamp has it, a sum gets no gradient beyond the limit, or where it is NaN, and a whole one at the limit.
    """
    known = activation_of(activation)
    if known.value == "relu2":
        return 2 * torch.relu(preact) * grad
    gate, up = preact.chunk(2, dim=-1)
    if known.limit is None:
        return torch.cat(_gated_gradient(known, gate, up, grad), dim=-1)
    limit = known.limit
    gradients = _gated_gradient(known, gate.clamp(max=limit), up.clamp(-limit, limit) + known.shift, grad)
    inside = gate <= limit, up.abs() <= limit
    return torch.cat([torch.where(kept, gradient, 0) for kept, gradient in zip(inside, gradients, strict=True)], dim=-1)


def _gated_gradient(known: Activation, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """grad (..., I) of value(gate) up -> those of gate and up."""
    if known.value == "gelu":
        of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return of_gate, grad * torch.nn.functional.gelu(gate, approximate="tanh")
    if known.alpha == 1:
        return torch.ops.aten.silu_backward(grad * up, gate), grad * torch.nn.functional.silu(gate)
    share = torch.sigmoid(known.alpha * gate)
    return grad * up * share * (1 + known.alpha * gate * (1 - share)), grad * gate * share


def _spans(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Every expert that has rows, and its rows."""
    for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if end > first:
            yield e, slice(first, end)
