"""Where the time of the layer goes, stage by stage."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import style

MOST_BARS = 24


def _label(row: pd.Series) -> str:
    shape = (
        row["model"]
        if isinstance(row["model"], str)
        else f"H{row['hidden']:.0f} E{row['experts']:.0f} k{row['top_k']:.0f}"
    )
    factor = "" if pd.isna(row["capacity_factor"]) else f" cf{row['capacity_factor']:g}"
    skew = "" if pd.isna(row["skew"]) or not row["skew"] else f" skew{row['skew']:g}"
    return f"{shape} T{row['tokens']:.0f}{factor}{skew} | {row['implementation']}"


def draw(table: pd.DataFrame) -> Figure:
    """Stacked bars of stage shares; models first, at most MOST_BARS."""
    rows = style.ok(table, "layer")
    rows = rows[rows["stage_us"].map(lambda v: v is not None and len(v) > 0)]
    shown = (
        rows.assign(named=rows["model"].notna())
        .sort_values(["named", "tokens"], ascending=False, kind="stable")
        .head(MOST_BARS)
    )
    figure, (axes,) = style.canvas(1, 1, 11, max(2.5, 1.4 + 0.28 * len(shown)))
    if shown.empty:
        style.empty(axes, "no layer row is ok")
        return style.finish(figure, "Where the layer's time goes", shown)
    shown = shown.sort_values(["model", "tokens", "capacity_factor", "skew", "implementation"], na_position="first")
    for y, (_, row) in enumerate(shown.iterrows()):
        stages, left = dict(row["stage_us"]), 0.0
        total = sum(stages.values())
        for name, color in style.STAGES.items():
            share = stages.get(name, 0) / total
            axes.barh(y, share, left=left, color=color, label=name if y == 0 else None)
            if share > 0.06:
                axes.text(left + share / 2, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color="white")
            left += share
        axes.text(1.01, y, f"{row['median_us']:,.0f} us", va="center", fontsize=7)
    axes.set(yticks=range(len(shown)), xlim=(0, 1.1), xlabel="share of the sum of the stages' device times")
    axes.set_yticklabels([_label(row) for _, row in shown.iterrows()], fontsize=7)
    axes.invert_yaxis()
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    return style.finish(figure, "Where the layer's time goes", shown)
