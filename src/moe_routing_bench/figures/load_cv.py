"""What skew does to the loads, and what a capacity factor then drops."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.config import axes as table_of_axes
from moe_routing_bench.figures import colors, grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import count

# Axes of no effect on the loads; a rule that has one shows in the loads themselves.
WITHOUT_EFFECT = (
    *("model", "phase", "hidden", "intermediate", "router", "activation"),
    *("dtype", "packed", "weights", "layout"),
)
LOADS = [*table_of_axes.names(without=WITHOUT_EFFECT), "load_cv", "drop_rate"]
ASKED = "as asked"
_NONE, _ONE = "no ok row has a skew and a load", "all loads were drawn with one skew"
_SKEW = Scale("target: CV of expected tokens per expert (skew)")
_LOAD, _DROP = Scale("realised CV of tokens per expert"), Scale("dropped assignments (%)")


def draw(table: pd.DataFrame) -> Figure:
    """Realised load CV against target skew; drop rate against skew per capacity factor."""
    rows = _drawn(table)
    figure, (left, right) = style.canvas(1, 2, 11, 4.8)
    one = rows["skew"].nunique() == 1
    drops = rows[rows["drop_rate"].notna()]
    _loads(left, rows) if len(rows) and not one else style.empty(left, _ONE if one else _NONE)
    _drops(right, drops) if len(drops) and not one else style.empty(
        right, _ONE if one else "no ok row has a skew and a drop rate"
    )
    return style.finish(figure, "Load imbalance and drops against skew", rows)


def chart(table: pd.DataFrame) -> Chart:
    """The same: a point per routing beside the line as asked, and per capacity factor a line through the median drop rates, with their range."""
    rows = _drawn(table)
    if rows.empty:
        return nothing("lines", _SKEW, _LOAD, rows, _NONE)
    if rows["skew"].nunique() < 2:
        return nothing("lines", _SKEW, _LOAD, rows, _ONE)
    labels, drops = grouping.labels(rows), rows[rows["drop_rate"].notna()]
    if not (drops["drop_rate"] > 0).any() and drops["capacity_factor"].isna().all():
        drops = drops.iloc[:0]  # what has no limit drops nothing
    top = float(max(rows["skew"].max(), rows["load_cv"].max(), 0.1))
    found = [{"panel": _LOAD.label, "series": ASKED, "x": end, "y": end, "join": ASKED} for end in (0.0, top)]
    for i, one in rows.sort_values("experts", kind="stable").iterrows():
        found.append({"panel": _LOAD.label, "series": f"E={one['experts']:.0f}", "x": one["skew"], "y": one["load_cv"], "says": labels[i], "join": str(i)} | row(one))  # fmt: skip
    for factor, group in drops.assign(factor=drops["capacity_factor"].fillna(float("inf"))).groupby("factor"):
        name = "no limit" if factor == float("inf") else f"capacity factor {factor:g}"
        for skew, own in (100 * group.set_index("skew")["drop_rate"]).groupby(level=0):
            says = f"median and range of {count(len(own), 'routing')}"
            found.append({"panel": _DROP.label, "series": name, "x": skew, "y": own.median(), "low": own.min(), "high": own.max(), "says": says})  # fmt: skip
    names = list(dict.fromkeys(one["series"] for one in found if one["series"] != ASKED))
    return Chart(
        "lines", _SKEW, _LOAD, marks(found), {ASKED: "#000000"} | colors.assigned(names), rows,
        note=grouping.differing(rows, f"{len(rows)} routings", but=(*WITHOUT_EFFECT, "skew", "sampler")), own={_DROP.label: (_SKEW, _DROP)},
    )  # fmt: skip


def _drawn(table: pd.DataFrame) -> pd.DataFrame:
    """The routings that have a target and a load."""
    rows = style.ok(table)
    return routings(rows[rows["skew"].notna() & rows["load_cv"].notna()])


def routings(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per routing: benches that were measured on the same assignments have the same loads and drops."""
    return rows.drop_duplicates(LOADS)


def _loads(axes: Axes, rows: pd.DataFrame) -> None:
    counts = sorted(rows["experts"].dropna().astype(int).unique())
    colors = dict(zip(map(str, counts), sns.color_palette("viridis", len(counts)), strict=True))
    experts = rows["experts"].map(lambda v: f"{v:.0f}")
    sns.scatterplot(
        rows,
        x="skew",
        y="load_cv",
        hue=experts,
        hue_order=list(colors),
        palette=colors,
        style=rows["sampler"].fillna("trace").astype(str),
        ax=axes,
        alpha=0.8,
        s=45,
    )
    top = max(rows["skew"].max(), rows["load_cv"].max(), 0.1)
    axes.plot([0, top], [0, top], ls="--", color="0.4", lw=1, label=ASKED)
    axes.set(xlabel=_SKEW.label, ylabel=_LOAD.label)
    shown = (*WITHOUT_EFFECT, "skew", "experts", "sampler")
    axes.set_title(f"load CV\n{grouping.differing(rows, f'{len(rows)} routings', but=shown)}", fontsize=9)
    axes.legend(title="experts, sampler", fontsize=7, title_fontsize=7, frameon=False)


def _drops(axes: Axes, rows: pd.DataFrame) -> None:
    keys = rows["capacity_factor"].fillna(float("inf"))
    for factor, color in zip(sorted(keys.unique()), sns.color_palette("colorblind"), strict=False):
        percent = rows[keys == factor].assign(drop=lambda r: r["drop_rate"] * 100).groupby("skew")["drop"]
        middle = percent.median()
        ends = style.bars(middle, percent.min(), percent.max())
        name = "none" if factor == float("inf") else f"{factor:g}"
        axes.errorbar(
            middle.index,
            middle,
            yerr=ends,
            marker="o",
            ms=4,
            capsize=2,
            color=color,
            clip_on=False,  # marks at nothing stand on the axis
            label=f"{name} (n = {percent.size().sum()})",
        )
    axes.set(xlabel=_SKEW.label, ylabel=_DROP.label)
    axes.set_ylim(
        bottom=0, top=None if (rows["drop_rate"] > 0).any() else 1
    )  # no share below nothing, also where nothing is dropped
    over = grouping.differing(rows, "routings", ["capacity_factor", "skew"], WITHOUT_EFFECT)
    axes.set_title(f"drop rate: median and (bars) range over\n{over}", fontsize=9)
    axes.legend(title="capacity factor", fontsize=7, title_fontsize=7, frameon=False)
