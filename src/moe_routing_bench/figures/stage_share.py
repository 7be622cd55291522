"""Where the time of the layer goes, stage by stage."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import style

MOST_BARS = 18
TITLE = "Where the layer's time goes: share of the stages' times"


def draw(table: pd.DataFrame) -> Figure:
    """Stacked bars of stage shares, whole cells at a time, a cell of every model first, at most about MOST_BARS."""
    rows = style.ok(table, "layer")
    rows = rows[[sum(style.stages(value).values()) > 0 for value in rows["stage_us"]]]
    shown = choose(rows)
    figure, (axes,) = style.canvas(1, 1, 11, max(3, 1.6 + 0.3 * len(shown)))
    if shown.empty:
        style.empty(axes, style.why(table, "layer"))
        return style.finish(figure, TITLE, shown)
    for y, (_, row) in enumerate(shown.iterrows()):
        _bar(axes, y, row)
    axes.set(yticks=range(len(shown)), xlim=(0, 1.22), xlabel="share of the sum of the stages' times (label: median time of the whole layer, 95 % CI)")  # fmt: skip
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticklabels([_label(row) for _, row in shown.iterrows()], fontsize=7)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8)
    left_out = len(rows) - len(shown)
    return style.finish(figure, TITLE + (f" ({left_out} rows not shown)" if left_out else ""), shown)


def choose(rows: pd.DataFrame) -> pd.DataFrame:
    """The cells to show: each model's cell with most implementations and tokens, then plain shapes, then the rest."""
    if rows.empty:
        return rows
    cells = rows.groupby("cell", sort=True).agg(n=("implementation", "size"), tokens=("tokens", "first"), model=("model", "first"), skew=("skew", "first"))  # fmt: skip
    cells = cells.sort_values(["n", "tokens", "skew"], ascending=[False, False, True], kind="stable")
    cells["turn"] = cells.groupby("model", dropna=False).cumcount()
    cells["plain"] = cells["model"].isna()
    cells = cells.sort_values(["turn", "plain"], kind="stable")
    keep = cells.index[(cells["n"].cumsum() <= MOST_BARS) | (cells["n"].cumsum() == cells["n"])]
    rank = {cell: i for i, cell in enumerate(keep)}
    names = style.ordered(rows["implementation"])
    shown = rows[rows["cell"].isin(keep)]
    return shown.assign(_cell=shown["cell"].map(rank), _name=shown["implementation"].map(names.index)).sort_values(["_cell", "_name"]).head(2 * MOST_BARS)  # fmt: skip


def _bar(axes: Axes, y: int, row: pd.Series) -> None:
    times, left = style.stages(row["stage_us"]), 0.0
    total = sum(times.values())
    for name, color in style.STAGES.items():
        share = times.get(name, 0.0) / total
        axes.barh(y, share, left=left, color=color, label=name if y == 0 else None)
        if share > 0.05:
            axes.text(left + share / 2, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color="white")
        left += share
    interval = "" if pd.isna(row["ci_low_us"]) else f" [{row['ci_low_us']:,.0f}, {row['ci_high_us']:,.0f}]"
    axes.text(1.01, y, f"{row['median_us']:,.0f} µs{interval}", va="center", fontsize=7)


def _label(row: pd.Series) -> str:
    parts = [("H", "hidden"), ("I", "intermediate"), ("E", "experts"), ("k", "top_k")]
    plain = " ".join(f"{letter}{row[column]:.0f}" for letter, column in parts if not pd.isna(row[column]))
    shape = plain if pd.isna(row["model"]) else row["model"]
    factor = "" if pd.isna(row["capacity_factor"]) else f" cf{row['capacity_factor']:g}"
    skew = "" if pd.isna(row["skew"]) or not row["skew"] else f" skew{row['skew']:g}"
    return f"{shape} T{row['tokens']:.0f}{factor}{skew} | {row['implementation']}"
