"""How near the fastest implementation of ours with weights of each format comes to the ceiling that binds, against the number of tokens."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import format_rows, plain
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale, nothing
from moe_routing_bench.figures.formats import NONE

TITLE = "Share of the ceiling that binds, by format of the weights"
_SCALES = Scale(TOKENS, "log"), Scale("% of the ceiling")


def draw(table: pd.DataFrame) -> Figure:
    """All panels."""
    return plain.draw(chart(table), TITLE)


def chart(table: pd.DataFrame) -> Chart:
    """Each format; the ceiling is the copy bandwidth over what has to be moved, or the products' rate in that format."""
    rows = format_rows.fastest(format_rows.beside_quantised(table))
    rows = rows[rows["share_of_roofline"].notna()]
    if rows.empty:
        return nothing("lines", *_SCALES, rows, f"{NONE} and a ceiling (on a CPU none is one)")
    percent = 100 * rows["share_of_roofline"].astype(float)
    ends = {"low": "ci_high_us", "high": "ci_low_us"}
    shares = pd.DataFrame({"y": percent} | {end: percent * rows["median_us"] / rows[us] for end, us in ends.items()})
    return format_rows.chart(rows, shares, *_SCALES, 100.0)
