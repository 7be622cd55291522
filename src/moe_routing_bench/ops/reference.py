"""Every operation in plain torch: what the CPU runs, and what the kernels are compared with.

Any floating-point dtype on any device; sums in float32, in float64 for float64 data. Nothing waits for the GPU, so that
float64 data can be captured in a CUDA graph too. Same contracts as `cuda`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moe_routing_bench.kernels.gate.rules import FusedRule, rule_of
from moe_routing_bench.kernels.permute import torch_permute
from moe_routing_bench.kernels.permute.layout import RowLayout
from moe_routing_bench.routers import ROUTERS

Indices = tuple[Tensor, Tensor, Tensor, Tensor]  # counts, offsets, order, inverse


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which data of `dtype` is summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gate(logits: Tensor, bias: Tensor | None, top_k: int, rule: str) -> tuple[Tensor, Tensor]:
    """logits (T, E), bias (E,) or None -> ids (T, k) int32, weights (T, k) of `wide`; -1 and NaN for a token with a NaN."""
    router = ROUTERS[rule]
    ids = router.load()(logits, top_k, bias)[0]
    scores = router.score(logits)
    broken = (scores if bias is None else scores + bias).isnan().any(1, keepdim=True)
    return ids.masked_fill(broken, -1), weigh(logits, ids, rule).masked_fill(broken, torch.nan)


def weigh(logits: Tensor, ids: Tensor, rule: str) -> Tensor:
    """The weights (T, k), of `wide`, that a rule gives the experts ids (T, k) of logits (T, E)."""
    known, logits = rule_of(rule), logits.to(wide(logits.dtype))
    chosen = logits.gather(1, ids.clamp_min(0).long())
    if known.weigh == "softmax_chosen":
        weights = chosen.softmax(1)
    elif known.weigh == "softmax_all":
        weights = (chosen - logits.logsumexp(1, keepdim=True)).exp()
    else:
        weights = _score(chosen, known.weigh)
    if known.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * known.scale


def gate_backward(grad: Tensor, logits: Tensor, ids: Tensor, rule: str) -> Tensor:
    """grad (T, k) of the weights -> that of logits (T, E), of logits' dtype; NaN for a token whose ids are -1.

    Written out, for automatic differentiation of `weigh` takes the host several times as long. Itself differentiable.
    """
    known, wide_logits, at = rule_of(rule), logits.to(wide(logits.dtype)), ids.clamp_min(0).long()
    grad = grad * known.scale
    if known.weigh == "softmax_all":
        shares = wide_logits.softmax(1)
        flow = shares.gather(1, at) * grad
        found = (shares * -flow.sum(1, keepdim=True)).scatter_add(1, at, flow)
    else:
        found = torch.zeros_like(wide_logits).scatter(1, at, _chosen_gradient(grad, wide_logits.gather(1, at), known))
    return found.masked_fill(ids[:, :1] < 0, torch.nan).to(logits.dtype)


def _score(logits: Tensor, kind: str) -> Tensor:
    """The score of every logit, for rules whose weights are scores."""
    return logits.sigmoid() if kind == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def _chosen_gradient(grad: Tensor, chosen: Tensor, rule: FusedRule) -> Tensor:
    """grad (T, k) of unscaled weights -> that of the chosen logits (T, k), for rules that look at no others."""
    if rule.weigh == "softmax_chosen":
        weights = chosen.softmax(1)
        return weights * (grad - (weights * grad).sum(1, keepdim=True))
    score, sigmoid = _score(chosen, rule.weigh), chosen.sigmoid()
    slope = sigmoid * (1 - sigmoid) if rule.weigh == "sigmoid" else sigmoid / (2 * score)
    if rule.renormalize:
        total = score.sum(1, keepdim=True)
        grad = (grad - (score * grad).sum(1, keepdim=True) / total) / total
    return grad * slope


def permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> Indices:
    """ids (T, k) -> counts (E,), offsets (E + 1,), order (R,), inverse (T, k), all int32. Ids of no expert take no row."""
    problem = RowLayout(topk_ids.shape[0], topk_ids.shape[1], experts, capacity, layout).problem
    rows = problem.rows
    valid = (topk_ids >= 0) & (topk_ids < experts)
    # What is of no expert sorts last, into rows of its own beyond all others, which are cut off.
    extended = replace(problem, rows=rows + topk_ids.numel())
    counts, offsets, order, inverse = torch_permute.permute(extended, torch.where(valid, topk_ids, experts))
    used = torch.arange(rows, device=order.device) < offsets[-1]
    order, inverse = torch.where(used, order[:rows], -1), torch.where(valid, inverse, -1)
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
