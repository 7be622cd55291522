"""Benches with matrix products under the measured roofs, and how near to the copy bandwidth those come that only move data."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.figures import grouping, style


def draw(table: pd.DataFrame) -> Figure:
    """TFLOP/s over FLOPs per byte with the roofs, and share of copy per bench and implementation; one panel where only one has rows."""
    rows = style.ok(table)
    whole = rows[(rows["flops"] > 0) & (rows["compulsory_bytes"] > 0) & rows["tflops"].notna()]
    moving = rows[(rows["flops"] == 0) & (rows["share_of_copy"] > 0)]
    parts = [(panel, part) for panel, part in ((_roofs, whole), (_strip, moving)) if len(part)]
    figure, panels = style.canvas(1, max(1, len(parts)), 6 * max(1.5, len(parts)), 5)
    if not parts:
        style.empty(panels[0], "no row with FLOPs or with bytes is ok")
    for axes, (panel, part) in zip(panels, parts, strict=False):
        panel(axes, part)
    pooled = [grouping.differing(part, "rows", ["bench", "implementation"]) for _, part in parts]
    where = ("left: ", "right: ") if len(parts) > 1 else ("",)
    note = "one point per row; " + "; ".join(side + pool for side, pool in zip(where, pooled, strict=False))
    return style.finish(
        figure, "Roofline: against the ceilings measured in the same processes", rows, note if parts else ""
    )


def _roofs(axes: Axes, rows: pd.DataFrame) -> None:
    bandwidth, peak = rows["copy_gb_per_s"].median(), rows["peak_tflops"].median()
    x = (rows["flops"] / rows["compulsory_bytes"]).astype(float)
    title = f"{', '.join(rows['bench'].unique())} (n = {len(rows)} rows; bars: 95 % CI)"
    if bandwidth > 0 and peak > 0:
        span = np.geomspace(x.min() / 3, max(x.max() * 3, 4e3 * peak / bandwidth), 200)
        axes.plot(span, np.minimum(span * bandwidth / 1e3, peak), color="0.3", ls="--", lw=1)
        title += f"\nroofs: copy {bandwidth:,.0f} GB/s, bf16 matmul {peak:,.3g} TFLOP/s"
    for name, group in style.groups(rows):
        low, high = (group["flops"] / group[end] / 1e6 for end in ("ci_high_us", "ci_low_us"))
        axes.errorbar(
            x[group.index],
            group["tflops"],
            yerr=style.bars(group["tflops"], low, high),
            alpha=0.8,
            color=style.color(name),
            elinewidth=1,
            **style.marker(name),
        )
    axes.set(
        xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP / compulsory byte)", ylabel="achieved TFLOP/s"
    )
    axes.set_title(title, fontsize=9)
    style.legend(axes, rows["implementation"], loc="lower right")


def _strip(axes: Axes, moving: pd.DataFrame) -> None:
    names, benches = style.ordered(moving["implementation"]), [b for b in BENCHES if b in set(moving["bench"])]
    data = moving.assign(percent=moving["share_of_copy"].astype(float) * 100)
    for name, group in style.groups(data):
        at = group["bench"].map(benches.index) + ((names.index(name) + 0.5) / len(names) - 0.5) * 0.8
        axes.plot(at, group["percent"], alpha=0.7, color=style.color(name), **style.marker(name))
    axes.set_xticks(range(len(benches)), benches)
    axes.axhline(100, ls="--", color="0.3", lw=1)
    if data["percent"].min() < 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="", ylabel="% of measured copy bandwidth")
    axes.set_title(f"data movement (n = {len(moving)} rows; dashed: as fast as a copy)", fontsize=9)
    style.legend(axes, names, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=5)
