"""Logits at which a gate's scores, sums and slopes vanish or are infinite, and what is right there, in plain Python."""

import math

import torch
from torch import Tensor

from moe_routing_kernels import ops
from moe_routing_kernels.gate import FusedRule, rule_of
from moe_routing_kernels.ops.reference import wide

INF = math.inf
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    17.5,
    -19.9,
    -20.1,
    40.0,
    -46.0,
    88.0,
    -88.0,
    -95.0,
    -120.0,
    -200.0,
    1e-42,
    3e4,
    -3e4,
    INF,
    -INF,
)
# name: the logits of a token, repeated up to the number of experts
ROWS = {
    "all_low": (-95.0,),
    "all_lower": (-120.0,),
    "all_lowest": (-3e4,),
    "all_minus_inf": (-INF,),
    "all_inf": (INF,),
    "equal": (0.25,),
    "saturated": (40.0, 41.0, 42.0),
    "signed_zeros": (0.0, -0.0, -0.0, 0.0, 0.0),
    "low_and_lower": (-95.0, -96.0, -100.0, -110.0),
    "one_inf": (0.5, -1.0, 2.0, INF, 0.25, 1.5, -2.0, 0.0, 1.0, 0.75, -0.5, 3.0, -3.0, 0.1, 0.2, 0.3, 0.4),
    "many_inf": (INF, 0.0, 1.0, -INF, 0.5),
    "few_finite": (1.0, -INF, -INF, -INF, -INF, -INF, -INF),
    "far_apart": (3e4, -3e4, 0.0, 1.0),
    "around_the_tail": (-39.5, -40.0, -40.5, -41.0, -39.75),
}


def rows(experts: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """All of ROWS: logits (T, E)."""
    return torch.tensor([[row[e % len(row)] for e in range(experts)] for row in ROWS.values()], device=device).to(dtype)


def check(logits: Tensor, top_k: int, rule: str, bias: Tensor | None) -> None:
    """Ids, weights and gradients of `ops.gate` at logits (T, E) are those that its docstring promises; else AssertionError."""
    leaf = logits.detach().requires_grad_()
    ids, weights = ops.gate(leaf, top_k, rule, bias)
    check_choice(logits, ids, weights, rule, bias)
    grad = torch.linspace(-1, 1, weights.numel(), dtype=weights.dtype, device=weights.device).view(weights.shape)
    (gradient,) = torch.autograd.grad(weights, leaf, grad)
    known, tiny = rule_of(rule), 1e-13 if logits.dtype == torch.float64 else 2e-6
    exact = {torch.float64: 1e-9, torch.float32: 1e-5}.get(logits.dtype, 2.0**-7)
    given = (one.tolist() for one in (logits.double(), ids, gradient, grad))
    for row, chosen, slopes, pull in zip(*given, strict=True):
        if chosen[0] == -1:
            assert all(math.isnan(x) for x in slopes), (row, slopes)
            continue
        want = gradient_at(known, row, chosen, pull)
        limit = exact * max(map(abs, want)) + tiny * known.scale
        assert all(abs(a - b) <= limit for a, b in zip(slopes, want, strict=True)), (row, slopes, want)


def check_choice(logits: Tensor, ids: Tensor, weights: Tensor, rule: str, bias: Tensor | None) -> None:
    """Ids and weights (T, k) are those of logits (T, E). Scores that float32 does not tell apart are ties."""
    known, biased = rule_of(rule), [0.0] * logits.shape[1] if bias is None else bias.tolist()
    for row, chosen, got in zip(logits.double().tolist(), ids.tolist(), weights.tolist(), strict=True):
        _check_token(known, row, biased, chosen, got)


def _check_token(rule: FusedRule, row: list[float], bias: list[float], chosen: list[int], got: list[float]) -> None:
    scores = [score(x, rule.select) + b for x, b in zip(row, bias, strict=True)]
    if any(s != s for s in scores):
        assert chosen == [-1] * len(chosen) and all(w != w for w in got), (row, chosen, got)
        return
    assert len(set(chosen)) == len(chosen) and all(0 <= e < len(row) for e in chosen), (row, chosen)
    allowed, sure = _allowed(rule, scores)
    assert all(e in allowed for e in chosen), (row, chosen, allowed)
    best = sorted((scores[e] for e in allowed), reverse=True)[: len(chosen)]
    for e, want in zip(chosen, best, strict=True):  # by falling score
        assert not sure or near(scores[e], want), (row, chosen, best)
    if rule.groups == 1:  # equal logits with equal biases: the lowest ids, in order
        kind = {e: (row[e] + 0.0, bias[e]) for e in range(len(row))}
        for value in {kind[e] for e in chosen}:
            same = [e for e in range(len(row)) if kind[e] == value]
            taken = [e for e in chosen if kind[e] == value]
            assert taken == same[: len(taken)], (row, chosen)
    want = weights_at(rule, row, chosen)
    assert all(abs(a - b) <= 2e-5 * max(abs(b), rule.scale * 1e-2) for a, b in zip(got, want, strict=True)), (
        row,
        chosen,
        got,
        want,
    )


def _allowed(rule: FusedRule, scores: list[float]) -> tuple[list[int], bool]:
    """The experts of the groups that a rule may keep, and whether it keeps them all: groups whose scores float32 does not tell apart are ties."""
    size = len(scores) // rule.groups
    if rule.groups == 1:
        return list(range(len(scores))), True
    best = [sum(sorted(scores[g * size : (g + 1) * size])[-rule.group_best :]) for g in range(rule.groups)]
    last = sorted(best, reverse=True)[rule.keep_groups - 1]
    groups = [g for g in range(rule.groups) if best[g] > last or near(best[g], last)]
    if all(best[g] == last for g in groups if near(best[g], last)):  # of equal groups the lowest
        groups = sorted(groups, key=lambda g: (-best[g], g))[: rule.keep_groups]
    return [g * size + i for g in sorted(groups) for i in range(size)], len(groups) == rule.keep_groups


def near(a: float, b: float) -> bool:
    """Equal in float32, up to a few roundings."""
    return a == b or abs(a - b) <= 2e-6 * max(1.0, abs(b)) or (rounded(a) == rounded(b))


def rounded(x: float) -> float:
    """In float32."""
    return float(torch.tensor(x, dtype=torch.float32))


def score(x: float, kind: str) -> float:
    """The score of a logit."""
    if kind == "logit":
        return x
    if x != x:
        return x
    if kind == "sigmoid":
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    return math.sqrt(x if x > 700 else math.log1p(math.exp(x)) if x > -700 else 0.0)


def weights_at(rule: FusedRule, row: list[float], chosen: list[int]) -> list[float]:
    """The weights of a choice: the published formula, or its limit."""
    if rule.weigh.startswith("softmax"):
        over = row if rule.weigh == "softmax_all" else [row[e] for e in chosen]
        largest = max(over)
        shares = [1.0 if x == largest else math.exp(x - largest) if abs(largest) < INF else 0.0 for x in over]
        of = [1.0 if row[e] == largest else math.exp(row[e] - largest) if abs(largest) < INF else 0.0 for e in chosen]
        return [rule.scale * x / sum(shares) for x in of]
    scores = [score(row[e], rule.weigh) for e in chosen]
    if not rule.renormalize:
        return [rule.scale * s for s in scores]
    if INF in scores:
        return [rule.scale * (s == INF) / scores.count(INF) for s in scores]
    return [rule.scale * s / (sum(scores) + 1e-20) for s in scores]


def gradient_at(rule: FusedRule, row: list[float], chosen: list[int], pull: list[float]) -> list[float]:
    """The slopes of ``sum(pull * weights)`` in all logits: w r (pull - mean), with r the slope of a score's logarithm."""
    weights = [w / rule.scale for w in weights_at(rule, row, chosen)]
    slopes = [0.0] * len(row)
    if rule.weigh == "softmax_all":
        everything = [w / rule.scale for w in weights_at(rule, row, list(range(len(row))))]
        mean = sum(w * p for w, p in zip(weights, pull, strict=True))
        slopes = [-w * mean for w in everything]
        for e, w, p in zip(chosen, weights, pull, strict=True):
            slopes[e] += w * p
        return [rule.scale * s for s in slopes]
    mean = sum(w * p for w, p in zip(weights, pull, strict=True))
    if not (rule.renormalize or rule.weigh == "softmax_chosen"):
        mean = 0.0
    for e, w, p in zip(chosen, weights, pull, strict=True):
        slopes[e] = rule.scale * w * _relative(row[e], rule.weigh) * (p - mean)
    return slopes


def _relative(x: float, kind: str) -> float:
    if kind.startswith("softmax"):
        return 1.0
    if kind == "sigmoid":
        return score(-x, "sigmoid")
    if x < -700:
        return 0.5
    return 0.0 if x == INF else score(x, "sigmoid") / (2 * score(x, kind) ** 2)


def biases(experts: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Selection biases: none that matters, one that picks the last experts whatever their scores, and one that masks some."""
    zero = torch.zeros(experts, dtype=wide(dtype), device=device)
    last, masked = zero.clone(), zero.clone()
    last[-experts // 2 :] = 5.0
    masked[1::3] = -INF
    return {"zero": zero, "picks_the_last": last, "masks": masked}
