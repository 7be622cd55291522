"""All pairs of a config's contestants as one family: rule + seed ANOVA, Tukey's test of difference, and TOST of equivalence.

The model is additive: loss = rule + seed + noise, one variance for all. A pair that is not told apart is no pair of equals: it is
equivalent only where two one-sided tests show the effect to be less than a declared margin, and undecided otherwise.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.statistics import holm
from moe_routing_kernels.errors import bad

ALPHA = 0.05
MARGIN = 0.01  # bits per byte
TOST = "TOST"
NOISE = 0.0087  # bits per byte between seeds of a rule, where no rows of the same code and sizes are stored: `ASSUMED` says of what
ASSUMED = "assumed, as no rows of this code and size are stored: that of 65 causal runs with E=8, of older code"
_MOST_SEEDS = 1000
POWER = 0.8
# What runs have in common that are compared: width, tokens, batches and text; whose numbers of experts may differ.
COMMON = ("dim", "layers", "sequence", "batch", "steps", "vocabulary", "corpus_sha256", "validation_batches")
DIFFERENT, EQUIVALENT, UNDECIDED = "different", "equivalent", "undecided"


@dataclass(frozen=True)
class Statement:
    """A sentence on quality, which cannot be made without its test, effect, interval, margin and number of seeds.

    Raises `UserError` for a number that is missing, an effect outside its interval, fewer than two seeds, and an equivalence that a test of
    difference is said to show.
    """

    subject: str
    verdict: str
    test: str
    effect: float
    low: float
    high: float
    margin: float
    n: int
    unit: str = "bits per byte"

    def __post_init__(self) -> None:
        """Hold the numbers to each other."""
        numbers = (self.effect, self.low, self.high, self.margin)
        if not (np.isfinite(numbers).all() and self.low <= self.effect <= self.high and self.margin > 0 and self.n > 1):
            got = f"{self.effect} ({self.low} to {self.high}), margin {self.margin}, n = {self.n}"
            raise bad(
                "statement on quality", got, "an effect in its interval, a margin, two seeds or more", self.subject
            )
        if not self.test or (self.verdict == EQUIVALENT) != self.test.startswith(TOST):
            raise bad(
                "test of a statement on quality",
                f"{self.test or 'none'} for {self.verdict}",
                f"{TOST} for {EQUIVALENT} alone",
            )

    def __str__(self) -> str:
        """All of it."""
        return (
            f"{self.subject} are {self.verdict} ({self.test}; margin {self.margin:g}): "
            f"{self.effect:.4f} ({self.low:.4f} to {self.high:.4f}) {self.unit}, n = {self.n} seeds"
        )


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

    @property
    def statement(self) -> Statement:
        """The verdict with its test, effect, interval, margin and number of seeds. Raises `UserError` without noise to estimate."""
        test = {DIFFERENT: "Tukey", EQUIVALENT: TOST}.get(self.verdict, f"neither Tukey nor {TOST}")
        subject = f"{self.better} and {self.worse}"
        return Statement(subject, self.verdict, test, self.effect, self.low, self.high, self.margin, self.seeds)

    def __str__(self) -> str:
        """Its statement."""
        return str(self.statement)


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
    from scipy import stats  # takes a second to import, which reports without training runs need not

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


def against_none(
    by_seed: pd.DataFrame, subject: str, margin: float = MARGIN, unit: str = "bits per byte"
) -> dict[str, Statement]:
    """For each contestant (column), whether what it has of `unit` is different from none, or equivalent to it: a t test and TOST over seeds (rows).

    `subject` has a place ``{}`` for the name. Intervals and both tests are corrected by Bonferroni for the number of contestants. Nothing is
    stated of fewer than two seeds, nor without noise.
    """
    from scipy import stats  # takes a second to import, which reports without training runs need not

    found, count = {}, len(by_seed.columns)
    for name in by_seed.columns:
        values = by_seed[name].dropna().to_numpy(float)
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        if not error > 1e-12:  # of equal values rounding is no noise
            continue
        effect, freedom = float(values.mean()), len(values) - 1
        reach = float(stats.t.ppf(1 - ALPHA / (2 * count), freedom)) * error
        different = abs(effect) > reach
        equivalent = count * float(stats.t.sf((margin - abs(effect)) / error, freedom)) < ALPHA
        verdict, test = (
            (DIFFERENT, "t")
            if different
            else (EQUIVALENT, TOST)
            if equivalent
            else (UNDECIDED, f"neither t nor {TOST}")
        )
        numbers = (effect, effect - reach, effect + reach, margin, len(values))
        found[str(name)] = Statement(subject.format(name), verdict, test, *numbers, unit)
    return found


def stored_noise(rows: pd.DataFrame, sizes: Mapping[str, Any], code: str) -> tuple[float, str]:
    """The noise of a run in bits per byte, and what it is from: the contest with the most of these final rows that are of the code and the sizes.

    `NOISE`, which is `ASSUMED`, where there is none with noise to estimate: two rules and two seeds or more.
    """
    if len(rows):
        same = (rows["code_fingerprint"] == code) & rows["causal"].astype(bool)
        for name, value in sizes.items():
            same &= rows[name] == value
        for _, group in sorted(rows[same].groupby("label"), key=lambda one: -len(one[1])):
            noise = family(by_seed(group.drop_duplicates(["contestant", "seed"]), "bits_per_byte")).noise
            if np.isfinite(noise):
                rules, seeds = group["contestant"].nunique(), group["seed"].nunique()
                return noise, f"that of {rules} stored contestants of this code and size, {seeds} seeds"
    return NOISE, ASSUMED


def seeds_needed(noise: float, rules: int, pairs: int = 1, margin: float = MARGIN) -> int | None:
    """The fewest seeds of each of `rules` with which TOST finds two equal rules equivalent with a power of 80 %; None above 1,000.

    `noise` is the standard deviation of a run in bits per byte. `pairs` is the number of tests that Bonferroni's correction is for, which
    Holm's is for the largest p. For two rules without a difference the power is 2 T((margin - t s) / s) - 1, with s = noise sqrt(2 / n)
    (Schuirmann 1987).
    """
    from scipy import stats  # takes a second to import, which reports without training runs need not

    for seeds in range(2, _MOST_SEEDS):
        freedom, error = (seeds - 1) * (rules - 1), noise * (2 / seeds) ** 0.5
        reach = margin / error - float(stats.t.ppf(1 - ALPHA / pairs, freedom))
        if 2 * float(stats.t.cdf(reach, freedom)) - 1 >= POWER:
            return seeds
    return None


def power_of_equivalence(noise: float, rules: int) -> str:
    """How many seeds show two equal rules to be equivalent, in words."""
    pairs = rules * (rules - 1) // 2
    one, every = (seeds_needed(noise, rules, count) for count in (1, pairs))
    least, most = (f"{number:,}" if number else "more than 1,000" for number in (one, every))
    return f"equal rules are shown equivalent within {MARGIN:g} by {least} seeds for one pair, {most} for the last of {pairs}"


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
    """Losses with a row per seed and a column per contestant.

    Raises `UserError` where a contestant has a seed twice, which would count as two, and where runs differ in what is `COMMON` to a comparison.
    """
    for name in COMMON:
        if name in rows and rows[name].nunique(dropna=False) > 1:
            values = ", ".join(sorted(map(str, rows[name].unique())))
            raise bad(
                f"comparison of runs, {name}",
                values,
                "one value",
                "runs of another size, text or validation are another comparison",
            )
    twice = rows.loc[rows.duplicated(["contestant", "seed"]), ["contestant", "seed"]]
    if len(twice):
        name, seed = twice.iloc[0]
        raise bad("seed", f"{seed} twice for {name}", "each seed once")
    return rows.pivot(index="seed", columns="contestant", values=metric)
