"""Student's t distribution, for intervals: the same numbers as scipy's, which takes a quarter of a second to import in every process that measures."""

import functools
import math
from statistics import NormalDist

_TINY, _PRECISION = 1e-300, 1e-15
_MOST_TERMS, _MOST_STEPS = 100_000, 50


def two_sided(t: float, freedom: float) -> float:
    """The probability of values further from 0 than `t`. `freedom`, of at least 1, may be infinite."""
    square = t * t
    if math.isinf(square):
        return 0.0
    if math.isnan(square) or math.isinf(freedom):
        return math.erfc(abs(t) / math.sqrt(2))
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square))


@functools.lru_cache(1024)
def half_width(freedom: float, confidence: float) -> float:
    """How far from 0 values reach that have this probability together: the quantile of (1 + confidence) / 2.

    Newton's method from the left: the distribution is concave right of 0, so each step ends left of the answer. It begins with four terms of
    Cornish and Fisher's expansion (Abramowitz and Stegun, 26.7.5), all of which are positive at a confidence of 90 % or more.
    """
    z, outside = NormalDist().inv_cdf((1 + confidence) / 2), 1 - confidence
    terms = (
        z**3 + z,
        (5 * z**5 + 16 * z**3 + 3 * z) / 24,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 96,
    )
    t = z + sum(term / 4 / freedom**power for power, term in enumerate(terms, 1))
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    for _ in range(_MOST_STEPS):
        density = math.exp(log_factor - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (two_sided(t, freedom) - outside) / (2 * density)
        t += step
        if abs(step) <= 1e-13 * t:
            break
    return t


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function at x = 1 - rest, both of which are given, as one of them may be tiny."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1 - front * _continued_fraction(b, a, rest) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """That of the incomplete beta function, by Lentz's method (Press et al., Numerical Recipes, 6.4)."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / _not_zero(1 + term * d), _not_zero(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < _PRECISION:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
