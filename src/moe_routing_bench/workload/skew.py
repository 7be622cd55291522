"""Popularity of experts: from a target coefficient of variation (CV) to the expected load of every expert.

Expert e has Zipf weight ``(e + 1) ** -s``. A sampler turns weights into inclusion probabilities ``p_e`` (the chance that
one token is sent to expert e; they sum to k, none exceeds 1). The exponent s is solved by bisection so that the CV of
``p`` equals the target. Pure Python: the grid checks feasibility without importing torch.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate

from moe_routing_kernels.errors import bad

SAMPLERS = ("exact", "plackett_luce", "trace")
_STEPS = 60  # bisection steps: the interval of s shrinks below 1e-15


def coefficient_of_variation(values: list[float] | tuple[float, ...]) -> float:
    """Population standard deviation over mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / mean if mean else 0.0


def ceiling(experts: int, top_k: int) -> float:
    """Largest CV of expected loads: k experts take everything, and no token holds an expert twice."""
    return math.sqrt(experts / top_k - 1)


def sampling_floor(tokens: int, experts: int, top_k: int) -> float:
    """CV that uniform random routing realises by chance alone: sqrt((E - k) / (T k))."""
    return math.sqrt((experts - top_k) / (tokens * top_k))


def _bisect(f: Callable[[float], float], low: float, high: float, target: float) -> float:
    """x in [low, high] with f(x) = target, f non-decreasing."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < target else (low, middle)
    return (low + high) / 2


def _weights(experts: int, exponent: float) -> list[float]:
    return [(rank + 1) ** -exponent for rank in range(experts)]


def _exact_inclusion(weights: list[float], top_k: int) -> list[float]:
    """Weights scaled to sum k and clipped at 1, the excess given to the others in proportion (water filling).

    `weights` is in falling order, so the clipped ones are a prefix: the first prefix after which the rest fits.
    """
    tails = [*accumulate(reversed(weights))][::-1]  # summed from the small end: subtracting would leave rounding errors
    for full, (weight, tail) in enumerate(zip(weights, tails, strict=True)):
        scale = (top_k - full) / tail
        if weight * scale <= 1:
            return [1.0] * full + [w * scale for w in weights[full:]]
    return [1.0] * top_k + [0.0] * (len(weights) - top_k)


def _plackett_luce_inclusion(weights: list[float], top_k: int) -> list[float]:
    """Successive sampling without replacement: exact for k of 1, 2 and E, else Rosen's p = 1 - exp(-w tau), sum p = k.

    With Rosen's, routing realises a CV above the target: by 5 % for k=3 of E=8, by 1 % for k=8 of E=64.
    """
    if top_k == len(weights):
        return [1.0] * top_k
    total = sum(weights)
    if top_k == 1:
        return [w / total for w in weights]
    if top_k == 2:  # expert e first, w_e / total, or after some j, w_j / total * w_e / (total - w_j)
        first = weights[0] / sum(weights[1:])
        odds = [w / (total - w) for w in weights[1:]]
        rest = sum(odds)
        others = [rest, *(first + (rest - o) for o in odds)]
        return [w / total * (1 + o) for w, o in zip(weights, others, strict=True)]

    def taken(log_tau: float) -> float:
        return sum(-math.expm1(-w * math.exp(log_tau)) for w in weights)

    tau = math.exp(_bisect(taken, -50.0, 400.0, top_k))
    return [-math.expm1(-w * tau) for w in weights]


_INCLUSION = {"exact": _exact_inclusion, "plackett_luce": _plackett_luce_inclusion}
_LARGEST_EXPONENT = 40.0


@cache
def largest(sampler: str, experts: int, top_k: int) -> float:
    """Largest skew that can be asked for: short of the ceiling, and within reach of the largest exponent."""
    reached = coefficient_of_variation(_INCLUSION[sampler](_weights(experts, _LARGEST_EXPONENT), top_k))
    return min(0.98 * ceiling(experts, top_k), reached)


def check(skew: float, sampler: str, tokens: int, experts: int, top_k: int) -> None:
    """Raise `UserError` unless `skew` (target CV of expected loads) can be realised at this shape."""
    top = largest(sampler, experts, top_k)
    floor = sampling_floor(tokens, experts, top_k) if sampler == "plackett_luce" else 0.0
    allowed = f"0, or {floor:.3g} to {top:.3g} for experts={experts}, top_k={top_k}, tokens={tokens}"
    if skew < 0 or not math.isfinite(skew):
        raise bad("skew", skew, allowed, "skew is the coefficient of variation of the expected expert loads")
    if skew > top:
        raise bad("skew", skew, allowed, "a token never holds an expert twice, so CV is below sqrt(experts/top_k - 1)")
    if 0 < skew < floor:
        raise bad("skew", skew, allowed, "below the noise of plackett_luce; use 0 (uniform random) or sampler: exact")


@cache
def inclusion_probabilities(skew: float, sampler: str, experts: int, top_k: int) -> tuple[float, ...]:
    """Inclusion probability of each expert by falling popularity; shape (experts,), sum top_k, CV = `skew`."""
    if skew == 0:
        return (top_k / experts,) * experts
    spread = _INCLUSION[sampler]

    def cv(exponent: float) -> float:
        return coefficient_of_variation(spread(_weights(experts, exponent), top_k))

    return tuple(spread(_weights(experts, _bisect(cv, 0.0, _LARGEST_EXPONENT, skew)), top_k))


@cache
def zipf_exponent(skew: float, sampler: str, experts: int, top_k: int) -> float:
    """The Zipf exponent behind `inclusion_probabilities`; 0 for uniform."""
    if skew == 0:
        return 0.0
    spread = _INCLUSION[sampler]
    return _bisect(
        lambda s: coefficient_of_variation(spread(_weights(experts, s), top_k)), 0.0, _LARGEST_EXPONENT, skew
    )
