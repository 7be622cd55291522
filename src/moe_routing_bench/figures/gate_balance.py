"""Balance of the loads against how sure the router is."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality

X, Y = "gate_entropy", "load_cv"
TITLE = "Balance against certainty"


def draw(table: pd.DataFrame) -> Figure:
    """One panel per number of experts."""
    rows = quality_rows.finals(table, X, Y)
    contests = quality_rows.contests(rows)
    figure, axes, found = quality.panels(contests, 1, 8, 4.6)
    if not contests:
        style.empty(axes[0], quality_rows.why(table, "an entropy and a load"))
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
            xlabel="entropy of the router's scores (nats per token; dotted: equal scores)",
            ylabel="CV of choices per expert (0: balanced)",
        )
        panel.set_title(title, fontsize=9)
        quality.label(panel, points)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in contests))
