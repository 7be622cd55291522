"""Points of one panel of `pareto`, with the front of each card and the capacity factors beside them."""

import pandas as pd
from matplotlib.axes import Axes

from moe_routing_bench.figures import grouping, style


def factor_of(value: float) -> str:
    """A capacity factor in words."""
    return "none" if pd.isna(value) else f"{value:g}"


def draw_points(axes: Axes, points: pd.DataFrame) -> None:
    """Draw rows whose cost is `x`, in percent; times of different cards share no front."""
    for name, group in style.groups(points):
        ends = style.bars(group["median_us"], group["ci_low_us"], group["ci_high_us"])
        axes.errorbar(
            group["x"],
            group["median_us"],
            yerr=ends,
            alpha=0.85,
            color=style.color(name),
            elinewidth=1,
            **style.marker(name),
        )
    for _, own in points.groupby(grouping.card(points)):
        edge = style.front(own, "x", "median_us")
        axes.step(edge["x"], edge["median_us"], where="post", color="0.2", lw=1, ls="--")
    for i, (x, group) in enumerate(points.groupby("x")):
        factors = ", ".join(factor_of(one) for one in sorted(group["capacity_factor"].unique()))
        axes.annotate(
            factors,
            (x, group["ci_high_us"].max()),
            (-8, 4 + 8 * (i % 2)),
            textcoords="offset points",
            fontsize=6,
            color="0.35",
        )
    axes.margins(x=0.15)
