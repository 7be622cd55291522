"""Layers and experts by the format of their weights: time, and share of the ceiling that binds, against the number of tokens."""

import pandas as pd

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import regret
from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale, marks, nothing, row
from moe_routing_kernels.formats.weights import NAMES, WEIGHTS

READING = row_groups.reading("weights")  # benches
OURS = {name: {one.name for one in BENCHES[name].implementations if not one.peer} for name in READING}
_PARTS = ("tokens", "weights", "packed", "phase")  # of a cell, by which rows of one shape differ
_NONE = "no experts or layer with quantised weights has a time"
_TIMES = Scale(TOKENS, "log"), Scale("median time (µs)", "log")
_SHARES = Scale(TOKENS, "log"), Scale("% of the ceiling")


def formats(table: pd.DataFrame) -> Chart:
    """Each format, unquantised weights among them."""
    rows = fastest(with_quantised(table))
    if rows.empty:
        return nothing("lines", *_TIMES, rows, _NONE)
    times = rows[["median_us", "ci_low_us", "ci_high_us"]].set_axis(["y", "low", "high"], axis=1)
    return _chart(rows, times, *_TIMES)


def format_limits(table: pd.DataFrame) -> Chart:
    """Each format; the ceiling is the copy bandwidth over what has to be moved, or the products' rate in that format."""
    rows = fastest(with_quantised(table))
    rows = rows[rows["share_of_roofline"].notna() & (rows["cold"] != False)]  # noqa: E712  of a warm cache bytes have no ceiling
    if rows.empty:
        return nothing("lines", *_SHARES, rows, f"{_NONE} and a ceiling (on a CPU none is one)")
    percent = 100 * rows["share_of_roofline"].astype(float)
    ends = {"low": "ci_high_us", "high": "ci_low_us"}
    shares = pd.DataFrame(
        {"y": percent} | {end: percent * rows["median_us"] / rows[column] for end, column in ends.items()}
    )
    return _chart(rows, shares, *_SHARES, 100.0)


def with_quantised(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with a time of every shape that was measured with quantised weights, plain ones included. Those of `auto` are left out
    where what it chose has a row of its own in the cell.

    With `shape`, bench and shape in words; `format`, that of the weights, and of the rows where it is another than the activations';
    `ours`, whether it needs no other package; and `card`.
    """
    rows = row_groups.ok(table, *READING)
    rows = rows[~_twice(rows)]
    if rows.empty:
        return rows.assign(shape="", format="", ours=False, card="")
    shape = rows["bench"] + ": " + row_groups.labels(rows, but=_PARTS)
    other = rows["packed"].notna() & (rows["packed"] != rows["dtype"])
    form = rows["weights"].where(~other, rows["weights"] + " x " + rows["packed"].fillna(""))
    ours = [name in OURS[bench] for bench, name in zip(rows["bench"], rows["implementation"], strict=True)]
    found = rows.assign(shape=shape, format=form, ours=ours, card=row_groups.card(rows))
    return found[found["shape"].isin(found.loc[found["weights"].isin(WEIGHTS), "shape"])]


def _twice(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of `auto` where what it chose was measured in the same cell on the same card."""
    auto = rows["implementation"] == AUTO
    chose = rows["configuration"].map(regret.chosen, na_action="ignore").where(auto)
    known = rows[["bench", "cell", "implementation"]].assign(card=row_groups.card(rows))
    there = set(known[~auto].itertuples(index=False, name=None))
    asked = known.assign(implementation=chose).itertuples(index=False, name=None)
    return pd.Series([key in there for key in asked], rows.index, bool)


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest of ours of each shape, number of tokens, format and card, in this order, among rows of `with_quantised`."""
    ours = rows[rows["ours"].astype(bool)]
    ordered = ours.assign(place=ours["weights"].map(NAMES.index)).sort_values(
        ["shape", "tokens", "place", "format", "median_us"], kind="stable"
    )
    return ordered.drop_duplicates(["shape", "tokens", "format", "card"])


def _chart(
    rows: pd.DataFrame, values: pd.DataFrame, tokens: Scale, scale: Scale, reference: float | None = None
) -> Chart:
    """`values` (y, low, high) of rows, on `scale`: a line per format over tokens, in a panel per shape.

    Where no shape has more than one number of tokens, there is a panel per bench with a line of dots per shape instead.
    """
    if rows.groupby("shape")["tokens"].nunique().max() > 1:
        lines = values.assign(panel=rows["shape"], x=rows["tokens"], join=row_groups.joined(rows, ["shape", "format"]))
        return Chart(
            "lines", tokens, scale, _marks(rows, lines), _tints(rows), rows, reference, shared=True, level=True
        )
    places = rows["shape"].str.partition(": ")[2].str.cat("T" + rows["tokens"].astype(str), sep=" ")
    dots = values.rename(columns={"y": "x"}).assign(panel=rows["bench"], y=places)
    return Chart("dots", scale, Scale("", "names"), _marks(rows, dots), _tints(rows), rows, reference, shared=True)


def _marks(rows: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
    """Marks of rows at their places, a series per format."""
    return marks(
        [
            {"series": one["format"], "says": one["implementation"]} | places.loc[i].to_dict() | row(one)
            for i, one in rows.iterrows()
        ]
    )


def _tints(rows: pd.DataFrame) -> dict[str, str]:
    """The colour of each format of weights, in the order of their table."""
    shown = rows.sort_values("place", kind="stable").drop_duplicates("format")
    return {one["format"]: palette.FORMATS[one["weights"]] for _, one in shown.iterrows()}
