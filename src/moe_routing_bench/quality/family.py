"""All pairs of a config's contestants as one family: rule + seed ANOVA, Tukey's test of difference, and TOST of equivalence.

The model is additive: loss = rule + seed + noise, one variance for all. A pair that is not told apart is no pair of equals: it is
equivalent only where two one-sided tests show the effect to be less than a declared margin, and undecided otherwise.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_routing_bench.statistics import holm
from moe_routing_kernels.errors import bad

ALPHA = 0.05
MARGIN = 0.01  # bits per byte
TOST = "TOST"
_FAR = 0.1  # of the runs, the most that may be far from the others
POWER = 0.8
# What runs have in common that are compared: width, tokens, batches and text; whose numbers of experts may differ.
COMMON = ("dim", "layers", "sequence", "batch", "steps", "vocabulary", "corpus_sha256", "validation_batches")
VERDICTS = DIFFERENT, EQUIVALENT, UNDECIDED = "different", "equivalent", "undecided"


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

    `effect` is what the loss of `worse` is above that of `better`, with its simultaneous 95 % interval `low` to `high` by Tukey, which is above
    0 exactly where his p is below 5 %. `p_equivalent` is that of TOST at `margin`, corrected by Holm. `seeds` is the number that both have.
    """

    better: str
    worse: str
    effect: float
    low: float
    high: float
    p_equivalent: float
    margin: float
    seeds: int

    @property
    def verdict(self) -> str:
        """One of three words."""
        return DIFFERENT if self.low > 0 else EQUIVALENT if self.p_equivalent < ALPHA else UNDECIDED

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
    """The pairs, the standard deviation of the noise, and the least effect that a test finds with a power of 80 %.

    `means` are those over all seeds, where a contestant that lacks some is adjusted for them. `far` has the contestant and the seed of runs
    that normal noise of one variance does not explain. The tests keep them.
    """

    pairs: list[Pair]
    noise: float
    detectable: float
    means: dict[str, float]
    far: list[tuple[str, int]]

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

    names, seeds = [str(name) for name in by_seed.columns], by_seed.index.tolist()
    values = by_seed.to_numpy(float)
    seed, rule = np.nonzero(~np.isnan(values))
    losses = values[seed, rule]
    design = np.hstack([np.eye(values.shape[1])[rule], np.eye(values.shape[0])[seed]])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ losses
    freedom = len(losses) - int(np.linalg.matrix_rank(design))
    residuals = losses - design @ fitted
    variance = float((residuals**2).sum() / freedom) if freedom > 0 else np.nan
    if not variance > 1e-24:  # of equal values rounding is no noise
        variance = np.nan
    firsts, seconds = np.array(list(itertools.combinations(range(len(names)), 2)), int).reshape(-1, 2).T
    contrast = np.zeros((len(firsts), design.shape[1]))
    contrast[np.arange(len(firsts)), firsts], contrast[np.arange(len(firsts)), seconds] = -1, 1
    effects = contrast @ fitted
    errors = np.sqrt(variance * np.einsum("ij,jk,ik->i", contrast, inverse, contrast))
    known = errors > 0
    reach = _tukey(len(names), freedom) if known.any() else np.nan
    tost = np.ones(len(firsts))
    if known.any():
        tost[known] = stats.t.sf((margin - np.abs(effects[known])) / errors[known], freedom)
    tost = holm(tost.tolist())
    common = ~np.isnan(values)
    pairs = [
        Pair(
            *((names[a], names[b]) if effects[i] >= 0 else (names[b], names[a])),
            effect := abs(float(effects[i])),
            effect - reach * float(errors[i]),
            effect + reach * float(errors[i]),
            tost[i],
            margin,
            int((common[:, a] & common[:, b]).sum()),
        )
        for i, (a, b) in enumerate(zip(firsts, seconds, strict=True))
    ]
    more = float(stats.t.ppf(POWER, freedom)) if known.any() else np.nan
    detectable = float((reach + more) * np.median(errors)) if len(pairs) else np.nan
    far = [(names[rule[i]], int(seeds[seed[i]])) for i in _far(design, losses)] if known.any() else []
    rules = np.where(np.isnan(values).all(axis=0), np.nan, fitted[: len(names)] + fitted[len(names) :].mean())
    return Family(pairs, variance**0.5, detectable, dict(zip(names, rules.tolist(), strict=True)), far)


@functools.cache  # a tenth of a second each
def _tukey(contestants: int, freedom: int) -> float:
    """The standard errors that all pairs stay within at 5 %, by Tukey."""
    from scipy import stats  # takes a second to import, which reports without training runs need not

    return float(stats.studentized_range.ppf(1 - ALPHA, contestants, freedom)) / 2**0.5


def _far(design: np.ndarray, losses: np.ndarray) -> list[int]:
    """The runs that normal noise does not explain at 5 %, by Rosner's test for many outliers (1983), with studentised deleted residuals.

    The furthest run is removed again and again. All runs up to the last one beyond the limit count, so that no outlier hides another.
    """
    from scipy import stats  # takes a second to import, which reports without training runs need not

    kept, taken, far = list(range(len(losses))), [], 0
    for _ in range(math.ceil(_FAR * len(losses))):
        now = design[kept]
        inverse = np.linalg.pinv(now.T @ now)
        residuals = losses[kept] - now @ (inverse @ now.T @ losses[kept])
        room = 1 - np.einsum("ij,jk,ik->i", now, inverse, now)  # none where the fit goes through the run
        freedom = len(kept) - int(np.linalg.matrix_rank(now)) - 1
        if freedom < 1:
            break
        shares = residuals**2 / np.maximum(room, 1e-9)
        furthest = int(shares.argmax())
        rest = (residuals**2).sum() - shares[furthest]
        size = (shares[furthest] / max(rest, 1e-24) * freedom) ** 0.5
        taken.append(kept.pop(furthest))
        if size > stats.t.ppf(1 - ALPHA / (2 * (len(kept) + 1)), freedom):
            far = len(taken)
    return sorted(taken[:far])


def without_far(by_seed: pd.DataFrame, found: Family) -> Family:
    """The family of the same losses without the runs that are `far`."""
    far = pd.DataFrame({name: [(name, seed) in found.far for seed in by_seed.index] for name in by_seed}, by_seed.index)
    return family(by_seed.mask(far), found.pairs[0].margin)


def told_far(by_seed: pd.DataFrame, found: Family) -> str:
    """Which runs are `far`, and what the family is without them, in words; empty where there are none."""
    if not found.far:
        return ""
    rest = without_far(by_seed, found)
    counted = ", ".join(f"{sum(pair.verdict == verdict for pair in rest.pairs)} {verdict}" for verdict in VERDICTS)
    runs = ", ".join(f"{name} of seed {seed}" for name, seed in found.far)
    return (
        f"Runs further from rule + seed than normal noise explains (Rosner's test): {runs}; {len(found.far)} of {by_seed.count().sum()}. "
        f"The tests keep them. Without: noise {rest.noise:.4f}, pairs {counted}"
    )


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


def letters(found: Family, names: list[str]) -> dict[str, str]:
    """Tukey's letters of contestants in the order given: two that share a letter are not told apart, which is no equivalence."""
    apart = {frozenset((pair.better, pair.worse)) for pair in found.pairs if pair.verdict == DIFFERENT}
    sets: list[set[str]] = [set(names)]
    for one, other in (sorted(pair) for pair in apart):  # insert and absorb (Piepho 2004)
        both = [part for part in sets if {one, other} <= part]
        sets = [part for part in sets if not {one, other} <= part]
        # No new part holds another, as no set that they come from does.
        sets += [part for a in both for part in (a - {one}, a - {other}) if not any(part <= b for b in sets)]
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
