"""Charts for paper, as SVG and PNG: panels, a legend, and a line that says where the numbers come from; and the chart of the scale model."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from moe_routing_bench.figures import Figure as Entry
from moe_routing_bench.figures import footer
from moe_routing_bench.figures.chart import Chart, legend_of_doubts
from moe_routing_bench.figures.panels import marker, name_series, panel, share

matplotlib.rcParams |= sns.axes_style("ticks", rc={"axes.grid": True, "grid.color": "0.9"})
matplotlib.rcParams |= {
    "svg.hashsalt": "moe-routing-bench",  # ids are drawn from it, so that equal numbers give equal files
    "text.hinting": "none",  # letters as wide in pixels as in the layout, which is that of the SVG
    "font.size": 9,
    "patch.force_edgecolor": False,
}
_DOTS, _POINTS = 150, 72  # per inch, of a PNG and of an SVG
_PLACES = 12  # decimals of a panel's place
_LETTERS = 105  # in a line of what an empty figure says
_ACROSS = {"lines": 3, "points": 2, "dots": 1, "bars": 1, "matrix": 1}
_SCALED = {"layer_us": "even loads", "drawn_us": "drawn", "planned_us": "drawn, planned placement"}
_WITH_INTERVALS = ("lines", "points", "dots")


def draw(entry: Entry, table: pd.DataFrame) -> Figure:
    """A figure of the report, from the table of its source."""
    return drawn(entry.chart(table), entry.title, entry.source)


def drawn(chart: Chart, title: str, source: str = "measurements") -> Figure:
    """One panel after the other with a legend at the right, and below where the numbers come from; `source` as in `Figure`."""
    if chart.marks.empty:
        figure, (axes,) = canvas(1, 1, 9, 3)
        _empty(axes, chart.reason)
        return _finished(figure, chart, title, source)
    groups = [(str(name), group) for name, group in chart.marks.groupby("panel", sort=False)]
    across = min(_across(chart, len(groups)), len(groups))
    down = -(-len(groups) // across)
    tall = 4.2 if chart.named else 3.1
    heights = [_height(chart, group) for _, group in groups] if across == 1 else [tall] * down
    alone = 12 if chart.marks["aside"].notna().any() else 10
    width = alone if across == 1 else 1.5 + (6.2 if chart.named else 4.2) * across
    letters = _letters(chart, width) if across == 1 else 110 // across
    figure, panels = canvas(down, across, width, sum(heights) + 1.4, height_ratios=heights)
    for axes, (name, group) in zip(panels, groups, strict=False):
        axes.set_title(textwrap.fill(name, letters, break_on_hyphens=False), fontsize=8, loc="left")
        panel(axes, chart, group)
    if chart.shared:
        share(0, [(axes, chart.scales(name)[0]) for axes, (name, _) in zip(panels, groups, strict=False)])
    if chart.level:
        share(1, [(axes, chart.scales(name)[1]) for axes, (name, _) in zip(panels, groups, strict=False)])
    if chart.named:
        for axes, (_, group) in zip(panels, groups, strict=False):
            name_series(axes, chart, group)
    for spare in panels[len(groups) :]:
        spare.set_axis_off()
    if not chart.named:
        figure.legend(handles=_handles(chart), loc="outside right upper", fontsize=7, frameon=False)
    return _finished(figure, chart, title, source)


def canvas(rows: int, columns: int, width: float, height: float, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its axes in reading order; sizes in inches, `grid` are arguments of ``Figure.subplots``, such as height_ratios."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def _empty(axes: Axes, reason: str) -> None:
    """Say that there is nothing to draw, and why."""
    axes.set_axis_off()
    text = textwrap.fill(f"no data: {reason}", _LETTERS)
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def _letters(chart: Chart, width: float) -> int:
    """How many letters a line of a panel's title has room for, between names on the left and the legend."""
    taken = max(map(len, chart.colors), default=0) * (not chart.named)
    if chart.y.kind == "names":
        taken += max(len(str(name)) for name in chart.marks["y"])
    return min(110, int((72 * width - 0.58 * 7 * taken - 52) / (0.58 * 8)))


def _across(chart: Chart, panels: int) -> int:
    """How many panels stand in a row."""
    if not chart.named:
        return _ACROSS[chart.kind]
    return 3 if chart.kind == "lines" and panels % 3 == 0 else 2


def _height(chart: Chart, group: pd.DataFrame) -> float:
    """Inches of a panel: a line per name on the left."""
    return 0.7 + 0.24 * group["y"].nunique() if chart.y.kind == "names" else 3.1


def _handles(chart: Chart) -> list[Line2D | Patch]:
    """The legend, in the order of the chart's colours."""
    if chart.kind in ("bars", "matrix"):
        return [Patch(color=tint, label=name) for name, tint in chart.colors.items()]
    return [
        Line2D([], [], color=tint, marker=marker(chart, name), ls="", ms=5, label=name)
        for name, tint in chart.colors.items()
    ]


def _finished(figure: Figure, chart: Chart, title: str, source: str) -> Figure:
    """Title above, with a caution where times are of a CPU; below where the numbers come from, the chart's note, and what bars mean."""
    sns.despine(figure)
    column, what = ("x_low", "lines at the ends of bars") if chart.kind == "bars" else ("low", "bars")
    known = chart.kind in ("bars", *_WITH_INTERVALS) and chart.marks[column].notna().any()
    said = f"{what}: 95 % confidence intervals of the medians" * bool(known and source == "measurements")
    caution = " (CPU: only ratios are meaningful)" * bool(chart.timed and footer.on_cpu(source, chart.shown))
    figure.suptitle(title + caution, fontweight="bold")
    letters = int(figure.get_size_inches()[0] * 72 / (0.58 * 7))
    notes = (footer.line(source, chart.shown), "; ".join(filter(None, (chart.note, said, legend_of_doubts(chart)))))
    lines = [line for note in notes for line in textwrap.wrap(note, letters)]
    figure.supxlabel("\n".join(lines), fontsize=7, color="0.35")
    return figure


def save(figure: Figure, svg: Path, png: Path) -> None:
    """Write both formats, which have one layout; equal numbers give equal files."""
    _save_svg(figure, svg)
    _save_png(figure, png)


def _save_svg(figure: Figure, path: Path) -> None:
    """Write an SVG, and keep its layout for other formats: finding one draws all texts, which takes half of the time. The last bits of a layout
    differ from run to run, and matplotlib derives ids from the places of panels, so these are rounded."""
    svg = FigureCanvasSVG(figure)
    figure.set_dpi(_POINTS)
    if engine := figure.get_layout_engine():
        engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(place, _PLACES) for place in axes.get_position(original=True).bounds])
    svg.print_svg(path, metadata={"Date": None})


_PREVIEW = (8.0, 4.2)  # inches: 1200 by 630 pixels, which is what pages of others show of a link


def preview(chart: Chart, title: str, png: Path) -> None:
    """Write a picture of a chart of one panel, small enough to be shown next to a link."""
    figure, (axes,) = canvas(1, 1, *_PREVIEW)
    panel(axes, chart, chart.marks)
    figure.suptitle(title, fontweight="bold", fontsize=13)
    axes.set_title(str(chart.marks["panel"].iloc[0]), fontsize=9, loc="left")
    figure.legend(handles=_handles(chart), loc="outside right center", fontsize=9, frameon=False)
    sns.despine(figure)
    if notes := legend_of_doubts(chart):
        figure.supxlabel(notes, fontsize=8, color="0.35")
    _save_png(figure, png)


def _save_png(figure: Figure, png: Path) -> None:
    figure.set_dpi(_DOTS)
    pixels = FigureCanvasAgg(figure)
    pixels.draw()  # once, where `savefig` draws twice
    image = Image.fromarray(np.asarray(pixels.buffer_rgba())).convert("RGB")
    # 256 colours are enough for lines and letters, and a third of the bytes: published pictures are kept in the repository
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(png, format="png", optimize=True)


def scaling(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rows of the scale model (EP, times and errors) as an SVG: layer time over expert-parallel ranks. A bar is the median error of the validating tables, the band the 90th percentile."""
    shown = sorted((row for row in rows if row["tp"] == 1), key=lambda row: row["ep"])
    figure, (axes,) = canvas(1, 1, 7, 4)
    for column, name in _SCALED.items():
        points = [row for row in shown if row[column] is not None]
        places, times = [row["ep"] for row in points], [row[column] for row in points]
        (line,) = axes.plot(places, times, marker="o", markersize=3, label=name)
        sure = [row for row in points if row["error_median"] is not None]
        for row in sure:
            error = row[column] * row["error_median"]
            axes.errorbar(row["ep"], row[column], error, color=line.get_color(), capsize=2, linewidth=1)
        if column == "drawn_us":
            edges = [[row[column] * (1 + sign * min(row["error_p90"], 0.99)) for row in sure] for sign in (-1, 1)]
            axes.fill_between([row["ep"] for row in sure], *edges, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="expert-parallel ranks", ylabel="layer time, modelled (µs)")
    axes.set_xticks([row["ep"] for row in shown], [str(row["ep"]) for row in shown])
    axes.minorticks_off()
    one = shown[0]
    axes.set_title(
        f"{one['model']}, {one['gpus']} GPUs, {one['tokens']} tokens of each, skew {one['skew']:g}",
        fontsize=8,
        loc="left",
    )
    axes.legend(fontsize=7, frameon=False)
    _save_svg(figure, path)
