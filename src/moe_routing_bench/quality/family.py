"""All pairs of a config's contestants as one family: rule + seed ANOVA, Tukey's test of difference, and TOST of equivalence.

The model is additive: loss = rule + seed + noise, one variance for all. A pair that is not told apart is no pair of equals: it is
equivalent only where two one-sided tests show the effect to be less than a declared margin, and undecided otherwise.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from moe_routing_bench.statistics import holm
from moe_routing_kernels.errors import bad

ALPHA = 0.05
MARGIN = 0.01  # bits per byte
POWER = 0.8
DIFFERENT, EQUIVALENT, UNDECIDED = "different", "equivalent", "undecided"


@dataclass(frozen=True)
class Pair:
    """Two contestants, the better mean first.

    `effect` is what the loss of `worse` is above that of `better`, with its simultaneous 95 % interval `low` to `high`. `p` is Tukey's,
    `p_equivalent` that of TOST at `margin`, corrected by Holm. `seeds` is the number that both have.
    """

    better: str
    worse: str
    effect: float
    low: float
    high: float
    p: float
    p_equivalent: float
    margin: float
    seeds: int

    @property
    def verdict(self) -> str:
        """One of three words."""
        return DIFFERENT if self.p < ALPHA else EQUIVALENT if self.p_equivalent < ALPHA else UNDECIDED

    def __str__(self) -> str:
        """The verdict with its test, effect, interval, margin and number of seeds."""
        test = "Tukey" if self.verdict == DIFFERENT else f"TOST, margin {self.margin:g}"
        return f"{self.better} and {self.worse} are {self.verdict} ({test}): {self.effect:.4f} ({self.low:.4f} to {self.high:.4f}), n = {self.seeds}"


@dataclass(frozen=True)
class Family:
    """The pairs, the standard deviation of the noise, and the least effect that a test finds with a power of 80 %."""

    pairs: list[Pair]
    noise: float
    detectable: float

    def of(self, name: str, verdict: str) -> list[str]:
        """The contestants of that verdict with this one."""
        mine = [pair for pair in self.pairs if name in (pair.better, pair.worse) and pair.verdict == verdict]
        return sorted(pair.worse if pair.better == name else pair.better for pair in mine)

    def better_than(self, name: str) -> list[str]:
        """The contestants whose loss is significantly less."""
        return [pair.better for pair in self.pairs if pair.worse == name and pair.verdict == DIFFERENT]


def family(by_seed: pd.DataFrame, margin: float = MARGIN) -> Family:
    """The family of a table of losses with a row per seed and a column per contestant; a missing value is nan.

    Without noise to estimate (one seed, or no seed in common) every pair is undecided. Seeds are blocks, so what a seed adds to all
    rules is no noise.
    """
    names = [str(name) for name in by_seed.columns]
    values = by_seed.to_numpy(float)
    seed, rule = np.nonzero(~np.isnan(values))
    losses = values[seed, rule]
    design = np.hstack([np.eye(values.shape[1])[rule], np.eye(values.shape[0])[seed]])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ losses
    freedom = len(losses) - int(np.linalg.matrix_rank(design))
    variance = float(((losses - design @ fitted) ** 2).sum() / freedom) if freedom > 0 else np.nan
    if not variance > 1e-24:  # of equal values rounding is no noise
        variance = np.nan
    firsts, seconds = np.array(list(itertools.combinations(range(len(names)), 2)), int).reshape(-1, 2).T
    contrast = np.zeros((len(firsts), design.shape[1]))
    contrast[np.arange(len(firsts)), firsts], contrast[np.arange(len(firsts)), seconds] = -1, 1
    effects = contrast @ fitted
    errors = np.sqrt(variance * np.einsum("ij,jk,ik->i", contrast, inverse, contrast))
    known = errors > 0
    reach = float(stats.studentized_range.ppf(1 - ALPHA, len(names), freedom)) / 2**0.5 if known.any() else np.nan
    p, tost = np.ones(len(firsts)), np.ones(len(firsts))
    if known.any():
        size = np.abs(effects[known]) / errors[known]
        p[known] = stats.studentized_range.sf(size * 2**0.5, len(names), freedom)
        tost[known] = stats.t.sf((margin - np.abs(effects[known])) / errors[known], freedom)
    tost = holm(tost.tolist())
    common = ~np.isnan(values)
    pairs = [
        Pair(
            *((names[a], names[b]) if effects[i] >= 0 else (names[b], names[a])),
            effect := abs(float(effects[i])),
            effect - reach * float(errors[i]),
            effect + reach * float(errors[i]),
            float(p[i]),
            tost[i],
            margin,
            int((common[:, a] & common[:, b]).sum()),
        )
        for i, (a, b) in enumerate(zip(firsts, seconds, strict=True))
    ]
    more = float(stats.t.ppf(POWER, freedom)) if known.any() else np.nan
    return Family(pairs, variance**0.5, float((reach + more) * np.median(errors)) if len(pairs) else np.nan)


def letters(found: Family, names: list[str]) -> dict[str, str]:
    """Tukey's letters of contestants in the order given: two that share a letter are not told apart, which is no equivalence."""
    apart = {frozenset((pair.better, pair.worse)) for pair in found.pairs if pair.verdict == DIFFERENT}
    sets: list[set[str]] = [set(names)]
    for one, other in (sorted(pair) for pair in apart):  # insert and absorb (Piepho 2004)
        sets = [
            part for whole in sets for part in ([whole - {one}, whole - {other}] if {one, other} <= whole else [whole])
        ]
        sets = [a for i, a in enumerate(sets) if not any(a < b or (a == b and j < i) for j, b in enumerate(sets))]
    sets.sort(key=lambda members: sorted(names.index(name) for name in members))
    return {name: "".join(letter(i) for i, members in enumerate(sets) if name in members) for name in names}


def letter(number: int) -> str:
    """a to z, then a1, b1 and so on."""
    return chr(97 + number % 26) + (str(number // 26) if number >= 26 else "")


def by_seed(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Losses with a row per seed and a column per contestant. Raises `UserError` where a contestant has a seed twice, which would count as two."""
    twice = rows.loc[rows.duplicated(["contestant", "seed"]), ["contestant", "seed"]]
    if len(twice):
        name, seed = twice.iloc[0]
        raise bad("seed", f"{seed} twice for {name}", "each seed once")
    return rows.pivot(index="seed", columns="contestant", values=metric)
