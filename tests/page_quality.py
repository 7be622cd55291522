"""What pages say of training runs, computed anew from the rows: an additive model by reference levels, Tukey, TOST and Rosner.

Names of contestants and which of them may be compared are tables (`quality.compare`); the arithmetic here shares nothing with the report's.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moe_routing_bench.quality import compare
from page_numbers import N, wrong

MARGIN = 0.01


@dataclass(frozen=True)
class Fit:
    """Rule + seed: adjusted means, the noise, the covariance of rules' coefficients, and what is left of each run."""

    means: pd.Series
    noise: float
    freedom: int
    covariance: pd.DataFrame  # of rules, over the variance
    left: np.ndarray
    share: np.ndarray  # of each run that its own loss decides: the leverage


def fit(runs: pd.DataFrame) -> Fit:
    """Least squares with the first rule and the first seed as references. Runs have contestant, seed and loss."""
    rules, seeds = sorted(runs["contestant"].unique()), sorted(runs["seed"].unique())
    columns = [np.ones(len(runs))]
    columns += [(runs["contestant"] == rule).to_numpy(float) for rule in rules[1:]]
    columns += [(runs["seed"] == seed).to_numpy(float) for seed in seeds[1:]]
    design, losses = np.column_stack(columns), runs["loss"].to_numpy(float)
    known, *_ = np.linalg.lstsq(design, losses, rcond=None)
    left = losses - design @ known
    freedom = len(losses) - design.shape[1]
    spread = np.linalg.inv(design.T @ design)
    of_rules = np.zeros((len(rules), len(rules)))
    of_rules[1:, 1:] = spread[1 : len(rules), 1 : len(rules)]
    level = known[0] + np.concatenate([[0.0], known[len(rules) :]]).mean()
    means = pd.Series([level, *(level + known[1 : len(rules)])], rules)
    share = (np.linalg.qr(design)[0] ** 2).sum(1)
    noise = math.sqrt((left**2).sum() / freedom) if freedom else math.nan
    return Fit(means, noise, freedom, pd.DataFrame(of_rules, rules, rules), left, share)


def _once(function: Callable[[pd.DataFrame], Any]) -> Callable[[pd.DataFrame], Any]:
    """Remember the result for runs of the same losses."""
    known: dict[Any, Any] = {}

    def of(runs: pd.DataFrame) -> Any:
        key = tuple(zip(runs["contestant"], runs["seed"], runs["loss"], strict=True))
        if key not in known:
            known[key] = function(runs)
        return known[key]

    return of


@_once
def pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Effect (the second's loss above the first's), its simultaneous ends, and the verdict of each pair, the better first."""
    found = fit(runs)
    reach = stats.studentized_range.ppf(0.95, len(found.means), found.freedom) / math.sqrt(2)
    lines = []
    for one, other in itertools.combinations(found.means.index, 2):
        better, worse = sorted((one, other), key=found.means.__getitem__)
        cov = found.covariance
        error = found.noise * math.sqrt(cov.loc[one, one] + cov.loc[other, other] - 2 * cov.loc[one, other])
        effect = found.means[worse] - found.means[better]
        p = stats.t.sf((MARGIN - effect) / error, found.freedom)
        lines.append((better, worse, effect, effect - reach * error, effect + reach * error, p, error))
    table = pd.DataFrame(lines, columns=["better", "worse", "effect", "low", "high", "p", "error"])
    ranked = table["p"].sort_values()
    holm = (ranked * np.arange(len(ranked), 0, -1)).cummax().clip(upper=1)
    table["verdict"] = np.where(
        table["low"] > 0, "different", np.where(holm[table.index] < 0.05, "equivalent", "undecided")
    )
    return table


@_once
def outliers(runs: pd.DataFrame) -> list[tuple[str, int]]:
    """Rosner's many outliers: the run furthest by its deleted residual goes, and again, up to a tenth; those up to the last beyond its limit count."""
    rest, gone, count = runs.reset_index(drop=True), [], 0
    for _ in range(math.ceil(len(runs) / 10)):
        now = fit(rest)
        own = now.left**2 / (1 - now.share)  # by how much the sum of squares falls without the run
        sizes = np.sqrt(own / (((now.left**2).sum() - own) / (now.freedom - 1)))
        furthest = int(np.argmax(sizes))
        gone.append((rest["contestant"][furthest], int(rest["seed"][furthest])))
        limit = stats.t.ppf(1 - 0.05 / (2 * len(rest)), now.freedom - 1)
        rest = rest.drop(furthest).reset_index(drop=True)
        if sizes[furthest] > limit:
            count = len(gone)
    return gone[:count]


def runs_of(table: pd.DataFrame, label: str, causal: bool = True) -> pd.DataFrame:
    """The runs of a contest that may be compared."""
    finals = compare.finals(table)
    finals = finals[
        (compare.refusals(finals) == "") & (finals["label"] == label) & (finals["causal"].astype(bool) == causal)
    ]
    return finals.assign(loss=finals["bits_per_byte"])


def half(values: pd.Series) -> float:
    """Half of a 95 % interval of a mean by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std() / math.sqrt(len(values)))


BEST = re.compile(
    rf"Quality \((?P<label>\w+)\): (?P<name>\S+) has the least loss of (?P<rules>\d+) causal rules, (?P<mean>{N}) ± (?P<half>{N}) bits per byte over (?P<seeds>\d+) seeds; "
    rf"less than (?P<below>\d+) of the (?P<others>\d+) others? \(Tukey\), equivalent to (?P<equivalent>\d+) within (?P<margin>{N}), undecided against (?P<undecided>\d+)\. "
    rf"The first two: (?P<first>\S+) and (?P<second>\S+) are (?P<verdict>\w+) \((?P<test>[^;]*); margin {N}\): (?P<effect>{N}) \((?P<low>{N}) to (?P<high>{N})\) bits per byte, n = (?P<n>\d+) seeds\."
)


def best(text: str, table: pd.DataFrame) -> list[str]:
    """What is false of the sentence on the rule of the least loss."""
    if not (m := BEST.fullmatch(text)):
        return [f"no sentence on quality: {text}"]
    runs = runs_of(table, m["label"])
    means, told = fit(runs).means.sort_values(), pairs(runs)
    mine = told[told["better"] == means.index[0]]
    values = runs.loc[runs["contestant"] == m["name"], "loss"]
    counts = mine["verdict"].value_counts()
    (first,) = told[(told["better"] == means.index[0]) & (told["worse"] == means.index[1])].to_dict("records")
    common = [set(runs.loc[runs["contestant"] == name, "seed"]) for name in means.index[:2]]
    numbers = {
        "rules": len(means), "mean": means.iloc[0], "half": half(values), "seeds": len(values), "others": len(means) - 1,
        "below": counts.get("different", 0), "equivalent": counts.get("equivalent", 0), "undecided": counts.get("undecided", 0),
        "margin": MARGIN, "effect": first["effect"], "low": first["low"], "high": first["high"], "n": len(common[0] & common[1]),
    }  # fmt: skip
    found = list(wrong(**{name: (m[name], value) for name, value in numbers.items()}))
    names = [m["name"], m["first"], m["second"], m["verdict"]]
    return found + [f"{names}"] * (names != [means.index[0], *means.index[:2], first["verdict"]])


LEFT = re.compile(
    rf"Capacity \((?P<label>\w+)\): with a factor of (?P<factor>{N}), (?P<share>{N})% \((?P<low>{N})% to (?P<high>{N})%\) of the choices of trained (?P<name>\S+) go over the capacity, "
    rf"the median of (?P<rules>\d+) rules?; (?P<verdict>\w+) (?:from|to|against) none \((?P<test>[^;]*); margin 1%; n = (?P<n>\d+) seeds\)\."
)


def left_over(text: str, table: pd.DataFrame) -> list[str]:
    """What is false of the sentence on choices over a capacity: a t interval, corrected by Bonferroni for the rules."""
    if not (m := LEFT.fullmatch(text)):
        return [f"no sentence on capacity: {text}"]
    finals = compare.with_mixed_batches(compare.finals(table))
    finals = finals[(finals["label"] == m["label"]) & finals["causal"].astype(bool) & finals["learns"].astype(bool)]
    shares = [
        dict(zip(factors, dropped, strict=True)).get(float(m["factor"]))
        if factors is not None and dropped is not None
        else None
        for factors, dropped in zip(finals["capacity_factors"], finals["drop_rate_by_factor"], strict=True)
    ]
    finals = finals.assign(share=np.array(shares, float)).dropna(subset=["share"])
    means = finals.groupby("contestant")["share"].mean().sort_values()
    values = finals.loc[finals["contestant"] == m["name"], "share"]
    error = values.std() / math.sqrt(len(values))
    reach = stats.t.ppf(1 - 0.025 / len(means), len(values) - 1) * error
    verdict = (
        "different" if abs(values.mean()) > reach
        else "equivalent" if len(means) * stats.t.sf((0.01 - abs(values.mean())) / error, len(values) - 1) < 0.05
        else "undecided"
    )  # fmt: skip
    numbers = {"share": values.mean(), "low": values.mean() - reach, "high": values.mean() + reach}
    found = list(wrong(**{name: (m[name], 100 * value) for name, value in numbers.items()}))
    found += wrong(rules=(m["rules"], len(means)), n=(m["n"], len(values)))
    names = (m["name"], m["verdict"])
    return found + [f"it is {names}"] * (names != (means.index[(len(means) - 1) // 2], verdict))


POWER = re.compile(
    rf"noise of a run (?P<noise>{N}) bits per byte; with a power of 80% an effect of (?P<effect>{N}) is told apart, and equal rules are shown equivalent within (?P<margin>{N}) by (?P<one>\S+) seeds for one pair, "
    rf"(?P<last>\S+) for the last of (?P<pairs>\d+)(?:\. Runs further from rule \+ seed than normal noise explains \(Rosner's test\): (?P<runs>.*?); (?P<far>\d+) of (?P<of>\d+)\. "
    rf"The tests keep them\. Without: noise (?P<rest>{N}), pairs (?P<different>\d+) different, (?P<equivalent>\d+) equivalent, (?P<undecided>\d+) undecided)?"
)


@functools.cache
def _seeds(noise: float, rules: int, tests: int) -> int:
    """The fewest seeds with which two one-sided tests at 5 %, over so many pairs, show two equal rules in 80 % of cases."""
    for seeds in itertools.count(2):
        freedom, error = (seeds - 1) * (rules - 1), noise * math.sqrt(2 / seeds)
        inside = MARGIN / error - stats.t.ppf(1 - 0.05 / tests, freedom)
        if stats.t.cdf(inside, freedom) - stats.t.cdf(-inside, freedom) >= 0.8:
            return seeds
    raise AssertionError


def power(text: str, runs: pd.DataFrame) -> list[str]:
    """What is false of the line on what the seeds of a contest can show."""
    if runs["contestant"].nunique() < 2 or math.isnan(fit(runs).noise):
        return [] if text == "no noise is known, so nothing is told apart" else [f"no noise is known: {text}"]
    if not (m := POWER.fullmatch(text)):
        return [f"no line on power: {text}"]
    found, told = fit(runs), pairs(runs)
    rules, count = len(found.means), len(told)
    reach = stats.studentized_range.ppf(0.95, rules, found.freedom) / math.sqrt(2) + stats.t.ppf(0.8, found.freedom)
    numbers: dict[str, Any] = {
        "noise": found.noise, "effect": reach * told["error"].median(), "pairs": rules * (rules - 1) / 2,
        "margin": MARGIN, "one": _seeds(found.noise, rules, 1), "last": _seeds(found.noise, rules, count),
    }  # fmt: skip
    far = outliers(runs)
    if m["far"]:
        kept = runs[[pair not in far for pair in zip(runs["contestant"], runs["seed"], strict=True)]]
        counts = pairs(kept)["verdict"].value_counts()
        numbers |= {"far": len(far), "of": len(runs), "rest": fit(kept).noise}
        numbers |= {name: counts.get(name, 0) for name in ("different", "equivalent", "undecided")}
    said = set(re.findall(r"(?:^|, )([^,]+?) of seed (\d+)", m["runs"] or ""))
    missing = said ^ {(name, str(seed)) for name, seed in far}
    return list(wrong(**{name: (m[name], value) for name, value in numbers.items()})) + [f"far: {missing}"] * bool(
        missing
    )


def ranked(lines: list[dict[str, Any]], runs: pd.DataFrame) -> list[str]:
    """What is false of the table of a contest: means, half-widths, seeds, ranks, verdicts and letters."""
    means, told = fit(runs).means, pairs(runs)
    found = ["lines"] * (len(lines) != len(means))
    for line in lines:
        name = next(
            (one for one in means.index if line["contestant"] == one or line["contestant"].startswith(f"{one} ")), None
        )
        if name is None:
            found.append(f"unknown contestant {line['contestant']}")
            continue
        values = runs.loc[runs["contestant"] == name, "loss"]
        worse = int(((told["worse"] == name) & (told["verdict"] == "different")).sum())
        both = told[(told["better"] == name) | (told["worse"] == name)]
        of = {
            kind: set(both.loc[both["verdict"] == kind, ["better", "worse"]].to_numpy().ravel()) - {name}
            for kind in ("equivalent", "undecided")
        }
        numbers = {
            "mean": (line["mean"], means[name]),
            "seeds": (str(line["seeds"]), len(values)),
            "rank": (str(line["rank"]), 1 + worse),
        }
        if line["half_width"] != "–":
            numbers["half"] = (line["half_width"].removeprefix("± "), half(values))
        found += [f"{name}: {one}" for one in wrong(**numbers)]
        found += [f"{name}: {kind}" for kind, names in of.items() if set(line[kind]) != names]
    for one, other in itertools.combinations(lines, 2):
        share = bool(set(re.findall(r"[a-z]\d*", one["letters"])) & set(re.findall(r"[a-z]\d*", other["letters"])))
        names = {one["contestant"].partition(" ")[0], other["contestant"].partition(" ")[0]}
        pair = told[told["better"].isin(names) & told["worse"].isin(names)]
        if len(pair) == 1 and share == (pair["verdict"].iloc[0] == "different"):
            found.append(f"letters of {names}")
    return found
