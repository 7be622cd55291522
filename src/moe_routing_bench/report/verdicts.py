"""Whether stored rows confirm a claim, refute it, or cannot say: one rule for all claims.

A claim is a set of statements "the mean of this over seeds is below a bound", each a two-sided t-test over the seeds (paired where two
contestants are compared), with p corrected by Holm over the claim's statements and all pairs of the config's ranking, so that a claim tells no
two apart that the ranking calls a tie. Refuted: at least one statement is significantly false, as each claim is meant to hold throughout.
Confirmed: all are significantly true and none is missing. Else not comparable, with the reason: missing rows, rules that see later tokens, or seeds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import special

from moe_routing_bench.quality import statistics
from moe_routing_bench.quality.comparison import compare, perft_summary
from moe_routing_bench.quantities import significant
from moe_routing_bench.report.claim_statements import TESTS, Statement, by_seed, less
from moe_routing_bench.report.predecessor import CLAIMS, Claim

CONFIRMED, REFUTED, NOT_COMPARABLE = "confirmed", "refuted", "not comparable"
HOLDS, FAILS, OPEN = "holds", "fails", "cannot be told"
_LEAST_P = 1e-4  # that is said as a number
_NO_ROWS = {"quality": "no training runs", "perft": "no adaptations of trained runs"}


@dataclass(frozen=True)
class Verdict:
    """A claim held against the rows of one config: the verdict, why, and every statement with its numbers."""

    claim: Claim
    label: str
    verdict: str
    why: str
    ours: list[str] = field(default_factory=list)


def verdicts(
    table: pd.DataFrame, adapted: pd.DataFrame | None = None, claims: Sequence[Claim] = CLAIMS
) -> list[Verdict]:
    """Each claim in every config that has something to say on it, once where none has: `table` has training runs, `adapted` adaptations."""
    rows = {"quality": compare.finals(table)}
    rows["perft"] = rows["quality"].iloc[:0] if adapted is None else perft_summary.contests(adapted)
    found = []
    for claim in claims:
        labels = rows[claim.source]["label"]
        mine = [judge(claim, label, rows[claim.source][labels == label]) for label in labels.unique()]
        spoken = [one for one in mine if one.ours]
        closest = mine[:1] or [Verdict(claim, "–", NOT_COMPARABLE, _NO_ROWS[claim.source])]
        found += spoken or [Verdict(claim, "–", NOT_COMPARABLE, closest[0].why)]
    return found


def judge(claim: Claim, label: str, rows: pd.DataFrame) -> Verdict:
    """The verdict on a claim from the final evaluations of one config."""
    statements, missing = TESTS[claim.test](claim, rows)
    results = outcomes(statements, _ranked(rows, statements))
    judged = [(one, p, result) for one, (p, result) in zip(statements, results, strict=True)]
    judged.sort(key=lambda each: (FAILS, OPEN, HOLDS).index(each[2]))  # what decides comes first
    ours = [_words(*each) for each in judged]
    said = [result for *_, result in judged]
    false = [one.text for one, _, result in judged if result == FAILS]
    if false:
        return Verdict(claim, label, REFUTED, f"{len(false)} of {len(judged)} comparisons significantly false: {'; '.join(false[:3])}{', …' * (len(false) > 3)}", ours)  # fmt: skip
    if OPEN in said:
        missing = [*missing, f"the seeds cannot tell in {said.count(OPEN)} of {len(statements)} comparisons"]
    if missing or not said:
        return Verdict(claim, label, NOT_COMPARABLE, "; ".join(missing) or "no rows that speak for it", ours)
    return Verdict(claim, label, CONFIRMED, f"all {len(said)} comparisons are significantly true", ours)


def outcomes(statements: Sequence[Statement], others: Sequence[float] = ()) -> list[tuple[float, str]]:
    """For each statement its p, corrected by Holm over all of them and the `others`, and whether it holds, fails or cannot be told."""
    corrected = statistics.holm([*(_p(one) for one in statements), *others])
    return [
        (p, OPEN if p >= compare.ALPHA else HOLDS if one.values.mean() < one.bound else FAILS)
        for one, p in zip(statements, corrected, strict=False)
    ]


def _ranked(rows: pd.DataFrame, statements: Sequence[Statement]) -> list[float]:
    """The p of all pairs of causal contestants whose losses no statement compares: the rest of the ranking's family."""
    if compare.METRIC not in rows:
        return []
    wide = by_seed(rows[rows["causal"].astype(bool)], compare.METRIC)
    said = {one.text for one in statements if one.unit == "bits/byte"}
    pairs = itertools.combinations(wide.columns, 2)
    unsaid = [pair for pair in pairs if not {f"{pair[0]} − {pair[1]}", f"{pair[1]} − {pair[0]}"} & said]
    return [_p(less(wide, *pair, "bits/byte")) for pair in unsaid]


def _p(statement: Statement) -> float:
    """Two-sided p that the mean is the bound; seeds that agree exactly are certain, one seed tells nothing."""
    gap = statement.values - statement.bound
    if len(gap) < 2:
        return 1.0
    if np.ptp(gap) == 0:
        return float(gap[0] == 0)
    # Student's test of one sample, whose function in scipy.stats takes 20 times as long for a few numbers
    t = gap.mean() / np.sqrt(gap.var(ddof=1) / len(gap))
    return float(2 * special.stdtr(len(gap) - 1, -abs(t)))


def _words(one: Statement, p: float, result: str) -> str:
    """A statement with mean, 95 % interval, seeds and corrected p."""
    scale, unit = (100, "%") if one.unit == "%" else (1, one.unit)
    half = statistics.half_width(one.values) * scale
    shown = significant(one.values.mean() * scale, 3) + (f" ± {significant(half, 2)}" if len(one.values) > 1 else "")
    said = f"p = {p:.2g}" if p >= _LEAST_P else f"p < {_LEAST_P:g}"  # a power of ten breaks in two at its minus
    bound = f", bound {one.bound * scale:.3g}" if one.bound else ""
    return f"{one.text}: {shown} {unit}{bound} (n = {len(one.values)}, {said}): {result}"
