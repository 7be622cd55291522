"""An MoE layer as its definition has it, in float64 and plain torch, expert by expert and choice by choice: nothing of it is the package's.

Automatic differentiation gives its gradients. `plain` is another function of the same shape, whose values bound roundings.
"""

import math
from typing import Any

import torch
from torch import Tensor

GUARD = 1e-20


def chosen(rule: str, logits: Tensor, bias: Tensor | None, top_k: int) -> list[list[int]]:
    """Of each token the experts with the largest scores, the lowest id first among equal ones."""
    score = logits
    if rule in ("deepseek_v3", "sigmoid_renorm"):
        score = torch.sigmoid(logits)
    elif rule == "sqrtsoftplus_renorm":
        score = torch.log1p(logits.exp()).sqrt()
    score = (score if bias is None else score + bias).tolist()
    groups, kept, best = {"deepseek_v3": (8, 4, 2), "deepseek_v2": (8, 3, 1)}.get(rule, (1, 1, 1))
    found = []
    for of_token in score:
        size = len(of_token) // groups
        worth = [sum(sorted(of_token[g * size : (g + 1) * size], reverse=True)[:best]) for g in range(groups)]
        in_use = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
        left = [e for e in range(len(of_token)) if e // size in in_use]
        found.append(sorted(left, key=lambda e: (-of_token[e], e))[:top_k])
    return found


def weigh(rule: str, logits: Tensor, ids: Tensor, scale: float | None) -> Tensor:
    """The weights (T, k) of the chosen experts."""
    at = logits.gather(1, ids)
    factor = {"deepseek_v3": 2.5, "deepseek_v2": 16.0, "sqrtsoftplus_renorm": 1.5}.get(rule, 1.0)
    if rule == "softmax_topk_renorm":
        weights = at.exp() / at.exp().sum(1, keepdim=True)
    elif rule in ("softmax_topk", "deepseek_v2"):
        weights = at.exp() / logits.exp().sum(1, keepdim=True)
    elif rule == "llama4":
        weights = 1 / (1 + (-at).exp())
    else:
        score = torch.log1p(at.exp()).sqrt() if rule == "sqrtsoftplus_renorm" else 1 / (1 + (-at).exp())
        weights = score / (score.sum(1, keepdim=True) + GUARD)
    return weights * (factor if scale is None else scale)


def kept(ids: list[list[int]], experts: int, capacity: int | None) -> list[list[bool]]:
    """Which assignments an expert keeps: its first `capacity` in token order, of ids that are an expert's."""
    used = [0] * experts
    found = []
    for of_token in ids:
        row = []
        for e in of_token:
            inside = 0 <= e < experts and (capacity is None or used[e] < capacity)
            row.append(inside)
            if inside:
                used[e] += 1
        found.append(row)
    return found


def inner(activation: str, sums: Tensor) -> Tensor:
    """What lies between the two products."""
    if activation == "relu2":
        return torch.where(sums > 0, sums * sums, 0)
    gate, up = sums.tensor_split(2)
    if activation == "geglu":
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    alpha, shift, limit = 1.0, 0.0, math.inf
    if activation.startswith("swiglu_oai"):
        alpha, shift, limit = 1.702, 1.0, 7.0
    elif activation.startswith("swiglu_limit"):
        limit = float(activation.removeprefix("swiglu_limit"))
    gate = torch.where(gate > limit, limit, gate)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate / (1 + torch.exp(-alpha * gate)) * (up + shift)


def plain(activation: str, sums: Tensor) -> Tensor:
    """As `inner`, but growing with every sum, and at least so large and so steep for sums that are positive."""
    if activation == "relu2":
        return sums * sums
    gate, up = sums.tensor_split(2)
    return 1.2 * gate * (up + 1)


def combined(
    ids: list[list[int]],
    keeps: list[list[bool]],
    weights: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    between: Any,
    b13: Tensor | None,
    b2: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """(T, H): of each token the weighted sum over the experts that keep it, and its residual."""
    rows = []
    for t, (of_token, inside) in enumerate(zip(ids, keeps, strict=True)):
        total = torch.zeros(x.shape[1], dtype=x.dtype) if residual is None else residual[t]
        for j, e in enumerate(of_token):
            if inside[j]:
                sums = w13[e] @ x[t] if b13 is None else w13[e] @ x[t] + b13[e]
                y = w2[e] @ between(sums)
                total = total + weights[t, j] * (y if b2 is None else y + b2[e])
        rows.append(total)
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1]) + 0 * x.sum()
