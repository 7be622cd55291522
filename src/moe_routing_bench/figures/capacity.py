"""What a capacity factor costs trained rules: bits per byte lost where choices over it are dropped, and how many these are."""

import math

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette, training_rows
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.quality import compare
from moe_routing_kernels.routers.zoo import ZOO

TRAINED, LATER = "trained with it", "set after training"
RANDOM = "uniform at random"  # the series of what that would drop: a line per number of choices
_LOST = Scale("bits per byte lost by the limit"), Scale("router", "names")
_NO_DROPS = "drops by capacity factor"
_OVER = Scale("capacity factor"), Scale("choices over the capacity (%)")


def capacity_bits(table: pd.DataFrame) -> Chart:
    """Validation loss with a capacity factor less that without a limit, in bits per byte: the factor of training, and others that were set after it."""
    rows = lost(table)
    if rows.empty:
        return nothing(
            "dots",
            *_LOST,
            limited(table),
            compare.why_no_capacity(limited(table), training_rows.why(table, "a loss with a capacity limit")),
        )
    records, routers = [], []
    for (_, factor, way), group in rows.groupby(["label", "capacity_factor", "way"], sort=False):
        means = [(*training_rows.interval(one["lost"]), name, one) for name, one in training_rows.ordered(group)]
        for mean, half, name, one in sorted(means, key=lambda found: found[0]):
            routers.append((name, one["router"].iloc[0]))
            dropped = "" if one["drop_rate"].isna().all() else f"{one['drop_rate'].mean():.1%} of choices dropped; "
            says = f"{dropped}n = {len(one)} seeds"
            records.append(
                {
                    "panel": f"{training_rows.describe(group)}, capacity factor {factor:g}, {way}",
                    "series": name,
                    "x": mean,
                    "y": name,
                    "low": mean - half,
                    "high": mean + half,
                    "says": says,
                }
            )
    return Chart(
        "dots",
        *_LOST,
        marks(records),
        {name: palette.router(router) for name, router in routers},
        rows,
        0.0,
        shared=True,
        timed=False,
    )


def lost(table: pd.DataFrame) -> pd.DataFrame:
    """Those of `limited` whose validation batches had all domains."""
    return compare.with_mixed_batches(limited(table))


def limited(table: pd.DataFrame) -> pd.DataFrame:
    """The final runs of causal rules, once per capacity factor that they were evaluated with, and the bits per byte that it `lost`.

    `way` says whether a run was trained with the factor or got it after the last step.
    """
    rows = training_rows.finals(table, "val_loss", "bits_per_byte")
    rows = rows[rows["causal"].astype(bool)]
    own = rows[rows["val_loss_with_capacity"].notna() & rows["capacity_factor"].notna()]
    own = own.assign(lost=own["bits_per_byte"] * (own["val_loss_with_capacity"] / own["val_loss"] - 1), way=TRAINED)
    return pd.concat([own, _later(rows)])


def _later(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs once per factor that they got after training, but for the one that they were trained with."""
    kept = rows[rows["bits_by_capacity"].notna()]
    every = (
        kept.assign(pair=[list(dict(one).items()) for one in kept["bits_by_capacity"]])
        .explode("pair")
        .dropna(subset=["pair"])
    )
    factors = pd.Series([float(name) for name, _ in every["pair"]], index=every.index, dtype=float)
    bits = pd.Series([value for _, value in every["pair"]], index=every.index, dtype=float)
    found = every.assign(
        lost=bits - every["bits_per_byte"],
        way=LATER,
        trained_with=every["capacity_factor"],
        capacity_factor=factors,
        drop_rate=float("nan"),
    )
    return found[found["capacity_factor"] != found["trained_with"]].drop(columns=["pair", "trained_with"])


def floor(factor: float, tokens: int, top_k: int, experts: int) -> float:
    """Share of choices dropped when each of `tokens` tokens takes k of E experts uniformly at random.

    An expert's load X is Binomial(T, k/E) and its capacity C = ceil(factor · T k / E), at most T, so the share is
    E[(X - C)+] / E[X], with E[(X - C)+] = T p P(X' >= C) - C P(X > C) for X' ~ Binomial(T - 1, p), p = k/E.
    """
    from scipy import stats  # takes a second to import

    p = top_k / experts
    limit = min(tokens, math.ceil(round(factor * tokens * p, 6)))
    excess = tokens * p * stats.binom.sf(limit - 1, tokens - 1, p) - limit * stats.binom.sf(limit, tokens, p)
    return max(0.0, float(excess / (tokens * p)))


def quality_drops(table: pd.DataFrame) -> Chart:
    """A line per rule over capacity factors, and what routing at random would drop, in a panel per config, whose name says what the rules were trained with. No share is below 0, nor drawn so."""
    rows, why = _dropping(table)
    contests = [] if why else training_rows.contests(rows)
    if not contests:
        return nothing("lines", *_OVER, rows, why)
    found, tints = [], {}
    for title, group in contests:
        panel = f"{title}, trained at {_trained(group) or 'no capacity'}"
        for name, runs in training_rows.ordered(group):
            tints[name] = palette.router(runs["router"].iloc[0])
            points = zip(*_shares(runs), strict=True)
            found += [
                {
                    "panel": panel,
                    "series": name,
                    "x": at,
                    "y": mean,
                    "low": max(0.0, mean - half),
                    "high": mean + half,
                    "says": f"n = {len(runs)} seeds",
                }
                for at, mean, half in points
            ]
        factors = sorted({one["x"] for one in found if one["panel"] == panel})
        for top_k, tokens, experts in _drawn(group):
            tints[RANDOM] = "#000000"
            found += [
                {
                    "panel": panel,
                    "series": RANDOM,
                    "x": at,
                    "y": 100 * floor(at, tokens, top_k, experts),
                    "says": f"k={top_k}, {tokens:,} tokens, expected",
                    "join": f"{RANDOM}, k={top_k}",
                }
                for at in factors
            ]
    note = "tokens of a batch share a capacity"
    shown = pd.concat(group for _, group in contests)
    return Chart(
        "lines", *_OVER, marks(found), tints, shown, note=note, named=True, shared=True, level=True, timed=False
    )


def _dropping(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The final runs that say what goes over a capacity; where none may be shown those that are withdrawn, and why nothing is drawn."""
    rows = training_rows.finals(table, "drop_rate_by_factor")
    shown = compare.with_mixed_batches(rows)
    return (rows if shown.empty else shown), (
        "" if len(shown) else compare.why_no_capacity(rows, training_rows.why(table, _NO_DROPS))
    )


def _shares(runs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Capacity factors, and at each the mean over seeds and half of its 95 % interval of what is over the capacity, in percent."""
    shares = pd.DataFrame([100 * np.array(one) for one in runs["drop_rate_by_factor"]])
    mean, half = np.array([training_rows.interval(shares[column]) for column in shares]).T
    return np.array(runs["capacity_factors"].iloc[0], dtype=float), mean, half


def _trained(rows: pd.DataFrame) -> str:
    return ", ".join(f"{one:g}" for one in sorted(rows["capacity_factor"].dropna().unique()))


def _drawn(rows: pd.DataFrame) -> list[tuple[int, int, int]]:
    """What routing at random is compared with: experts per token, tokens that share a capacity, and experts, per number of choices."""
    tokens, experts = int(rows["batch"].iloc[0] * rows["sequence"].iloc[0]), int(rows["experts"].iloc[0])
    return [(top_k, tokens, experts) for top_k in sorted({_choices(row) for row in rows.to_dict("records")})]


def _choices(row: dict) -> int:
    """How many experts a token of this run takes: the rule's own number where it has one."""
    rule = ZOO.get(row["router"])
    return int(rule.top_k if rule and rule.top_k else row["top_k"])
