"""What a claim says of the rows of a config, as statements about means over seeds, and what is missing of them."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_routing_bench.quality.comparison import batches, compare
from moe_routing_bench.report.predecessor import Claim

_FACTOR = 1.10  # of the claim on capacity


@dataclass(frozen=True)
class Statement:
    """The mean of `values` (one per seed) is below `bound`."""

    text: str
    values: np.ndarray
    bound: float = 0.0
    unit: str = "bits/byte"


def by_seed(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column of runs, (seeds, contestants)."""
    return rows.pivot(index="seed", columns="contestant", values=column)


def less(wide: pd.DataFrame, lower: str, higher: str, unit: str, bound: float = 0.0) -> Statement:
    """`lower` is below `higher` by seeds that both have."""
    gap = wide[lower].to_numpy(float) - wide[higher].to_numpy(float)
    return Statement(f"{lower} − {higher}", gap[~np.isnan(gap)], bound, unit)


def _order(claim: Claim, rows: pd.DataFrame) -> tuple[list[Statement], list[str]]:
    """Each contestant has a lower loss than the next; those that see later tokens are not ranked."""
    causal = rows.groupby("contestant")["causal"].all()
    missing = [f"no rows of {name}" for name in claim.names if name not in causal]
    missing += [f"{name} sees later tokens: no rank beside causal rules" for name in claim.names if name in causal and not causal[name]]  # fmt: skip
    ranked = [name for name in claim.names if causal.get(name, False)]
    wide = by_seed(rows, compare.METRIC)
    return [less(wide, *pair, "bits/byte") for pair in itertools.pairwise(ranked)], missing


def _drops(claim: Claim, rows: pd.DataFrame) -> tuple[list[Statement], list[str]]:
    """Every trained causal rule leaves less than the bound over the capacity, whatever factor it was trained with."""
    if len(batches.mixed(rows)) < len(rows):
        return [], [f"{batches.WITHDRAWN}; to be trained again"]
    kept = rows[rows["causal"].astype(bool) & rows["learns"].astype(bool) & rows["drop_rate_by_factor"].notna()]
    found = []
    for name, runs in kept.groupby("contestant", sort=False):
        shares = [dict(zip(*one, strict=True)) for one in runs[["capacity_factors", "drop_rate_by_factor"]].to_numpy()]
        found.append(Statement(f"{name} at {_FACTOR:g}", np.array([one[_FACTOR] for one in shares]), claim.bound, "%"))
    return found, [] if found else ["no trained causal rule that chooses experts"]


def _networks(claim: Claim, rows: pd.DataFrame) -> tuple[list[Statement], list[str]]:
    """No network is worse than another of the same rule by the bound: two one-sided statements a pair."""
    wide, found = by_seed(rows, compare.METRIC), []
    for _, runs in rows.groupby(["router", "capacity_factor", "drop_policy"], sort=False, dropna=False):
        names = list(runs["contestant"].unique()) if runs["network"].nunique() > 1 else []
        found += [less(wide, one, other, "bits/byte", claim.bound) for one in names for other in names if one != other]
    return found, [] if found else ["no rule was trained with two networks"]


def _hash(claim: Claim, rows: pd.DataFrame) -> tuple[list[Statement], list[str]]:
    """The hash rule is better balanced than every causal rule that learns, and has a higher loss."""
    (name,) = claim.names
    learned = set(rows[rows["causal"].astype(bool) & rows["learns"].astype(bool)]["contestant"]) - {name}
    if name not in set(rows["contestant"]) or not learned:
        return [], [f"no rows of {name} beside a causal rule that learns"]
    balance, loss = by_seed(rows, "load_cv"), by_seed(rows, compare.METRIC)
    found = [less(balance, name, one, "load CV") for one in sorted(learned)]
    return found + [less(loss, one, name, "bits/byte") for one in sorted(learned)], []


TESTS = {"order": _order, "drops": _drops, "networks": _networks, "hash": _hash}
