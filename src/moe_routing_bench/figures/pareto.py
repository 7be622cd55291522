"""Time of a composite, with experts if any was measured, against what it costs: dropped assignments, padded rows.

One shape, one column per skew.
"""

from collections.abc import Sequence

import pandas as pd

from moe_routing_bench.config import axes as table_of_axes
from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import count

# All that cells must agree in; an implementation of a composite has a layout of its own.
SHAPE = ["bench", *table_of_axes.names(without=("skew", "capacity_factor", "layout"))]
_SAME = "drops and padding are the same at every skew of the shape"
COSTS = (("drop_rate", "dropped assignments (%)"), ("padding_waste", "rows beyond the kept assignments (%)"))


def chart(table: pd.DataFrame) -> Chart:
    """A panel per cost and skew where it varies; the fronts of each card are joined."""
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
        return nothing("points", Scale(COSTS[0][1]), time, shown, _SAME)
    tints = palette.tints(pd.concat(drawn)["implementation"])
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
    cards = row_groups.card(points)
    edges = [row_groups.front(own, "x", "median_us") for _, own in points.groupby(cards)]
    on = set(pd.concat(edges).index) if edges else set()
    return [
        {
            "panel": panel,
            "series": one["implementation"],
            "x": one["x"],
            "y": one["median_us"],
            "low": one["ci_low_us"],
            "high": one["ci_high_us"],
            "says": f"capacity factor {_factor(one['capacity_factor'])}",
            "text": _factor(one["capacity_factor"]),
            "join": cards[i] if i in on else None,
        }
        | row(one)
        for i, one in points.iterrows()
    ]


def _shape_shown(table: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows of the shape that was measured with the most skews and capacity factors, and how many shapes there are."""
    rows = row_groups.ok(table).reset_index(drop=True)
    rows = row_groups.composed(rows[rows["skew"].notna() & rows["drop_rate"].notna()])
    if rows.empty:
        return rows, 0
    shapes = rows.groupby(SHAPE, dropna=False).ngroup().rename("shape")
    kinds = pd.concat([shapes, rows[["skew", "capacity_factor"]]], axis=1).drop_duplicates()
    counts = kinds["shape"].value_counts().sort_index()
    return rows[shapes == counts.idxmax()], len(counts)


def _why(table: pd.DataFrame, shown: pd.DataFrame) -> str:
    if _settings(shown) < 2:
        return (
            "no shape was measured with two skews or capacity factors"
            if len(shown)
            else row_groups.why(table, *row_groups.COMPOSITES)
        )
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
    name = row_groups.labels(shown, but=("skew", "capacity_factor", "layout")).iloc[0]
    return f"{shown['bench'].iloc[0]}: {name}, {count(shapes, 'shape')} measured"


def _settings(group: pd.DataFrame) -> int:
    """The skews and capacity factors that a shape was measured with."""
    return len(group[["skew", "capacity_factor"]].drop_duplicates())


def _factor(value: float) -> str:
    """A capacity factor in words."""
    return "none" if pd.isna(value) else f"{value:g}"
