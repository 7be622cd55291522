"""What trained routers drop at a capacity factor, beside what routing at random would."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures import style
from moe_routing_bench.routers.zoo import ZOO

TITLE = "Drops of trained routers against capacity"


def floor(factor: float, tokens: int, top_k: int, experts: int) -> float:
    """Share of choices dropped when each of `tokens` tokens takes k of E experts uniformly at random.

    An expert's load X is Binomial(T, k/E) and its capacity C = ceil(factor · T k / E), at most T, so the share is
    E[(X - C)+] / E[X], with E[(X - C)+] = T p P(X' >= C) - C P(X > C) for X' ~ Binomial(T - 1, p), p = k/E.
    """
    p = top_k / experts
    limit = min(tokens, math.ceil(round(factor * tokens * p, 6)))
    excess = tokens * p * stats.binom.sf(limit - 1, tokens - 1, p) - limit * stats.binom.sf(limit, tokens, p)
    return max(0.0, float(excess / (tokens * p)))


def draw(table: pd.DataFrame) -> Figure:
    """One panel a config that trains with a capacity and one router network."""
    rows = quality.finals(table, "drop_rate", "capacity_factor")
    groups = [group for name in table["label"].unique() if (group := rows[rows["label"] == name])["network"].nunique() == 1]  # fmt: skip
    contests = [(quality.describe(group), group) for group in groups]
    figure, axes, found = quality.panels(contests, 1, 8, 4.6)
    if not contests:
        style.empty(axes[0], quality.why(table, "a capacity and a drop rate"))
        return quality.finish(figure, TITLE, rows)
    for title, group, (panel,) in found:
        _panel(panel, group, title)
    return quality.finish(figure, TITLE, pd.concat(groups), "evaluation with capacity")


def _panel(axes: Axes, rows: pd.DataFrame, title: str) -> None:
    ends = []
    keys = ["router", "drop_policy", "causal"]
    for (router, policy, causal), group in sorted(rows.groupby(keys), key=lambda pair: list(ZOO).index(pair[0][0]) if pair[0][0] in ZOO else 99):  # fmt: skip
        found = [(factor, *quality.interval(runs["drop_rate"] * 100)) for factor, runs in group.groupby("capacity_factor")]  # fmt: skip
        x, mean, half = np.array(found).T
        tint, mark = quality.color(router), quality.marker(router, causal)
        axes.errorbar(x, mean, yerr=half, color=tint, elinewidth=1, **(mark | {"ls": "-", "lw": 1}))
        name = router + ("" if rows["drop_policy"].nunique() == 1 else f" {policy}") + ("" if causal else f" {quality.NOT_CAUSAL}")  # fmt: skip
        ends.append((x[-1], mean[-1], name, tint))
    factors = np.linspace(min(1.0, rows["capacity_factor"].min()), rows["capacity_factor"].max() + 0.05, 200)
    tokens, experts = int(rows["batch"].iloc[0] * rows["sequence"].iloc[0]), int(rows["experts"].iloc[0])
    for top_k in sorted({_choices(row) for row in rows.to_dict("records")}):
        share = [100 * floor(factor, tokens, top_k, experts) for factor in factors]
        axes.plot(factors, share, color="black", lw=1.2, ls="--" if top_k == 1 else "-", label=f"uniform at random, k={top_k}, {tokens:,} tokens")  # fmt: skip
    axes.set(xlabel="capacity factor", ylabel="choices dropped (%)", ylim=(-0.5, min(100.0, axes.get_ylim()[1])))
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, frameon=False, loc="upper right" if rows["capacity_factor"].nunique() > 1 else "upper left")
    quality.label(axes, ends)


def _choices(row: dict) -> int:
    """How many experts a token of this run takes: the rule's own number where it has one."""
    rule = ZOO.get(row["router"])
    return int(rule.top_k if rule and rule.top_k else row["top_k"])
