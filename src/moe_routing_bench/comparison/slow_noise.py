"""Intervals that know the correlation of a whole run's blocks. Pure numpy and scipy.

A slow state of a machine under the noise of single blocks hardly shows in the 20 blocks of a row: the correlation of neighbours is low, and
the mean strays far. It shows in many rows. So blocks are taken for white noise plus a drift, or a state whose neighbours correlate, in shares that
differ from row to row. How often each of these models holds is estimated from all rows (empirical Bayes, by expectation maximisation),
and the interval of a row is the mixture of those that the models would give it, each by its probability given the row.

Independent noise keeps the intervals of `intervals`: the models count only from a likelihood of `_EVIDENCE` on, in which the rows of a cell,
that share rounds, count as one. `docs/coverage.py` simulates it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.intervals import CONFIDENCE, winsorised

LEAST_ROWS = 20  # fewer say too little of what noise is like
_LEAST_VALUES = 3  # of a row: fewer have no pattern
# Logarithm of the likelihood ratio: in 1,000 simulated runs of independent noise it was above 8 once. Three values show one pattern, so 4 is
# enough for them, above which 1 in 200 runs was; how often models of more values hold is not known with less than 8.
_EVIDENCE, _EVIDENCE_OF_THREE = 8.0, 4.0
_CORRELATIONS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the variance
_DRIFTS = (1.0, 4.0)  # variance over the time of a row, in that of the white noise
_SLOW, _SLOW_ROWS = 0.8, 0.2  # correlation of a state that lasts as long as few blocks, and share of rows with one
_TOLD = 4  # values, of which fewer do not tell a drift from a slow state
_ROUNDS = 60  # of the expectation maximisation
Shares = tuple[float, ...]  # how often each model holds


class _Models(NamedTuple):
    """What each of the models says of n values: the quadratic form and constant of its likelihood, the form of the spread that is seen, how many
    times the variance of a mean is that of independent values with that spread, and the degrees of freedom of the spread. The first is
    independent noise."""

    forms: np.ndarray  # (m, n, n)
    constants: np.ndarray  # (m,)
    spreads: np.ndarray  # (m, n, n)
    inflation: np.ndarray  # (m,)
    freedom: np.ndarray  # (m,)


def shares(rows: Mapping[object, Sequence[np.ndarray]]) -> Shares | None:
    """How often each model holds, from the logarithms (n,) of the blocks or turns of each row, by cell; None where noise is
    independent as far as they tell, or there are fewer than `LEAST_ROWS`."""
    each_row = iter(_likelihoods_of_each([row for cell in rows.values() for row in cell]))
    cells = [[known for known in itertools.islice(each_row, len(cell)) if known is not None] for cell in rows.values()]
    cells = [np.array(cell) for cell in cells if cell]
    if sum(map(len, cells)) < LEAST_ROWS:
        return None
    together = np.sum([cell.mean(0) for cell in cells], axis=0)
    most = max(len(values) for cell in rows.values() for values in cell)
    if together.max() - together[0] < (_EVIDENCE if most >= _TOLD else _EVIDENCE_OF_THREE):
        return None
    each = np.concatenate(cells)
    each = np.exp(each - each.max(1, keepdims=True))
    found = np.full(each.shape[1], 1 / each.shape[1])
    for _ in range(_ROUNDS):
        weighted = each * found
        found = (weighted / weighted.sum(1, keepdims=True)).mean(0)
    return tuple(found.tolist())


def hides(known: Shares, count: int) -> bool:
    """Whether the noise is slow to an extent that so few values of a row do not show. A drift is not: its rows show it."""
    slow = sum(known[i] for i, r in enumerate((r for r in _CORRELATIONS for _ in _SHARES), 1) if r >= _SLOW)
    drift = sum(known[-len(_DRIFTS) :]) if count >= _TOLD else 0.0
    return count < Settings.min_blocks and slow >= max(_SLOW_ROWS, drift)


def interval(values: np.ndarray, known: Shares) -> tuple[float, float, float] | None:
    """Both ends of the 95 % interval of the location of logarithms (n,) of a row, and p of its being 0, where models hold as often as `known`
    says; None for too few values."""
    if (varied := _varied(values)) is None:
        return None
    from scipy import special  # takes half a second to import, which few runs need

    n, (deviations, middle) = len(values), varied
    kept, models = len(middle), _models(n)
    squares = deviations @ models.spreads @ deviations
    likely = _likelihoods(deviations)
    weights = np.exp(likely - likely.max()) * np.array(known)
    weights /= weights.sum()
    errors = np.sqrt(squares / (kept * (kept - 1)) * models.inflation)
    freedom = np.clip(models.freedom, 1, kept - 1)
    centre, median = float(middle.mean()), float(np.median(values))

    def tail(distance: float) -> float:
        return float(weights @ (2 * special.stdtr(freedom, -distance / errors)))

    low, high = 0.0, float((special.stdtrit(freedom, (1 + CONFIDENCE) / 2) * errors).max())
    while high - low > 1e-6 * high:
        half = (low + high) / 2
        low, high = (half, high) if tail(half) > 1 - CONFIDENCE else (low, half)
    return min(centre - high, median), max(centre + high, median), tail(abs(centre))


def _varied(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """`winsorised` of the values of a row; None for too few, or equal ones."""
    if len(values) < _LEAST_VALUES:
        return None
    deviations, middle = winsorised(values)
    return (deviations, middle) if len(middle) > 1 and deviations.any() else None


def _likelihoods(deviations: np.ndarray) -> np.ndarray:
    """The logarithm of the likelihood of Winsorised values (..., n) under each model (..., m), whatever their location and spread."""
    n = deviations.shape[-1]
    models = _models(n)
    forms = (deviations[..., None, None, :] @ models.forms)[..., 0, :] @ deviations[..., None]
    return models.constants - (n - 1) / 2 * np.log(forms[..., 0])


def _likelihoods_of_each(rows: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """`_likelihoods` of rows that `_varied` lets through, None for the others: the same numbers, of many rows in a fraction of the time."""
    found: list[np.ndarray | None] = [None] * len(rows)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(len(row), []).append(place)
    for count, chosen in places.items():
        if count >= _LEAST_VALUES:
            deviations, middle = winsorised(np.array([rows[place] for place in chosen]))
            varied = deviations.any(axis=1) & (middle.shape[1] > 1)
            told = iter(_likelihoods(deviations[varied]))
            for place in itertools.compress(chosen, varied):
                found[place] = next(told)
    return found


@lru_cache(128)
def _models(n: int) -> _Models:
    places, one = np.arange(n), np.eye(n)
    slope = (places - places.mean()) / max(places.std(), 1e-9)
    level = one - 1 / n
    level_and_slope = level - np.outer(slope, slope) / n
    known = [(one, level)]
    known += [
        ((1 - share) * one + share * r ** np.abs(places[:, None] - places), level)
        for r in _CORRELATIONS
        for share in _SHARES
    ]
    known += [(one + drift * np.outer(slope, slope), level_and_slope) for drift in _DRIFTS]
    found = []
    for covariance, seen in known:
        inverse = np.linalg.inv(covariance)
        rows, total = inverse.sum(0), inverse.sum()
        spread = seen @ covariance
        trace = float(np.trace(spread))
        found.append(
            (
                inverse - np.outer(rows, rows) / total,
                -(np.linalg.slogdet(covariance)[1] + math.log(total)) / 2,
                seen,
                covariance.mean() * (n - 1) * n / trace,
                trace**2 / float(np.trace(spread @ spread)),
            )
        )
    return _Models(*(np.array(column) for column in zip(*found, strict=True)))
