"""Time of the fastest implementation of ours with weights of each format, against the number of tokens: where formats overtake each other."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import format_rows, plain
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale, nothing

TITLE = "Time by format of the weights"
NONE = "no experts or layer with quantised weights has a time"
_SCALES = Scale(TOKENS, "log"), Scale("median time (µs)", "log")


def draw(table: pd.DataFrame) -> Figure:
    """All panels."""
    return plain.draw(chart(table), TITLE)


def chart(table: pd.DataFrame) -> Chart:
    """Each format, unquantised weights among them; a line is through the rows of one card."""
    rows = format_rows.fastest(format_rows.beside_quantised(table))
    if rows.empty:
        return nothing("lines", *_SCALES, rows, NONE)
    times = rows[["median_us", "ci_low_us", "ci_high_us"]].set_axis(["y", "low", "high"], axis=1)
    return format_rows.chart(rows, times, *_SCALES)
