"""Speed-up of every implementation over its bench's baseline, shape by shape."""

import pandas as pd
import seaborn as sns
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from moe_routing_bench.figures import style

MOST_SHAPES = 28


def draw(table: pd.DataFrame) -> Figure:
    """Heatmap: shapes down, bench and implementation across; the shapes with most entries."""
    rows = style.ok(table)
    rows = rows[(rows["implementation"] != rows["baseline"]) & rows["speedup"].notna()]
    if rows.empty:
        figure, (axes,) = style.canvas(1, 1, 9, 3)
        style.empty(axes, "no implementation besides the baseline is ok")
        return style.finish(figure, "Speed-up over the torch baseline", rows)
    parts = [("T", "tokens"), ("H", "hidden"), ("E", "experts"), ("k", "top_k")]
    shape = rows.apply(lambda r: " ".join(f"{p}{r[c]:.0f}" for p, c in parts if not pd.isna(r[c])), axis=1)
    cells = rows.assign(shape=shape, what=rows["bench"] + ": " + rows["implementation"])
    grid = cells.pivot_table(index="shape", columns="what", values="speedup", aggfunc="median")
    keep = grid.notna().sum(axis=1).sort_values(ascending=False, kind="stable").head(MOST_SHAPES).index
    order = cells.drop_duplicates("shape").sort_values(["tokens", "hidden", "experts", "top_k"])["shape"]
    grid = grid.loc[[s for s in order if s in keep]]
    figure, (axes,) = style.canvas(1, 1, 2.5 + 0.75 * grid.shape[1], 2 + 0.26 * grid.shape[0])
    span = max(grid.max().max(), 1 / grid.min().min(), 1.5)
    sns.heatmap(grid, ax=axes, cmap="RdBu", norm=LogNorm(1 / span, span), annot=True, fmt=".2f", annot_kws={"size": 7}, cbar_kws={"label": "baseline time / time"})  # fmt: skip
    axes.set(xlabel="", ylabel="")
    axes.grid(False)
    return style.finish(figure, "Speed-up over the bench's baseline (median over skew, capacity, dtype)", rows)
