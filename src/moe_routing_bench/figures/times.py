"""Times of calls: against the number of tokens, shape by shape, and at decode sizes, where few tokens are served at once."""

import pandas as pd

from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale, marks, nothing, row

MOST_SHAPES = 12
MOST_TOKENS, MOST_CELLS = 64, 12
_FAR = 10  # times the least, from which a linear axis would hide what tells the fast ones apart
_LINES = Scale(TOKENS, "log"), Scale("median time (µs)", "log")
_DOTS = Scale("median time (µs)"), Scale("implementation", "names")
_LOG = Scale(_DOTS[0].label, "log"), _DOTS[1]


def over_tokens(table: pd.DataFrame) -> Chart:
    """A line per implementation, through the rows of one card that are equal but for the tokens; the widest benches and most tokens first."""
    rows = row_groups.ok(table)
    rows = rows.assign(panel=_panels(rows), card=row_groups.card(rows)) if len(rows) else rows.assign(panel="", card="")
    counts = rows.groupby("panel")["tokens"].nunique()
    several = rows[rows["panel"].isin(counts.index[counts > 1])]
    if several.empty:
        return nothing(
            "lines", *_LINES, rows, f"no shape was measured at two numbers of tokens; {row_groups.why(table)}"
        )
    benches = row_groups.benches(several)
    place = {panel: benches.index(group["bench"].iloc[0]) for panel, group in several.groupby("panel")}
    order = sorted(
        several["panel"].unique(), key=lambda name: (-place[name], -counts[name], name)
    )  # benches of one stage come last
    kept = order[:MOST_SHAPES]
    shown = several[several["panel"].isin(kept)]
    records = [
        {
            "panel": one["panel"],
            "series": one["implementation"],
            "x": one["tokens"],
            "y": one["median_us"],
            "low": one["ci_low_us"],
            "high": one["ci_high_us"],
            "join": one["card"],
        }
        | row(one)
        for panel in kept
        for _, one in shown[shown["panel"] == panel].sort_values(["tokens", "median_us"]).iterrows()
    ]
    tints = palette.tints(shown["implementation"])
    note = f"{len(kept)} of {len(order)} shapes" if len(kept) < len(order) else ""
    return Chart("lines", *_LINES, marks(records), tints, shown, note=note)


def _panels(rows: pd.DataFrame) -> pd.Series:
    """Bench and shape in words; cells of a model and of its bare sizes share a panel, which names the model."""
    whole = rows["bench"] == "model"
    sizes = row_groups.labels(rows.assign(model=rows["model"].where(whole)), but=["tokens", "phase"])
    plain_sizes = rows["bench"] + ": " + sizes
    models = rows["model"].groupby(plain_sizes).agg(lambda found: ", ".join(sorted(set(found.dropna()))))
    named = plain_sizes.map(models).where(~whole, "")
    return plain_sizes + named.map(lambda text: f" ({text})" if text else "")


def decode(table: pd.DataFrame) -> Chart:
    """The implementations of each cell, fastest first; whole layers and models before stages, and the fewest tokens first."""
    rows = row_groups.ok(table)
    rows = rows[(rows["tokens"] <= MOST_TOKENS) & (rows["bench"] != "training")]
    if rows.empty:
        return nothing("dots", *_DOTS, rows, f"no cell of at most {MOST_TOKENS} tokens; {row_groups.why(table)}")
    benches = row_groups.benches(rows)
    rows = rows.assign(
        panel=rows["bench"] + ": " + row_groups.labels(rows), place=[-benches.index(name) for name in rows["bench"]]
    )
    ordered = rows.sort_values(["place", "tokens", "panel", "median_us"], kind="stable")
    panels = ordered["panel"].unique()
    shown = ordered[ordered["panel"].isin(panels[:MOST_CELLS])]
    records = [
        {
            "panel": one["panel"],
            "series": one["implementation"],
            "x": one["median_us"],
            "y": one["implementation"],
            "low": one["ci_low_us"],
            "high": one["ci_high_us"],
        }
        | row(one)
        for _, one in shown.iterrows()
    ]
    tints = palette.tints(shown["implementation"])
    times = shown.groupby("panel")["median_us"].agg(["min", "max"])
    own = {str(panel): _LOG for panel in times.index[times["max"] > _FAR * times["min"]]}
    note = f"{MOST_CELLS} of {len(panels)} cells" if len(panels) > MOST_CELLS else ""
    return Chart("dots", *_DOTS, marks(records), tints, shown, 0.0, note=note, own=own)
