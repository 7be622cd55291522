"""Latency at decode sizes: the time of a call where few tokens are served at once."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import grouping, plain, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row

MOST_TOKENS, MOST_PANELS = 64, 12
TITLE = "Latency at decode sizes"
_FAR = 10  # times the least, from which a linear axis would hide what tells the fast ones apart
_SCALES = Scale("median time (µs)"), Scale("implementation", "names")
_LOG = Scale(_SCALES[0].label, "log"), _SCALES[1]


def draw(table: pd.DataFrame) -> Figure:
    """A panel per cell of at most MOST_TOKENS tokens."""
    found = chart(table)
    return plain.draw(found, TITLE, note=found.note)


def chart(table: pd.DataFrame) -> Chart:
    """The implementations of each cell, fastest first; whole layers and models before stages, and the fewest tokens first."""
    rows = style.ok(table)
    rows = rows[(rows["tokens"] <= MOST_TOKENS) & (rows["bench"] != "training")]
    if rows.empty:
        return nothing("dots", *_SCALES, rows, f"no cell of at most {MOST_TOKENS} tokens; {style.why(table)}")
    benches = list(grouping.BENCHES)
    rows = rows.assign(
        panel=rows["bench"] + ": " + grouping.labels(rows), place=[-benches.index(name) for name in rows["bench"]]
    )
    ordered = rows.sort_values(["place", "tokens", "panel", "median_us"], kind="stable")
    panels = ordered["panel"].unique()
    shown = ordered[ordered["panel"].isin(panels[:MOST_PANELS])]
    records = [
        {"panel": one["panel"], "series": one["implementation"], "x": one["median_us"], "y": one["implementation"], "low": one["ci_low_us"], "high": one["ci_high_us"]} | row(one)
        for _, one in shown.iterrows()
    ]  # fmt: skip
    tints = {name: style.color(name) for name in style.ordered(shown["implementation"])}
    times = shown.groupby("panel")["median_us"].agg(["min", "max"])
    own = {str(panel): _LOG for panel in times.index[times["max"] > _FAR * times["min"]]}
    note = f"{MOST_PANELS} of {len(panels)} cells" if len(panels) > MOST_PANELS else ""
    return Chart("dots", *_SCALES, marks(records), tints, shown, 0.0, note=note, own=own)
