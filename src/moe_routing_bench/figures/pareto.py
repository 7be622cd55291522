"""Time of a composite, with experts if any was measured, against what it costs: dropped assignments, padded rows.

One shape, one column per skew.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from moe_routing_bench.config import axes as table_of_axes
from moe_routing_bench.figures import grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.figures.pareto_points import draw_points, factor_of
from moe_routing_bench.quantities import count

# All that cells must agree in; an implementation of a composite has a layout of its own.
SHAPE = ["bench", *table_of_axes.names(without=("skew", "capacity_factor", "layout"))]
_SAME = "drops and padding are the same at every skew of the shape"
COSTS = (("drop_rate", "dropped assignments (%)"), ("padding_waste", "rows beyond the kept assignments (%)"))


def draw(table: pd.DataFrame) -> Figure:
    """Time against drops and padding, each if it varies, of the shape with the most skews and capacity factors."""
    shown, shapes = _shape_shown(table)
    title = "Time against drops and padding"
    told = shown[shown["skew"].isin(_told(shown))]
    if not _costs(shown) or told.empty:
        figure, (axes,) = style.canvas(1, 1, 8, 4)
        style.empty(axes, _SAME if _costs(shown) else _why(table, shown))
        return style.finish(figure, title, shown.iloc[:0])
    shown = told
    skews, bench, costs = sorted(shown["skew"].unique()), shown["bench"].iloc[0], _costs(shown)
    figure, panels = style.canvas(len(costs), len(skews), max(9, 3.2 * len(skews)), 0.4 + 3.1 * len(costs))
    lowest, highest = shown["ci_low_us"].min(), shown["ci_high_us"].max()
    for i, (column, label) in enumerate(costs):
        for j, skew in enumerate(skews):
            axes = panels[i * len(skews) + j]
            points = shown[(shown["skew"] == skew) & shown[column].notna()]
            if points.empty:
                style.empty(axes, "no row has this value")
                continue
            draw_points(axes, points.assign(x=points[column].astype(float) * 100))
            axes.set(
                xlabel=label,
                ylabel=f"{bench} time (µs)" if j == 0 else "",
                title=f"skew {skew:g} (n = {_count(points)})",
            )
            if highest > 5 * lowest:
                axes.set(yscale="log", ylim=(lowest / 1.5, 1.8 * highest))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_formatter(NullFormatter())
            else:
                axes.set_ylim(0, 1.12 * highest)
    names = style.ordered(shown["implementation"])
    figure.legend(
        handles=style.handles(names),
        loc="outside right center",
        frameon=False,
        fontsize=8,
        title="dashed: Pareto front\nof the points of a card\nbars: 95 % CI\nlabels: capacity factor",
        title_fontsize=7,
    )
    return style.finish(figure, f"{title}\n{_name(shown, shapes)}", shown)


def chart(table: pd.DataFrame) -> Chart:
    """The same points for the page, a panel per cost and skew where it varies; the fronts of each card are joined."""
    shown, shapes = _shape_shown(table)
    bench = shown["bench"].iloc[0] if len(shown) else "composite"
    far = shown["ci_high_us"].max() > 5 * shown["ci_low_us"].min()
    time = Scale(f"{bench} time (µs)", "log" if far else "linear")
    if not _costs(shown):
        return nothing("points", Scale(COSTS[0][1]), time, shown, _why(table, shown))
    records, own, drawn = [], {}, []
    for column, label in _costs(shown):
        for skew in sorted(shown["skew"].unique()):
            points = shown[(shown["skew"] == skew) & shown[column].notna()]
            if points[column].nunique() < 2:
                continue  # all capacity factors cost the same here: nothing to choose
            panel = f"{label}, skew {skew:g}"
            drawn.append(points)
            own[panel] = (Scale(label), time)
            records += _marks(points.assign(x=points[column].astype(float) * 100), panel)
    if not records:
        return nothing("points", Scale(COSTS[0][1]), time, shown, _SAME)  # fmt: skip
    tints = {name: style.color(name) for name in style.ordered(pd.concat(drawn)["implementation"])}
    return Chart(
        "points",
        Scale("cost (%)"),
        time,
        marks(records),
        tints,
        shown.loc[pd.concat(drawn).index.unique()],
        note=_name(shown, shapes),
        own=own,
    )


def _marks(points: pd.DataFrame, panel: str) -> list[dict[str, object]]:
    """A mark per row; those on the front of their card say which card joins them."""
    cards = grouping.card(points)
    edges = [style.front(own, "x", "median_us") for _, own in points.groupby(cards)]
    on = set(pd.concat(edges).index) if edges else set()
    return [
        {"panel": panel, "series": one["implementation"], "x": one["x"], "y": one["median_us"], "low": one["ci_low_us"], "high": one["ci_high_us"], "says": f"capacity factor {factor_of(one['capacity_factor'])}", "join": cards[i] if i in on else None} | row(one)
        for i, one in points.iterrows()
    ]  # fmt: skip


def _shape_shown(table: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows of the shape that was measured with the most skews and capacity factors, and how many shapes there are."""
    rows = style.ok(table)
    rows = grouping.composed(rows[rows["skew"].notna() & rows["drop_rate"].notna()])
    groups = [group for _, group in rows.groupby(SHAPE, dropna=False)]
    return max(groups, key=_settings, default=rows), len(groups)


def _why(table: pd.DataFrame, shown: pd.DataFrame) -> str:
    if _settings(shown) < 2:
        return "no shape was measured with two skews or capacity factors" if len(shown) else style.why(table, *grouping.COMPOSITES)  # fmt: skip
    return "drops and padding are the same in all cells of the shape"


def _costs(shown: pd.DataFrame) -> Sequence[tuple[str, str]]:
    """Column and label of what varies with the settings of a shape; what is the same everywhere costs nothing."""
    return [cost for cost in COSTS if shown[cost[0]].nunique() > 1] if _settings(shown) > 1 else []


def _told(shown: pd.DataFrame) -> list[float]:
    """The skews at which capacity factors differ in a cost; at the others there is nothing to choose."""
    counts = shown.groupby("skew")[[column for column, _ in COSTS]].nunique().max(axis=1)
    return list(counts.index[counts > 1])


def _name(shown: pd.DataFrame, shapes: int) -> str:
    """Bench and shape in words."""
    name = grouping.labels(shown, but=("skew", "capacity_factor", "layout")).iloc[0]
    return f"{shown['bench'].iloc[0]}: {name}, {count(shapes, 'shape')} measured"


def _settings(group: pd.DataFrame) -> int:
    """The skews and capacity factors that a shape was measured with."""
    return len(group[["skew", "capacity_factor"]].drop_duplicates())


def _count(points: pd.DataFrame) -> str:
    """The number of points, and of the cards that they were measured on where these are several."""
    cards = grouping.card(points).nunique()
    return f"{len(points)}" + (f", {cards} cards" if cards > 1 else "")
