"""Achieved bandwidth of every stage and implementation against the measured copy ceiling."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import style

BENCHES = ("gate", "permute", "pack", "combine", "routing")


def draw(table: pd.DataFrame) -> Figure:
    """GB/s over compulsory bytes, one panel a bench, with confidence intervals."""
    rows = style.ok(table, *BENCHES)
    figure, panels = style.canvas(2, 3, 12, 7)
    for axes, bench in zip(panels, BENCHES, strict=False):
        part = rows[rows["bench"] == bench]
        if part.empty:
            style.empty(axes, f"no {bench} row is ok")
            continue
        for name, group in part.groupby("implementation"):
            ends = [group["compulsory_bytes"] / group[c] / 1e3 for c in ("ci_high_us", "ci_low_us")]
            bars = [(group["gb_per_s"] - ends[0]).clip(lower=0), (ends[1] - group["gb_per_s"]).clip(lower=0)]
            axes.errorbar(group["compulsory_bytes"] / 1e6, group["gb_per_s"], yerr=bars, fmt="o", ms=4, alpha=0.8, color=style.COLORS[name], elinewidth=1)  # fmt: skip
        ceiling = part["copy_gb_per_s"].median()
        axes.axhline(ceiling, ls="--", color="0.3", lw=1)
        axes.annotate(
            f"copy {ceiling:,.0f} GB/s", (0.02, ceiling), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
        )
        axes.set(
            xscale="log",
            title=f"{bench} (n={len(part)})",
            xlabel="compulsory bytes (MB)",
            ylabel="GB/s",
            ylim=(0, None),
        )
        style.legend(axes, list(part["implementation"]))
    panels[-1].set_axis_off()
    return style.finish(figure, "Bandwidth per stage: compulsory bytes over device time", rows)
