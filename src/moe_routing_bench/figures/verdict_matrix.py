"""Verdicts at one glance: every implementation against the best other one of its cell."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.comparison.verdicts import FASTER, SAME, SLOWER, UNDECIDED
from moe_routing_bench.figures import grouping, plain, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row

MOST_CELLS = 12  # of a bench
TITLE = "Verdicts against the best other implementation"
COLORS = {FASTER: "#0173b2", SAME: "#445577", UNDECIDED: "#767676", SLOWER: "#992255"}
_SCALES = Scale("implementation", "names"), Scale("cell", "names")


def draw(table: pd.DataFrame) -> Figure:
    """A panel per bench: cells down, implementations across."""
    found = chart(table)
    return plain.draw(found, TITLE, note=found.note)


def chart(table: pd.DataFrame) -> Chart:
    """The stored verdict and ratio of every row of each bench's first cells: those of models, then most implementations and tokens first."""
    rows = style.ok(table)
    rows = rows[rows["best_verdict"].notna() & rows["best_speedup"].notna()]
    if rows.empty:
        return nothing("matrix", *_SCALES, rows, f"no row has a verdict (too few twins); {style.why(table)}")
    shown = pd.concat(
        _chosen(rows[rows["bench"] == bench]) for bench in grouping.BENCHES if bench in set(rows["bench"])
    )
    labels = grouping.labels(shown)
    order = style.ordered(shown["implementation"])
    shown = shown.assign(label=labels, place=shown["implementation"].map(order.index))
    records = [
        {"panel": one["bench"], "series": one["best_verdict"], "x": one["implementation"], "y": one["label"], "says": plain.ratio(one["best_speedup"])} | row(one)
        for _, one in shown.sort_values(["turn", "place"], kind="stable").iterrows()
    ]  # fmt: skip
    return Chart("matrix", *_SCALES, marks(records), COLORS, shown, note=grouping.shown_of(shown, rows))


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    cells = rows.groupby("cell").agg(model=("model", "first"), n=("implementation", "size"), tokens=("tokens", "first"))
    cells = cells.assign(plain=cells["model"].isna()).sort_values(["plain", "n", "tokens"], ascending=[True, False, False], kind="stable")  # fmt: skip
    rank = {cell: i for i, cell in enumerate(cells.index[:MOST_CELLS])}
    kept = rows[rows["cell"].isin(set(rank))]
    return kept.assign(turn=[list(grouping.BENCHES).index(rows["bench"].iloc[0]) * 1000 + rank[one] for one in kept["cell"]])  # fmt: skip
