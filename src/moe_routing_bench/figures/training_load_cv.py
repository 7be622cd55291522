"""How the balance of the loads develops over training."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures import style

TITLE = "Load imbalance over training"


def draw(table: pd.DataFrame) -> Figure:
    """One panel a number of experts."""
    rows = quality.history(table, "load_cv")
    contests = quality.contests(rows)
    figure, axes, found = quality.panels(contests, 1, 8, 4.6)
    if not contests:
        style.empty(axes[0], quality.why(table, "a load"))
        return quality.finish(figure, TITLE, rows)
    for title, group, (panel,) in found:
        _panel(panel, group, title)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in contests))


def _panel(axes: Axes, rows: pd.DataFrame, title: str) -> None:
    ends, means = [], []
    for name, group in quality.ordered(rows):
        tint = quality.color(group["router"].iloc[0])
        x, mean, half = quality.over_tokens(group, "load_cv")
        quality.band(axes, x, mean, half, tint, rows["contestant"].nunique(), "-" if group["causal"].all() else "--")
        ends.append((x[-1], mean[-1], name, tint))
        means += list(mean)
    quality.frame(axes, y=means, least=-0.1)
    axes.set(xlabel="bytes trained on (millions)", ylabel="CV of choices per expert (0: balanced)")
    axes.set_title(title, fontsize=9)
    quality.label(axes, ends)
