"""Rows of layers and experts by the format of their weights: what is compared where some of them are quantised."""

import pandas as pd

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.figures import colors, grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, row
from moe_routing_kernels.formats.weights import NAMES, WEIGHTS

READING = grouping.reading("weights")  # benches
OURS = {name: {one.name for one in BENCHES[name].implementations if not one.peer} for name in READING}
_PARTS = ("tokens", "weights", "packed", "phase")  # of a cell, by which rows of one shape differ


def beside_quantised(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with a time of every shape that was measured with quantised weights, plain ones included. Those of `auto` are of one that has a
    row itself, and are left out.

    With `shape`, bench and shape in words; `format`, that of the weights, and of the rows where it is another than the activations';
    `ours`, whether it needs no package of somebody else; and `card`.
    """
    rows = style.ok(table, *READING)
    rows = rows[rows["implementation"] != AUTO]
    if rows.empty:
        return rows.assign(shape="", format="", ours=False, card="")
    shape = rows["bench"] + ": " + grouping.labels(rows, but=_PARTS)
    other = rows["packed"].notna() & (rows["packed"] != rows["dtype"])
    form = rows["weights"].where(~other, rows["weights"] + " x " + rows["packed"].fillna(""))
    ours = [name in OURS[bench] for bench, name in zip(rows["bench"], rows["implementation"], strict=True)]
    found = rows.assign(shape=shape, format=form, ours=ours, card=grouping.card(rows))
    return found[found["shape"].isin(found.loc[found["weights"].isin(WEIGHTS), "shape"])]


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of rows as `beside_quantised` gives them, the fastest of ours of each shape, number of tokens, format and card, in this order."""
    ours = rows[rows["ours"].astype(bool)]
    ordered = ours.assign(place=ours["weights"].map(NAMES.index)).sort_values(
        ["shape", "tokens", "place", "format", "median_us"], kind="stable"
    )
    return ordered.drop_duplicates(["shape", "tokens", "format", "card"])


def chart(
    rows: pd.DataFrame, values: pd.DataFrame, tokens: Scale, scale: Scale, reference: float | None = None
) -> Chart:
    """`values` (y, low, high) of rows, on `scale`: a line per format over tokens, in a panel per shape.

    Where no shape has more than one number of tokens, there is a panel per bench with a line of dots per shape instead.
    """
    if rows.groupby("shape")["tokens"].nunique().max() > 1:
        lines = values.assign(panel=rows["shape"], x=rows["tokens"], join=rows["card"])
        return Chart("lines", tokens, scale, _marks(rows, lines), tints(rows), rows, reference)
    places = rows["shape"].str.partition(": ")[2].str.cat("T" + rows["tokens"].astype(str), sep=" ")
    dots = values.rename(columns={"y": "x"}).assign(panel=rows["bench"], y=places)
    return Chart("dots", scale, Scale("", "names"), _marks(rows, dots), tints(rows), rows, reference)


def _marks(rows: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
    """Marks of rows at their places, a series per format."""
    return marks([
        {"series": one["format"], "says": one["implementation"]} | places.loc[i].to_dict() | row(one)
        for i, one in rows.iterrows()
    ])  # fmt: skip


def tints(rows: pd.DataFrame) -> dict[str, str]:
    """A colour for each format, in the order of their table."""
    return colors.assigned(rows.sort_values("place", kind="stable")["format"].unique())
