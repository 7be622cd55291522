"""Achieved bandwidth of every implementation of a bench that only moves data, against the measured copy ceiling."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row

FEW_SIZES = 2
TITLE = "Bandwidth per stage: compulsory bytes over time"
_BYTES, _RATE = Scale("compulsory bytes of a call (MB)", "log"), Scale("GB/s of compulsory bytes")


def draw(table: pd.DataFrame) -> Figure:
    """GB/s over compulsory bytes, one panel per bench, with confidence intervals; bars where there are few sizes."""
    benches = grouping.moving(table)
    if not benches:
        figure, (axes,) = style.canvas(1, 1, 12, 4)
        some = len(style.ok(table)) > 0
        style.empty(axes, "no bench that only moves data was measured" if some else style.why(table))
        return style.finish(figure, TITLE, table.iloc[:0])
    rows = _timed(table, benches)
    height = len(benches) // 3 + 1  # one panel is left for the legend
    figure, panels = style.canvas(height, 3, 12, 3.5 * height)
    for axes in panels[len(benches) :]:
        axes.set_axis_off()
    for axes, bench in zip(panels, benches, strict=False):
        part = rows[rows["bench"] == bench]
        if part.empty:
            style.empty(axes, style.why(table, bench))
            continue
        few = part["compulsory_bytes"].nunique() <= FEW_SIZES and not _far_below(part)
        (_bars if few else _points)(axes, part)
        axes.set(title=f"{bench} (n = {len(part)} rows)", ylabel="GB/s of compulsory bytes")
        _ceiling(axes, part)
    if not rows.empty:
        style.legend(panels[-1], rows["implementation"], loc="upper center", fontsize=9, title="implementation")
        panels[-1].text(
            0.5,
            -0.08,
            "error bars: 95 % CI of the median time\ndashed: median copy bandwidth measured\nin the same processes",
            ha="center",
            fontsize=8,
            transform=panels[-1].transAxes,
        )
    note = "one point or bar per row; in a panel, " + grouping.differing(rows, "rows", by=["bench", "implementation"])
    return style.finish(figure, TITLE, rows, note)


def chart(table: pd.DataFrame) -> Chart:
    """A point per row, with the interval of its time, in a panel per bench that only moves data; dashed: the median copy of all of them.

    A panel is logarithmic only where many of its own points lie far below the copy: it hides what tells kernels near the copy apart.
    """
    benches = grouping.moving(table)
    rows = _timed(table, benches) if benches else table.iloc[:0]
    if rows.empty:
        return nothing("points", _BYTES, _RATE, rows, style.why(table, *benches))
    far = [bench for bench in benches if _mostly_far_below(rows[rows["bench"] == bench])]
    labels = grouping.labels(rows)
    records = [
        {"panel": one["bench"], "series": one["implementation"], "x": one["compulsory_bytes"] / 1e6, "y": one["gb_per_s"], "low": low, "high": high, "says": says} | row(one)
        for bench in benches
        for _, one in rows[rows["bench"] == bench].iterrows()
        for low, high in [(one["compulsory_bytes"] / one[end] / 1e3 for end in ("ci_high_us", "ci_low_us"))]
        for says in [f"{labels[one.name]}, {one['share_of_copy']:.0%} of the copy"]
    ]  # fmt: skip
    copy = rows["copy_gb_per_s"].median()
    tints = {name: style.color(name) for name in style.ordered(rows["implementation"])}
    own = {bench: (_BYTES, Scale(_RATE.label, "log")) for bench in far}
    return Chart("points", _BYTES, _RATE, marks(records), tints, rows, None if np.isnan(copy) else float(copy), own=own)


def _timed(table: pd.DataFrame, benches: Iterable[str]) -> pd.DataFrame:
    """The rows of benches that have a bandwidth."""
    rows = style.ok(table, *benches)
    return rows[rows["gb_per_s"].notna() & (rows["compulsory_bytes"] > 0)]


def _rates(group: pd.DataFrame) -> list[np.ndarray]:
    low, high = (group["compulsory_bytes"] / group[end] / 1e3 for end in ("ci_high_us", "ci_low_us"))
    return style.bars(group["gb_per_s"], low, high)


def _points(axes: Axes, part: pd.DataFrame) -> None:
    for name, group in style.groups(part):
        axes.errorbar(
            group["compulsory_bytes"] / 1e6,
            group["gb_per_s"],
            yerr=_rates(group),
            alpha=0.8,
            color=style.color(name),
            elinewidth=1,
            **style.marker(name),
        )
    axes.set(xscale="log", xlabel="compulsory bytes of a call (MB)")
    style.plain_log(axes.xaxis)


def _bars(axes: Axes, part: pd.DataFrame) -> None:
    sizes, found = sorted(part["compulsory_bytes"].unique()), style.groups(part)
    width = 0.8 / len(found)
    for i, (name, group) in enumerate(found):
        repeat = group.groupby("compulsory_bytes").cumcount()
        at = group["compulsory_bytes"].map(sizes.index) + (i - (len(found) - 1) / 2) * width
        thin = width / (repeat.max() + 1)
        axes.bar(
            at + (repeat - repeat.max() / 2) * thin,
            group["gb_per_s"],
            thin * 0.9,
            yerr=_rates(group),
            color=style.color(name),
            error_kw={"elinewidth": 1},
        )
    axes.set_xticks(range(len(sizes)), [f"{size / 1e6:,.3g}" for size in sizes])
    axes.set(xlabel="compulsory bytes of a call (MB)")


def _far_below(part: pd.DataFrame) -> bool:
    """Whether the axis must be logarithmic, where a bar would have no length."""
    return bool(part["gb_per_s"].min() < part["copy_gb_per_s"].median() / 30)


def _mostly_far_below(part: pd.DataFrame) -> bool:
    """Whether a quarter of the points would lie on a linear axis's lowest thirtieth."""
    return bool(part["gb_per_s"].quantile(0.25) < part["copy_gb_per_s"].median() / 30)


def _ceiling(axes: Axes, part: pd.DataFrame) -> None:
    """The dashed line; a logarithmic axis where points lie far below it."""
    ceiling = part["copy_gb_per_s"].median()
    if np.isnan(ceiling):
        return
    axes.axhline(ceiling, ls="--", color="0.3", lw=1)
    if _far_below(part):
        axes.set_yscale("log")
        axes.set_ylim(top=3 * max(ceiling, part["gb_per_s"].max()))
        style.plain_log(axes.yaxis)
    else:
        axes.set_ylim(0, 1.15 * max(ceiling, part["gb_per_s"].max()))
    axes.annotate(
        f"copy {ceiling:,.0f} GB/s", (0.02, ceiling), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
    )
