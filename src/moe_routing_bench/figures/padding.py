"""What padding wastes: rows of the packed buffer that no assignment fills, by how rows of different experts lie in it."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import colors, grouping, plain, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row

TITLE = "Padding waste by layout"
_SCALES = Scale("load CV of the drawn tokens per expert"), Scale("rows in use over kept assignments", "log")


def draw(table: pd.DataFrame) -> Figure:
    """One panel: every routing that rows of some layout were measured on, once."""
    found = chart(table)
    return plain.draw(found, TITLE, note=found.note)


def chart(table: pd.DataFrame) -> Chart:
    """A point per layout and routing; only shapes that were measured in two layouts, which compact rows alone are not."""
    rows = style.ok(table)
    rows = rows[rows["padding_waste"].notna() & rows["load_cv"].notna() & rows["layout"].notna()]
    if rows["layout"].nunique() < 2:
        return nothing("points", *_SCALES, rows, f"no two layouts were measured; {style.why(table)}")
    if not (rows["padding_waste"] > 0).any():
        return nothing("points", *_SCALES, rows, "no layout that was measured pads")
    keys = ["layout", "tokens", "experts", "top_k", "skew", "capacity_factor", "sampler", "trace", "load_cv"]
    shown = rows.sort_values("bench", kind="stable").drop_duplicates(keys)
    labels = grouping.labels(shown.assign(model=None), but=["layout", "dtype", "packed", "weights"])
    records = [
        {"panel": "all routings", "series": one["layout"], "x": one["load_cv"], "y": 1 + one["padding_waste"], "says": labels[i]} | row(one)
        for i, one in shown.iterrows()
    ]  # fmt: skip
    pooled = grouping.words(grouping.pooled(rows, by=keys))
    note = f"rows that differ in {pooled} are one point" if pooled else ""
    return Chart(
        "points", *_SCALES, marks(records), colors.assigned(sorted(shown["layout"].unique())), shown, note=note
    )
