"""What a study of rules takes before it starts: seconds of one GPU for its runs, and how many seeds show that rules are equivalent. Without torch.

Seconds are by stored speeds of a run's shape, else by estimates, which are for one NVIDIA H200. Their constants were fitted to stage times of
stored runs, which were captured but had neither this package's operators nor compiled parts; what these save is a forecast that no GPU has
confirmed. Seeds are by the noise of stored runs, or by an assumed one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.grid.run_spec import DENSE, Run
from moe_routing_bench.quality import family

SHAPE = ("experts", "top_k", "dim", "layers", "expert_hidden", "sequence", "vocabulary", "shared_hidden")
STORED, OTHER_RULES, ESTIMATED = "stored", "stored, of other rules", "estimated"
_REST = 2.1e-10  # seconds per token, layer and element of a row, for all but experts and their rows
_MOVED = 5.5e-11  # seconds per row and element, for dispatch and combine
_FLOPS = 150e12  # of experts and of the head, a second
_COMPILED, _OPERATORS = 0.4, 1 / 2.2  # what is left of the rest, and of experts and their rows: forecasts
_START = 15.0  # seconds until the first replayed step of a run: the process, the model, compiling and capturing
_LAUNCHED = 0.015  # the least seconds of a batch of an evaluation, which Python launches
_ALTERED = 14  # passes of an evaluation with other formats and capacities
_VALIDATED = 1_000_000  # tokens of a validation whose size no config says
NOISE = 0.0087  # bits per byte between seeds of a rule, where no rows of the same code and sizes are stored: `ASSUMED` says of what
ASSUMED = "assumed, as no rows of this code and size are stored: that of 65 causal runs with E=8, of older code"
_MOST_SEEDS = 1000
Shape = tuple[Any, ...]


@dataclass(frozen=True)
class Cost:
    """What runs alike take: their number, seconds of one GPU for each, tokens that each trains on, and what the speed is from."""

    runs: int
    seconds: float
    tokens: int
    basis: str


def speeds(rows: Iterable[Mapping[str, Any]], engine: str) -> dict[Shape, dict[str, float]]:
    """Tokens a second by shape and rule, of the rows of training runs that an engine trained; times alone come before others."""
    found: dict[Shape, dict[str, tuple[bool, float]]] = {}
    for row in rows:
        if row["engine"] == engine and row["train_tokens_per_s"]:
            by_rule = found.setdefault(tuple(row[name] for name in SHAPE), {})
            best = max(by_rule.get(row["router"], (False, 0.0)), (bool(row["timed_alone"]), row["train_tokens_per_s"]))
            by_rule[row["router"]] = best
    return {shape: {rule: speed for rule, (_, speed) in rules.items()} for shape, rules in found.items()}


def cost(runs: Sequence[Run], known: Mapping[Shape, Mapping[str, float]]) -> Cost:
    """What runs that differ in seeds or rates alone take, each after the other."""
    run = runs[0]
    by_rule = known.get(tuple(getattr(run, name) for name in SHAPE), {})
    if run.router in by_rule:
        speed, basis = by_rule[run.router], STORED
    elif by_rule and run.router != DENSE:
        speed, basis = median(by_rule.values()), OTHER_RULES
    else:
        speed, basis = 1 / estimate(run), ESTIMATED
    tokens = run.steps * run.tokens_per_step
    return Cost(len(runs), _START + tokens / speed + _evaluations(run, speed), tokens, basis)


def estimate(run: Run) -> float:
    """Seconds per token of training, captured, with operators and compiled parts."""
    per_layer = _REST * _COMPILED * run.dim
    hidden = run.top_k * run.expert_hidden
    if run.router == DENSE:
        hidden = hidden if run.match == "active_flops" else run.experts * run.expert_hidden
        rows, saved = 0, 1.0
    else:
        rows, saved = run.top_k, _OPERATORS
    experts = 18 * run.dim * hidden / _FLOPS  # three matrices, each 6 FLOPs a weight
    shared = 18 * run.dim * run.shared_hidden / _FLOPS
    per_layer += saved * (_MOVED * rows * run.dim + experts) + shared
    return run.layers * per_layer + 6 * run.dim * run.vocabulary / _FLOPS


def _evaluations(run: Run, speed: float) -> float:
    """Seconds of all evaluations: forward passes, a third of a step each, with a capacity and without one."""
    tokens = run.validation_tokens or _VALIDATED
    passes = math.ceil(run.steps / run.eval_every) * (1 if run.capacity_factor is None else 2)
    if run.altered and run.purpose == "final" and run.router != DENSE:
        passes += _ALTERED
    return passes * max(tokens / speed / 3, _LAUNCHED * tokens / run.tokens_per_step)


def by_entry(runs: Iterable[Run], known: Mapping[Shape, Mapping[str, float]]) -> dict[tuple[str, str], list[Cost]]:
    """The costs of an entry's pilots and final runs, by label and purpose, one for each rule, capacity and so on."""
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        alike = f"{run.router} {run.network} {run.capacity_factor} {run.drop_policy} {run.train_mode} {run.shared_gate} {run.attention}"
        groups.setdefault((run.label, run.purpose), {}).setdefault(alike, []).append(run)
    return {entry: [cost(one, known) for one in rules.values()] for entry, rules in groups.items()}


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
