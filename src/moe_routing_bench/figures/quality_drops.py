"""What trained routers drop at a capacity factor, beside what routing at random would."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.quality import compare
from moe_routing_kernels.routers.zoo import ZOO

TITLE = "Drops of trained routers against capacity"
_MISSING = "drops by capacity factor"
_SCALES = Scale("capacity factor"), Scale("choices over the capacity (%)")


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
    """One panel per config: what each rule leaves over the capacity at every factor, and what it was trained with."""
    rows, why = _rows(table)
    contests = [] if why else quality_rows.contests(rows)
    figure, axes, found = quality.panels(contests, 1, 8, 4.6)
    if not contests:
        style.empty(axes[0], why)
        return quality.finish(figure, TITLE, rows)
    for title, group, (panel,) in found:
        _panel(panel, group, title)
    return quality.finish(
        figure, TITLE, pd.concat(group for _, group in contests), "tokens of a batch share a capacity"
    )


def _panel(axes: Axes, rows: pd.DataFrame, title: str) -> None:
    ends = []
    for name, group in quality_rows.ordered(rows):
        factors, mean, half = _shares(group)
        router, causal = group["router"].iloc[0], bool(group["causal"].iloc[0])
        mark = quality.marker(router, causal) | {"ls": "-" if causal else "--", "lw": 1, "ms": 3}
        axes.errorbar(factors, mean, yerr=half, color=quality.color(router), elinewidth=1, **mark)
        ends.append((factors[0], mean[0], name, quality.color(router)))
    trained = _trained(rows)
    if trained:
        for one in rows["capacity_factor"].dropna().unique():
            axes.axvline(one, color="0.8", lw=3, zorder=0)
    span = np.linspace(factors.min(), factors.max(), 300)
    for top_k, tokens, experts in _drawn(rows):
        share = [100 * floor(factor, tokens, top_k, experts) for factor in span]
        axes.plot(
            span,
            share,
            color="black",
            lw=1.2,
            ls=":" if top_k == 1 else "-",
            label=_random(top_k, tokens),
        )
    axes.set(xlabel=_SCALES[0].label, ylabel=_SCALES[1].label, ylim=(-0.5, min(100.0, axes.get_ylim()[1])))
    axes.set_title(f"{title}\ntrained at {trained or 'no capacity'} (grey)", fontsize=9)
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.spines["left"].set_visible(False)
    axes.spines["right"].set_visible(True)
    quality.label(axes, ends, left=True)  # where the lines are apart


def chart(table: pd.DataFrame) -> Chart:
    """The same lines for the page; the panel's name says what the rules were trained with. No share is below 0, nor drawn so."""
    rows, why = _rows(table)
    contests = [] if why else quality_rows.contests(rows)
    if not contests:
        return nothing("lines", *_SCALES, rows, why)
    found, tints = [], {}
    for title, group in contests:
        panel = f"{title}, trained at {_trained(group) or 'no capacity'}"
        for name, runs in quality_rows.ordered(group):
            tints[name] = quality.color(runs["router"].iloc[0])
            points = zip(*_shares(runs), strict=True)
            found += [{"panel": panel, "series": name, "x": at, "y": mean, "low": max(0.0, mean - half), "high": mean + half, "says": f"n = {len(runs)} seeds"} for at, mean, half in points]  # fmt: skip
        factors = sorted({one["x"] for one in found if one["panel"] == panel})
        for top_k, tokens, experts in _drawn(group):
            name = _random(top_k, tokens)
            tints[name] = "#000000"
            found += [{"panel": panel, "series": name, "x": at, "y": 100 * floor(at, tokens, top_k, experts), "says": "expected"} for at in factors]  # fmt: skip
    return Chart("lines", *_SCALES, marks(found), tints, pd.concat(group for _, group in contests))


def _rows(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The final runs that say what goes over a capacity; where none may be shown those that are withdrawn, and why nothing is drawn."""
    rows = quality_rows.finals(table, "drop_rate_by_factor")
    shown = compare.with_mixed_batches(rows)
    return (rows if shown.empty else shown), (
        "" if len(shown) else compare.why_no_capacity(rows, quality_rows.why(table, _MISSING))
    )


def _shares(runs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Capacity factors, and at each the mean over seeds and half of its 95 % interval of what is over the capacity, in percent."""
    shares = pd.DataFrame([100 * np.array(one) for one in runs["drop_rate_by_factor"]])
    mean, half = np.array([quality_rows.interval(shares[column]) for column in shares]).T
    return np.array(runs["capacity_factors"].iloc[0], dtype=float), mean, half


def _trained(rows: pd.DataFrame) -> str:
    return ", ".join(f"{one:g}" for one in sorted(rows["capacity_factor"].dropna().unique()))


def _random(top_k: int, tokens: int) -> str:
    return f"uniform at random, k={top_k}, {tokens:,} tokens"


def _drawn(rows: pd.DataFrame) -> list[tuple[int, int, int]]:
    """What routing at random is compared with: experts per token, tokens that share a capacity, and experts, per number of choices."""
    tokens, experts = int(rows["batch"].iloc[0] * rows["sequence"].iloc[0]), int(rows["experts"].iloc[0])
    return [(top_k, tokens, experts) for top_k in sorted({_choices(row) for row in rows.to_dict("records")})]


def _choices(row: dict) -> int:
    """How many experts a token of this run takes: the rule's own number where it has one."""
    rule = ZOO.get(row["router"])
    return int(rule.top_k if rule and rule.top_k else row["top_k"])
