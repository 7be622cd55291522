"""How many seeds show that rules are equivalent: from the noise of stored runs, or from an assumed one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.quality import family

NOISE = 0.0087  # bits per byte between seeds of a rule, where no rows of the same code and sizes are stored: `ASSUMED` says of what
ASSUMED = "assumed, as no rows of this code and size are stored: that of 65 causal runs with E=8, of older code"
_MOST_SEEDS = 1000


def stored_noise(rows: pd.DataFrame, sizes: Mapping[str, Any], code: str) -> tuple[float, str]:
    """The noise of a run in bits per byte, and what it is from: the contest with the most of these final rows that are of the code and the sizes.

    `NOISE`, which is `ASSUMED`, where there is none with noise to estimate: two rules and two seeds or more.
    """
    if len(rows):
        same = (rows["code_fingerprint"] == code) & rows["causal"].astype(bool)
        for name, value in sizes.items():
            same &= rows[name] == value
        for _, group in sorted(rows[same].groupby("label"), key=lambda one: -len(one[1])):
            noise = family.family(family.by_seed(group.drop_duplicates(["contestant", "seed"]), "bits_per_byte")).noise
            if np.isfinite(noise):
                rules, seeds = group["contestant"].nunique(), group["seed"].nunique()
                return noise, f"that of {rules} stored contestants of this code and size, {seeds} seeds"
    return NOISE, ASSUMED


def seeds_needed(noise: float, rules: int, pairs: int = 1, margin: float = family.MARGIN) -> int | None:
    """The fewest seeds of each of `rules` with which TOST finds two equal rules equivalent with a power of 80 %; None above 1,000.

    `noise` is the standard deviation of a run in bits per byte. `pairs` is the number of tests that Bonferroni's correction is for, which
    Holm's is for the largest p. For two rules without a difference the power is 2 T((margin - t s) / s) - 1, with s = noise sqrt(2 / n)
    (Schuirmann 1987).
    """
    from scipy import stats  # takes a second to import, which reports without training runs need not

    for seeds in range(2, _MOST_SEEDS):
        freedom, error = (seeds - 1) * (rules - 1), noise * (2 / seeds) ** 0.5
        reach = margin / error - float(stats.t.ppf(1 - family.ALPHA / pairs, freedom))
        if 2 * float(stats.t.cdf(reach, freedom)) - 1 >= family.POWER:
            return seeds
    return None


def power_of_equivalence(noise: float, rules: int) -> str:
    """How many seeds show two equal rules to be equivalent, in words."""
    pairs = rules * (rules - 1) // 2
    one, every = (seeds_needed(noise, rules, count) for count in (1, pairs))
    least, most = (f"{number:,}" if number else "more than 1,000" for number in (one, every))
    return f"equal rules are shown equivalent within {family.MARGIN:g} by {least} seeds for one pair, {most} for the last of {pairs}"
