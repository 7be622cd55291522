"""What skew does to the loads, and what a capacity factor then drops."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from moe_routing_bench.figures import style


def draw(table: pd.DataFrame) -> Figure:
    """Realised load CV against target skew; drop rate against skew per capacity factor."""
    rows = style.ok(table, "permute", "pack", "combine").dropna(subset=["skew"]).drop_duplicates(["bench", "cell"])
    figure, (left, right) = style.canvas(1, 2, 11, 4.5)
    if rows.empty:
        style.empty(left, "no row with a skew is ok")
        style.empty(right, "no row with a skew is ok")
        return style.finish(figure, "Load imbalance and drops against skew", rows)
    sns.scatterplot(rows, x="skew", y="load_cv", hue=rows["experts"].astype(int).astype(str), ax=left, alpha=0.8)
    top = max(rows["skew"].max(), rows["load_cv"].max(), 0.1)
    left.plot([0, top], [0, top], ls="--", color="0.4", lw=1)
    left.set(
        xlabel="target CV of expected loads",
        ylabel="realised CV of tokens per expert",
        title=f"load CV (n={len(rows)} cells)",
    )
    left.legend(title="experts", fontsize=7, frameon=False)
    factor = rows["capacity_factor"].map(lambda v: "none" if pd.isna(v) else f"{v:g}")
    sns.lineplot(rows, x="skew", y="drop_rate", hue=factor, marker="o", ax=right, errorbar=("pi", 100))
    right.set(
        xlabel="target CV of expected loads",
        ylabel="dropped share of assignments",
        title="drop rate (mean and range over cells)",
    )
    right.legend(title="capacity factor", fontsize=7, frameon=False)
    return style.finish(figure, "Load imbalance and drops against skew", rows)
