"""Time against the number of tokens, shape by shape: where a line crosses another, one implementation overtakes the other."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import grouping, plain, style
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale, marks, nothing, row

MOST_PANELS = 12
TITLE = "Time against the number of tokens"
_SCALES = Scale(TOKENS, "log"), Scale("median time (µs)", "log")


def draw(table: pd.DataFrame) -> Figure:
    """A panel per shape that was measured at several numbers of tokens."""
    found = chart(table)
    return plain.draw(found, TITLE, note=found.note)


def chart(table: pd.DataFrame) -> Chart:
    """A line per implementation, through the rows of one card that are equal but for the tokens; the widest benches and most tokens first."""
    rows = style.ok(table)
    rows = rows.assign(panel=_panels(rows), card=grouping.card(rows)) if len(rows) else rows.assign(panel="", card="")
    counts = rows.groupby("panel")["tokens"].nunique()
    several = rows[rows["panel"].isin(counts.index[counts > 1])]
    if several.empty:
        return nothing("lines", *_SCALES, rows, f"no shape was measured at two numbers of tokens; {style.why(table)}")
    order = sorted(
        several["panel"].unique(), key=lambda name: (-_place(name), -counts[name], name)
    )  # benches of one stage come last
    kept = order[:MOST_PANELS]
    shown = several[several["panel"].isin(kept)]
    records = [
        {"panel": one["panel"], "series": one["implementation"], "x": one["tokens"], "y": one["median_us"], "low": one["ci_low_us"], "high": one["ci_high_us"], "join": one["card"]} | row(one)
        for panel in kept
        for _, one in shown[shown["panel"] == panel].sort_values(["tokens", "median_us"]).iterrows()
    ]  # fmt: skip
    tints = {name: style.color(name) for name in style.ordered(shown["implementation"])}
    note = f"{len(kept)} of {len(order)} shapes" if len(kept) < len(order) else ""
    return Chart("lines", *_SCALES, marks(records), tints, shown, note=note)


def _panels(rows: pd.DataFrame) -> pd.Series:
    """Bench and shape in words; cells of a model and of its bare sizes share a panel, which names the model."""
    whole = rows["bench"] == "model"
    sizes = grouping.labels(rows.assign(model=rows["model"].where(whole)), but=["tokens", "phase"])
    plain_sizes = rows["bench"] + ": " + sizes
    models = rows["model"].groupby(plain_sizes).agg(lambda found: ", ".join(sorted(set(found.dropna()))))
    named = plain_sizes.map(models).where(~whole, "")
    return plain_sizes + named.map(lambda text: f" ({text})" if text else "")


def _place(panel: str) -> int:
    """Where its bench stands in the table of benches."""
    names = list(grouping.BENCHES)
    return names.index(panel.partition(":")[0])
