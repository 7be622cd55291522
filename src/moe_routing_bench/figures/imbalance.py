"""Uneven loads: what skew does to them, what a capacity factor then drops, and what padding wastes."""

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


def load_cv(table: pd.DataFrame) -> Chart:
    """A point per routing with the line as asked, and per capacity factor a line through the median drop rates, with their range."""
    rows = _drawn(table)
    if rows.empty:
        return nothing("lines", _SKEW, _LOAD, rows, _NONE)
    if rows["skew"].nunique() < 2:
        return nothing("lines", _SKEW, _LOAD, rows, _ONE)
    labels, drops = row_groups.labels(rows), rows[rows["drop_rate"].notna()]
    if not (drops["drop_rate"] > 0).any() and drops["capacity_factor"].isna().all():
        drops = drops.iloc[:0]  # what has no limit drops nothing
    top = float(max(rows["skew"].max(), rows["load_cv"].max(), 0.1))
    found = [{"panel": _LOAD.label, "series": ASKED, "x": end, "y": end, "join": ASKED} for end in (0.0, top)]
    for i, one in rows.sort_values("experts", kind="stable").iterrows():
        found.append(
            {
                "panel": _LOAD.label,
                "series": f"E={one['experts']:.0f}",
                "x": one["skew"],
                "y": one["load_cv"],
                "says": labels[i],
                "join": str(i),
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
    labels = row_groups.labels(shown.assign(model=None), but=["layout", "dtype", "packed", "weights"])
    records = [
        {
            "panel": "all routings",
            "series": one["layout"],
            "x": one["load_cv"],
            "y": 1 + one["padding_waste"],
            "says": labels[i],
        }
        | row(one)
        for i, one in shown.iterrows()
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
