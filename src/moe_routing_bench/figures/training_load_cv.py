"""How the balance of the loads develops over training."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, nothing

_SCALES = Scale("bytes trained on (millions)"), Scale("CV of choices per expert (0: balanced)")
TITLE = "Load imbalance over training"


def draw(table: pd.DataFrame) -> Figure:
    """One panel per number of experts."""
    rows = quality_rows.history(table, "load_cv")
    contests = quality_rows.contests(rows)
    figure, axes, found = quality.panels(contests, 1, 8, 4.6)
    if not contests:
        style.empty(axes[0], quality_rows.why(table, "a load"))
        return quality.finish(figure, TITLE, rows)
    for title, group, (panel,) in found:
        quality.curves(panel, group, "load_cv", least=-0.1, dashed=True)
        panel.set_ylabel("CV of choices per expert (0: balanced)")
        panel.set_title(title, fontsize=9)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in contests))


def chart(table: pd.DataFrame) -> Chart:
    """A line per rule through its means over seeds, in a panel per number of experts."""
    rows = quality_rows.history(table, "load_cv")
    contests = quality_rows.contests(rows)
    if not contests:
        return nothing("lines", *_SCALES, rows, quality_rows.why(table, "a load"))
    return quality.lines(contests, "load_cv", *_SCALES)
