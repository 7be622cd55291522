"""Sentences computed from the rows: nothing is claimed that the rows do not show. Pure functions; no torch."""

import numpy as np
import pandas as pd

from moe_routing_bench.benches import BENCHES

_SHAPE = [
    "model",
    "tokens",
    "hidden",
    "intermediate",
    "experts",
    "top_k",
    "dtype",
    "layout",
    "router",
    "sampler",
    "implementation",
]


def findings(table: pd.DataFrame) -> list[str]:
    """All findings, in the order of the report."""
    ok = table[table["status"] == "ok"]
    found = [fastest(ok, name) for name in BENCHES]
    return [*found, stage_shares(ok), cost_of_skew(ok), cost_of_capacity(ok), not_ok(table)]


def fastest(ok: pd.DataFrame, bench: str) -> str:
    """Which implementation of a bench has the largest geometric-mean speed-up, and how sure that is."""
    rows = ok[(ok["bench"] == bench) & ok["speedup"].notna()]
    others = rows[rows["implementation"] != rows["baseline"]]
    if rows.empty:
        return f"{bench}: not measured."
    base = rows["baseline"].iloc[0]
    copy = rows.loc[rows["implementation"] == base, "share_of_copy"].median()
    if others.empty:
        return f"{bench}: only the baseline {base} ran, in {rows['cell'].nunique()} cells, at a median of {copy:.0%} of the copy bandwidth."
    gain = others.groupby("implementation")["speedup"].agg(lambda s: float(np.exp(np.log(s).mean()))).sort_values()
    best = gain.index[-1]
    mine = others[others["implementation"] == best]
    sure = int((mine["speedup_ci_low"] > 1).sum())
    slow = int((mine["speedup_ci_high"] < 1).sum())
    share = (
        f"; it reaches a median of {mine['share_of_copy'].median():.0%} of the copy bandwidth, {base} {copy:.0%}"
        if bench in ("pack", "combine", "routing")
        else ""
    )
    return (
        f"{bench}: {best} is {gain.iloc[-1]:.2f}x {base} in the geometric mean of {len(mine)} cells "
        f"({mine['speedup'].min():.2f}x to {mine['speedup'].max():.2f}x; the 95 % interval is above 1 in {sure}, below 1 in {slow}){share}."
    )  # fmt: skip


def stage_shares(ok: pd.DataFrame) -> str:
    """Where the layer's time goes, in the implementation that is fastest in most cells."""
    layer = ok[(ok["bench"] == "layer") & ok["stage_us"].map(lambda v: v is not None and len(v) > 0)]
    if layer.empty:
        return "Stage shares of the layer: not measured."
    winners = layer.loc[layer.groupby("cell")["median_us"].idxmin(), "implementation"]
    name = winners.mode().iloc[0]
    mine = layer[layer["implementation"] == name]
    shares = pd.DataFrame([dict(v) for v in mine["stage_us"]])
    shares = shares.div(shares.sum(axis=1), axis=0).median().sort_values(ascending=False)
    parts = ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())
    return f"Layer: {name} is fastest in {int((winners == name).sum())} of {len(winners)} cells; there the time goes to {parts} (medians over its {len(mine)} cells)."


def cost_of_skew(ok: pd.DataFrame) -> str:
    """Time at the highest skew over time at none, on cells that are equal otherwise."""
    layer = ok[(ok["bench"] == "layer") & ok["skew"].notna() & ok["capacity_factor"].isna()]
    ratios = []
    for _, group in layer.groupby(_SHAPE, dropna=False):
        ordered = group.sort_values("skew")
        if len(ordered) > 1 and ordered["skew"].iloc[0] == 0:
            ratios.append((ordered["skew"].iloc[-1], ordered["median_us"].iloc[-1] / ordered["median_us"].iloc[0]))
    if not ratios:
        return "Cost of skew without a capacity limit: not measured."
    low, high = min(r for _, r in ratios), max(r for _, r in ratios)
    return f"Skew: without a capacity limit, the layer at load CV {max(s for s, _ in ratios):g} takes {low:.2f}x to {high:.2f}x its time at balanced loads ({len(ratios)} pairs)."


def cost_of_capacity(ok: pd.DataFrame) -> str:
    """What each capacity factor drops, by skew."""
    rows = ok[ok["capacity_factor"].notna() & ok["skew"].notna()].drop_duplicates(["bench", "cell"])
    if rows.empty:
        return "Cost of a capacity factor: not measured."
    drops = rows.groupby(["capacity_factor", "skew"])["drop_rate"].median()
    parts = ", ".join(f"cf {cf:g} at skew {skew:g} drops {drop:.1%}" for (cf, skew), drop in drops.items())
    return f"Capacity: {parts} of the assignments (medians)."


def not_ok(table: pd.DataFrame) -> str:
    """How many rows have no time, by status."""
    bad = table[table["status"] != "ok"]
    counts = ", ".join(f"{n} {status}" for status, n in bad["status"].value_counts().items())
    return f"{len(bad)} of {len(table)} rows are not ok" + (
        f" ({counts}); each is listed below with its reason." if counts else "."
    )
