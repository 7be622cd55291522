"""Student's t distribution, for intervals: the same numbers as scipy's, which takes a quarter of a second to import in every process that measures."""

import functools
import math
from statistics import NormalDist

import numpy as np

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
    t, log_factor = _start(freedom, confidence)
    for _ in range(_MOST_STEPS):
        step = (two_sided(t, freedom) - (1 - confidence)) / (2 * _density(log_factor, freedom, t))
        t += step
        if abs(step) <= 1e-13 * t:
            break
    return t


def _start(freedom: float, confidence: float) -> tuple[float, float]:
    """Where Newton's method begins, and the logarithm of the density at 0."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        z**3 + z,
        (5 * z**5 + 16 * z**3 + 3 * z) / 24,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 96,
    )
    t = z + sum(term / 4 / freedom**power for power, term in enumerate(terms, 1))
    return t, math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2


def _density(log_factor: float, freedom: float, t: float) -> float:
    return math.exp(log_factor - (freedom + 1) / 2 * math.log1p(t * t / freedom))


def two_sided_each(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """`two_sided` of finite values (n,), each with its freedom, of 1 to infinity excluded: the same numbers, of many in a fifth of the time."""
    a, b = freedom / 2, np.full(len(t), 0.5)
    with np.errstate(over="ignore", invalid="ignore"):
        square = t * t
        x, rest = freedom / (freedom + square), square / (freedom + square)
    found = (rest <= 0).astype(float)
    inside = np.flatnonzero((x > 0) & (rest > 0))
    a, b, x, rest = a[inside], b[inside], x[inside], rest[inside]
    each = zip(a.tolist(), b.tolist(), x.tolist(), rest.tolist(), strict=True)
    front = np.array([_front(*values) for values in each])
    left = x < (a + 1) / (a + b + 2)
    fractions = _continued_fractions(np.where(left, a, b), np.where(left, b, a), np.where(left, x, rest))
    found[inside] = np.where(left, front * fractions / a, 1 - front * fractions / b)
    return found


def half_width_each(freedom: np.ndarray, confidence: float) -> np.ndarray:
    """`half_width` of each of many finite degrees of freedom (n,): the same numbers."""
    distinct, places = np.unique(freedom, return_inverse=True)
    starts = np.array([_start(one, confidence) for one in distinct.tolist()]).reshape(-1, 2)
    t, log_factor, left = starts[:, 0], starts[:, 1], np.arange(len(distinct))
    for _ in range(_MOST_STEPS):
        if not len(left):
            break
        values = zip(log_factor[left].tolist(), distinct[left].tolist(), t[left].tolist(), strict=True)
        density = np.array([_density(*each) for each in values])
        step = (two_sided_each(t[left], distinct[left]) - (1 - confidence)) / (2 * density)
        t[left] += step
        left = left[np.abs(step) > 1e-13 * t[left]]
    return t[places.ravel()]


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function at x = 1 - rest, both of which are given, as one of them may be tiny."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    front = _front(a, b, x, rest)
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1 - front * _continued_fraction(b, a, rest) / b


def _front(a: float, b: float, x: float, rest: float) -> float:
    return math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))


def _continued_fractions(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`_continued_fraction` of each."""
    found, left = np.empty(len(x)), np.arange(len(x))
    c, d = np.ones(len(x)), 1 / _none_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        if not len(left):
            break
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / _none_zero(1 + term * d), _none_zero(1 + term / c)
            value = value * (d * c)
        more = np.abs(d * c - 1) >= _PRECISION
        found[left] = value
        left = left[more]
        a, b, x, c, d, value = (one[more] for one in (a, b, x, c, d, value))
    return found


def _none_zero(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) > _TINY, values, _TINY)


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
