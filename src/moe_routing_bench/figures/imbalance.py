"""Uneven loads: what skew does to them, what a capacity factor drops and padding wastes, and the time of a composite against these costs."""

from collections.abc import Sequence

import pandas as pd

from moe_routing_bench.config import axes as table_of_axes
from moe_routing_bench.figures import palette, row_groups
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
_WASTE = Scale("load CV of the drawn tokens per expert"), Scale("rows in use over kept assignments", "log")
# All that cells must agree in; an implementation of a composite has a layout of its own.
SHAPE = ["bench", *table_of_axes.names(without=("skew", "capacity_factor", "layout"))]
_SAME = "drops and padding are the same at every skew of the shape"
COSTS = (("drop_rate", "dropped assignments (%)"), ("padding_waste", "rows beyond the kept assignments (%)"))


def load_cv(table: pd.DataFrame) -> Chart:
    """A point per routing with the line as asked, and per capacity factor a line through the median drop rates, with their range."""
    rows = _drawn(table)
    if rows.empty:
        return nothing("lines", _SKEW, _LOAD, rows, _NONE)
    if rows["skew"].nunique() < 2:
        return nothing("lines", _SKEW, _LOAD, rows, _ONE)
    labels, drops = row_groups.labels(rows).to_dict(), rows[rows["drop_rate"].notna()]
    if not (drops["drop_rate"] > 0).any() and drops["capacity_factor"].isna().all():
        drops = drops.iloc[:0]  # what has no limit drops nothing
    top = float(max(rows["skew"].max(), rows["load_cv"].max(), 0.1))
    found = [{"panel": _LOAD.label, "series": ASKED, "x": end, "y": end, "join": ASKED} for end in (0.0, top)]
    for one in row_groups.records(rows.sort_values("experts", kind="stable"), ("experts", "skew", "load_cv")):
        found.append(
            {
                "panel": _LOAD.label,
                "series": f"E={one['experts']:.0f}",
                "x": one["skew"],
                "y": one["load_cv"],
                "says": labels[one["index"]],
                "join": str(one["index"]),
            }
            | row(one)
        )
    for factor, group in drops.assign(factor=drops["capacity_factor"].fillna(float("inf"))).groupby("factor"):
        name = "no limit" if factor == float("inf") else f"capacity factor {factor:g}"
        for skew, own in (100 * group.set_index("skew")["drop_rate"]).groupby(level=0):
            says = f"median and range of {count(len(own), 'routing')}"
            found.append(
                {
                    "panel": _DROP.label,
                    "series": name,
                    "x": skew,
                    "y": own.median(),
                    "low": own.min(),
                    "high": own.max(),
                    "says": says,
                }
            )
    names = list(dict.fromkeys(one["series"] for one in found if one["series"] != ASKED))
    return Chart(
        "lines",
        _SKEW,
        _LOAD,
        marks(found),
        {ASKED: "#000000"} | palette.assigned(names),
        rows,
        note=row_groups.differing(rows, f"{len(rows)} routings", but=(*WITHOUT_EFFECT, "skew", "sampler")),
        own={_DROP.label: (_SKEW, _DROP)},
        shared=True,
        timed=False,
    )


def _drawn(table: pd.DataFrame) -> pd.DataFrame:
    """The routings that have a target and a load."""
    rows = row_groups.ok(table)
    return routings(rows[rows["skew"].notna() & rows["load_cv"].notna()])


def routings(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per routing: benches that were measured on the same assignments have the same loads and drops."""
    return rows.drop_duplicates(LOADS)


def padding(table: pd.DataFrame) -> Chart:
    """A point per layout and routing; only shapes that were measured in two layouts, which compact rows alone are not."""
    rows = row_groups.ok(table)
    rows = rows[rows["padding_waste"].notna() & rows["load_cv"].notna() & rows["layout"].notna()]
    if rows["layout"].nunique() < 2:
        return nothing("points", *_WASTE, rows, f"no two layouts were measured; {row_groups.why(table)}")
    if not (rows["padding_waste"] > 0).any():
        return nothing("points", *_WASTE, rows, "no layout that was measured pads")
    keys = ["layout", "tokens", "experts", "top_k", "skew", "capacity_factor", "sampler", "trace", "load_cv"]
    shown = rows.sort_values("bench", kind="stable").drop_duplicates(keys)
    labels = row_groups.labels(shown.assign(model=None), but=["layout", "dtype", "packed", "weights"]).to_dict()
    records = [
        {
            "panel": "all routings",
            "series": one["layout"],
            "x": one["load_cv"],
            "y": 1 + one["padding_waste"],
            "says": labels[one["index"]],
        }
        | row(one)
        for one in row_groups.records(shown, ("layout", "load_cv", "padding_waste"))
    ]
    pooled = row_groups.words(row_groups.pooled(rows, by=keys))
    note = f"rows that differ in {pooled} are one point" if pooled else ""
    return Chart(
        "points",
        *_WASTE,
        marks(records),
        palette.assigned(sorted(shown["layout"].unique())),
        shown,
        note=note,
        timed=False,
    )


def pareto(table: pd.DataFrame) -> Chart:
    """A panel per cost and skew where it varies, of one shape, with experts if any was measured; the fronts of each card are joined."""
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
        shared=True,
        level=True,
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
