"""Layer time against what it costs: dropped assignments, padded rows."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import style


def draw(table: pd.DataFrame) -> Figure:
    """Time relative to the fastest of its shape, so that shapes share one axis; error bars are confidence intervals."""
    rows = style.ok(table, "layer").copy()
    figure, panels = style.canvas(1, 2, 11, 4.8)
    shape = ["model", "tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "router"]
    if not rows.empty:
        best = rows.groupby(shape, dropna=False)["median_us"].transform("min")
        for column in ("median_us", "ci_low_us", "ci_high_us"):
            rows[f"relative_{column}"] = rows[column] / best
    for axes, column, label in zip(panels, ("drop_rate", "padding_waste"), ("dropped share of assignments", "padding waste: rows / kept assignments - 1"), strict=True):  # fmt: skip
        points = rows.dropna(subset=[column]) if not rows.empty else rows
        if points.empty:
            style.empty(axes, "no layer row is ok")
            continue
        for name, group in points.groupby("implementation"):
            y = group["relative_median_us"]
            bars = [(y - group["relative_ci_low_us"]).clip(lower=0), (group["relative_ci_high_us"] - y).clip(lower=0)]
            axes.errorbar(group[column], y, yerr=bars, fmt="o", ms=4, alpha=0.8, color=style.COLORS[name])
        edge = style.front(points, column, "relative_median_us")
        axes.step(edge[column], edge["relative_median_us"], where="post", color="0.3", lw=1, ls="--")
        axes.set(xlabel=label, ylabel="time / fastest of the same shape", yscale="log", title=f"n={len(points)}")
        style.legend(axes, list(points["implementation"]))
    return style.finish(figure, "Layer time against drops and padding, with the Pareto front", rows)
