"""Layer time against what it costs: dropped assignments, padded rows. One shape, one column a skew."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import style

SHAPE = ["model", "phase", "tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "router"]
COSTS = (("drop_rate", "dropped assignments (%)"), ("padding_waste", "rows beyond the kept assignments (%)"))


def draw(table: pd.DataFrame) -> Figure:
    """Time against drops (above) and padding (below) of the shape with the most skews and capacity factors."""
    rows = style.ok(table, "layer")
    rows = rows[rows["skew"].notna() & rows["drop_rate"].notna()]
    title = "Layer time against drops and padding"
    if rows.empty:
        figure, (axes,) = style.canvas(1, 1, 8, 4)
        style.empty(axes, style.why(table, "layer"))
        return style.finish(figure, title, rows)
    groups = [group for _, group in rows.groupby(SHAPE, dropna=False)]
    shown = max(groups, key=lambda g: len(g.drop_duplicates(["skew", "capacity_factor"])))
    skews = sorted(shown["skew"].unique())
    figure, panels = style.canvas(2, len(skews), max(9, 3.2 * len(skews)), 6.6)
    for i, (column, label) in enumerate(COSTS):
        for j, skew in enumerate(skews):
            axes = panels[i * len(skews) + j]
            points = shown[(shown["skew"] == skew) & shown[column].notna()]
            if points.empty:
                style.empty(axes, "no row has this value")
                continue
            _points(axes, points.assign(x=points[column].astype(float) * 100))
            axes.set(
                xlabel=label, ylabel="layer time (µs)" if j == 0 else "", title=f"skew {skew:g} (n = {len(points)})"
            )
            axes.set_ylim(0, 1.12 * shown["ci_high_us"].max())
    names = style.ordered(shown["implementation"])
    figure.legend(handles=style.handles(names), loc="outside right center", frameon=False, fontsize=8, title="dashed: Pareto front\nbars: 95 % CI\nlabels: capacity factor", title_fontsize=7)  # fmt: skip
    return style.finish(figure, f"{title}\n{_name(shown.iloc[0])}, {len(groups)} shape{'s' * (len(groups) > 1)} measured", shown)  # fmt: skip


def _name(row: pd.Series) -> str:
    model = f"{row['model']} " if isinstance(row["model"], str) else ""
    return f"{model}T{row['tokens']:.0f} H{row['hidden']:.0f} I{row['intermediate']:.0f} E{row['experts']:.0f} k{row['top_k']:.0f}"


def _points(axes: Axes, points: pd.DataFrame) -> None:
    for name, group in style.groups(points):
        ends = style.bars(group["median_us"], group["ci_low_us"], group["ci_high_us"])
        axes.errorbar(group["x"], group["median_us"], yerr=ends, alpha=0.85, color=style.color(name), elinewidth=1, **style.marker(name))  # fmt: skip
    edge = style.front(points, "x", "median_us")
    axes.step(edge["x"], edge["median_us"], where="post", color="0.2", lw=1, ls="--")
    for x, group in points.groupby("x"):
        factors = ", ".join("none" if pd.isna(f) else f"{f:g}" for f in sorted(group["capacity_factor"].unique()))
        axes.annotate(factors, (x, group["ci_high_us"].max()), (-8, 4), textcoords="offset points", fontsize=6, color="0.35")  # fmt: skip
    axes.margins(x=0.15)
