"""Balance of the loads against how sure the router is."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing

X, Y = "gate_entropy", "load_cv"
TITLE = "Balance against certainty"
_MISSING = "an entropy and a load"
_SCALES = Scale("entropy of the router's scores (nats per token)"), Scale("CV of choices per expert (0: balanced)")


def draw(table: pd.DataFrame) -> Figure:
    """One panel per number of experts."""
    rows = quality_rows.finals(table, X, Y)
    contests = quality_rows.contests(rows)
    figure, axes, found = quality.panels(contests, 1, 8, 4.6)
    if not contests:
        style.empty(axes[0], quality_rows.why(table, _MISSING))
        return quality.finish(figure, TITLE, rows)
    for title, group, (panel,) in found:
        points = []
        for name, runs in quality_rows.ordered(group):
            points.append((*quality.cross(panel, runs, X, Y), name, quality.color(runs["router"].iloc[0])))
        most = float(np.log(group["experts"].iloc[0]))
        panel.axvline(most, color="0.3", lw=0.8, ls=":")
        panel.margins(0.08)
        quality.frame(panel, y=[y for _, y, *_ in points], least=-0.1)
        panel.set(
            xlabel=f"{_SCALES[0].label[:-1]}; dotted: equal scores)",
            ylabel=_SCALES[1].label,
        )
        panel.set_title(title, fontsize=9)
        quality.label(panel, points)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in contests))


def chart(table: pd.DataFrame) -> Chart:
    """The same crosses for the page; the entropy of equal scores is said in the name of the panel."""
    rows = quality_rows.finals(table, X, Y)
    contests = quality_rows.contests(rows)
    if not contests:
        return nothing("points", *_SCALES, rows, quality_rows.why(table, _MISSING))
    found, tints = [], {}
    for title, group in contests:
        panel = f"{title}; entropy of equal scores: {np.log(group['experts'].iloc[0]):.2f}"
        for name, runs in quality_rows.ordered(group):
            tints[name] = quality.color(runs["router"].iloc[0])
            (x, x_half), (y, half) = quality_rows.interval(runs[X]), quality_rows.interval(runs[Y])
            found.append({"panel": panel, "series": name, "x": x, "y": y, "x_low": x - x_half, "x_high": x + x_half, "low": y - half, "high": y + half, "says": f"n = {len(runs)} seeds"})  # fmt: skip
    return Chart("points", *_SCALES, marks(found), tints, pd.concat(group for _, group in contests))
