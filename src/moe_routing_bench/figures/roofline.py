"""The layer under the measured roofs, and how near to the copy bandwidth the stages that move data come."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from moe_routing_bench.figures import style


def draw(table: pd.DataFrame) -> Figure:
    """Left: TFLOP/s over FLOPs per byte with the roofs. Right: share of copy per bench and implementation."""
    rows = style.ok(table)
    layer, moving = rows[rows["flops"] > 0], rows[rows["flops"] == 0]
    figure, (left, right) = style.canvas(1, 2, 12, 5)
    if layer.empty:
        style.empty(left, "no layer row is ok")
    else:
        bandwidth, peak = layer["copy_gb_per_s"].median(), layer["peak_tflops"].median()
        x = layer["flops"] / layer["compulsory_bytes"]
        span = np.geomspace(x.min() / 3, max(x.max() * 3, 2e3 * peak / bandwidth), 100)
        left.plot(span, np.minimum(span * bandwidth / 1e3, peak), color="0.3", ls="--", lw=1)
        for name, group in layer.groupby("implementation"):
            left.scatter(x[group.index], group["tflops"], s=18, alpha=0.8, color=style.COLORS[name])
        left.set(xscale="log", yscale="log", xlabel="FLOPs / compulsory byte", ylabel="TFLOP/s", title=f"layer (n={len(layer)}); roofs {bandwidth:,.0f} GB/s, {peak:,.3g} TFLOP/s")  # fmt: skip
        style.legend(left, list(layer["implementation"]))
    if moving.empty:
        style.empty(right, "no row of a moving stage is ok")
    else:
        hue = [n for n in style.COLORS if n in set(moving["implementation"])]
        sns.stripplot(moving, x="bench", y=moving["share_of_copy"] * 100, hue="implementation", hue_order=hue, palette=[style.COLORS[n] for n in hue], dodge=True, size=4, alpha=0.8, ax=right)  # fmt: skip
        right.axhline(100, ls="--", color="0.3", lw=1)
        right.set(xlabel="", ylabel="% of measured copy bandwidth", title=f"data movement (n={len(moving)})")
        right.legend(fontsize=7, frameon=False)
    return style.finish(figure, "Roofline: against the ceilings measured in the same run", rows)
