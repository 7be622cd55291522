"""Popularity of experts: from a target coefficient of variation (CV) to the expected load of every expert.

Expert e has Zipf weight ``(e + 1) ** -s``. A sampler turns weights into inclusion probabilities ``p_e`` (the chance that
one token is sent to expert e; they sum to k, none exceeds 1). The exponent s is solved by bisection so that the CV of
``p`` equals the target. Pure Python: the grid checks feasibility without importing torch.
"""

import math
from collections.abc import Callable
from functools import cache

from moe_routing_bench.errors import bad

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
    tail = sum(weights)
    for full, weight in enumerate(weights):
        scale = (top_k - full) / tail
        if weight * scale <= 1:
            return [1.0] * full + [w * scale for w in weights[full:]]
        tail -= weight
    return [1.0] * top_k + [0.0] * (len(weights) - top_k)


def _plackett_luce_inclusion(weights: list[float], top_k: int) -> list[float]:
    """Rosen's approximation for successive sampling without replacement: p = 1 - exp(-w tau), tau from sum p = k."""
    if top_k == len(weights):
        return [1.0] * top_k

    def taken(log_tau: float) -> float:
        return sum(-math.expm1(-w * math.exp(log_tau)) for w in weights)

    tau = math.exp(_bisect(taken, -50.0, 400.0, top_k))
    return [-math.expm1(-w * tau) for w in weights]


_INCLUSION = {"exact": _exact_inclusion, "plackett_luce": _plackett_luce_inclusion}
_LARGEST_EXPONENT = {"exact": 12.0, "plackett_luce": 40.0}


def check(skew: float, sampler: str, tokens: int, experts: int, top_k: int) -> None:
    """Raise `UserError` unless `skew` (target CV of expected loads) can be realised at this shape."""
    top = ceiling(experts, top_k)
    floor = sampling_floor(tokens, experts, top_k) if sampler == "plackett_luce" else 0.0
    allowed = f"0, or {floor:.3g} to {0.98 * top:.3g} for experts={experts}, top_k={top_k}, tokens={tokens}"
    if skew < 0 or not math.isfinite(skew):
        raise bad("skew", skew, allowed, "skew is the coefficient of variation of the expected expert loads")
    if skew > 0.98 * top:
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

    largest = _LARGEST_EXPONENT[sampler]
    if cv(largest) < skew:
        raise bad("skew", skew, f"0 to {cv(largest):.3g} for experts={experts}, top_k={top_k}", "use a smaller skew")
    return tuple(spread(_weights(experts, _bisect(cv, 0.0, largest, skew)), top_k))


@cache
def zipf_exponent(skew: float, sampler: str, experts: int, top_k: int) -> float:
    """The Zipf exponent behind `inclusion_probabilities`; 0 for uniform."""
    if skew == 0:
        return 0.0
    spread = _INCLUSION[sampler]
    return _bisect(
        lambda s: coefficient_of_variation(spread(_weights(experts, s), top_k)), 0.0, _LARGEST_EXPONENT[sampler], skew
    )
