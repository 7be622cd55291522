"""Benches with matrix products under the measured roofs, and how near to the copy bandwidth those come that only move data."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.figures import grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row

ROOF = "roof"
_SCALES = Scale("arithmetic intensity (FLOP / compulsory byte)", "log"), Scale("achieved TFLOP/s", "log")


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


def chart(table: pd.DataFrame) -> Chart:
    """A point per row with FLOPs, with the interval of its time, in a panel per bench under the medians of its ceilings."""
    rows = style.ok(table)
    rows = rows[(rows["flops"] > 0) & (rows["compulsory_bytes"] > 0) & rows["tflops"].notna()]
    if rows.empty:
        return nothing("lines", *_SCALES, rows, "no row with FLOPs is ok")
    labels = grouping.labels(rows)
    records = []
    for bench in [name for name in BENCHES if name in set(rows["bench"])]:
        mine = rows[rows["bench"] == bench]
        records += _roof(bench, mine)
        for _, one in mine.iterrows():
            low, high = (one["flops"] / one[end] / 1e6 for end in ("ci_high_us", "ci_low_us"))
            alone = f"{one['bench']} {one['cell']}"  # a line through one point is none
            records.append({"panel": bench, "series": one["implementation"], "x": one["flops"] / one["compulsory_bytes"], "y": one["tflops"], "low": low, "high": high, "says": labels[one.name], "join": alone} | row(one))  # fmt: skip
    tints = {name: style.color(name) for name in style.ordered(rows["implementation"])}
    return Chart("lines", *_SCALES, marks(records), tints | {ROOF: "#000000"}, rows)


def _roof(bench: str, rows: pd.DataFrame) -> list[dict[str, object]]:
    """The roof over a bench's rows as three points: below the least intensity, where the ceilings meet, above the most. None without ceilings."""
    bandwidth, peak = rows["copy_gb_per_s"].median(), rows["peak_tflops"].median()
    if not (bandwidth > 0 and peak > 0):
        return []
    x = (rows["flops"] / rows["compulsory_bytes"]).astype(float)
    ridge = 1e3 * peak / bandwidth
    says = f"copy {bandwidth:,.0f} GB/s, bf16 matmul {peak:,.3g} TFLOP/s"
    ends = sorted({min(x.min() / 2, ridge), ridge, max(x.max() * 2, ridge)})
    return [{"panel": bench, "series": ROOF, "x": one, "y": min(one * bandwidth / 1e3, peak), "says": says, "join": ROOF} for one in ends]  # fmt: skip


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
    style.plain_log(axes.xaxis)
    style.plain_log(axes.yaxis)
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
