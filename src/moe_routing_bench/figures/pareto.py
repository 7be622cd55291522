"""Layer time against what it costs: dropped assignments, padded rows."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import style

SHAPE = ["model", "tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "router"]
PANELS = (
    ("drop_rate", "dropped assignments (%)"),
    ("padding_waste", "padding: rows beyond the kept assignments (%)"),
)


def draw(table: pd.DataFrame) -> Figure:
    """Time against drops and padding; relative to the fastest of its shape where there are several shapes."""
    rows = style.ok(table, "layer").copy()
    shapes = len(rows[SHAPE].drop_duplicates())
    best = rows.groupby(SHAPE, dropna=False)["median_us"].transform("min") if shapes > 1 else 1.0
    for column in ("median_us", "ci_low_us", "ci_high_us"):
        rows[f"y_{column}"] = rows[column] / best
    figure, panels = style.canvas(1, 2, 11, 4.8)
    for axes, (column, label) in zip(panels, PANELS, strict=True):
        points = rows[rows[column].notna()].assign(x=lambda r, c=column: r[c].astype(float) * 100)
        if points.empty:
            style.empty(axes, style.why(table, "layer"))
            continue
        _points(axes, points)
        axes.set(xlabel=label, title=f"n = {len(points)} rows, {shapes} shape{'s' * (shapes != 1)}")
        axes.set_ylabel("layer time / fastest of the same shape" if shapes > 1 else "layer time (µs)")
    return style.finish(figure, "Layer time against drops and padding, with the Pareto front", rows)


def _points(axes: Axes, points: pd.DataFrame) -> None:
    for name, group in style.groups(points):
        ends = style.bars(group["y_median_us"], group["y_ci_low_us"], group["y_ci_high_us"])
        axes.errorbar(group["x"], group["y_median_us"], yerr=ends, fmt="o", ms=4.5, alpha=0.75, color=style.color(name), elinewidth=1)  # fmt: skip
    edge = style.front(points, "x", "y_median_us")
    axes.step(edge["x"], edge["y_median_us"], where="post", color="0.2", lw=1.2, ls="--")
    axes.plot(edge["x"], edge["y_median_us"], "o", ms=9, mfc="none", mec="0.2", ls="")
    axes.set_yscale("log")
    style.plain_log(axes.yaxis)
    style.legend(axes, points["implementation"], title="ringed: Pareto front; bars: 95 % CI", title_fontsize=7)
