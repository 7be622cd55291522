"""A chart for paper: the same marks and colours as on the page, drawn by matplotlib."""

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from moe_routing_bench.figures import style
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_kernels.routers.zoo import ZOO

_LABEL = 0.14  # share of an axis that the label of a number of tokens takes, with a gap
_WITH_BARS = ("lines", "points", "dots")
_ACROSS = {"lines": 3, "points": 2, "dots": 1, "bars": 1, "matrix": 1}
# matplotlib's marks and what Observable Plot calls the like
SHAPES = {"o": "circle", "v": "triangle2", "s": "square", "D": "diamond2", "P": "cross", "^": "triangle", "*": "star"}
_PLACES = {name: i for names in (style.COLORS, ZOO) for i, name in enumerate(names)} | {
    DENSE: list(SHAPES).index("v")
}  # not that of a router whose colour is nearly black


def draw(chart: Chart, title: str, note: str = "", provenance: str = "") -> Figure:
    """One panel after the other, a legend above, and the line on where the numbers come from: `provenance`, or that of measured rows."""
    if chart.marks.empty:
        figure, (axes,) = style.canvas(1, 1, 9, 3)
        style.empty(axes, chart.reason)
        return _finish(figure, title, chart, note, provenance)
    found = [(str(name), group) for name, group in chart.marks.groupby("panel", sort=False)]
    across = min(_ACROSS[chart.kind], len(found))
    down = -(-len(found) // across)
    heights = [_height(chart, group) for _, group in found] if across == 1 else [3.1] * down
    width = 10 if across == 1 else 1.5 + 4.2 * across
    figure, panels = style.canvas(down, across, width, sum(heights) + 1.4, height_ratios=heights)
    for axes, (name, group) in zip(panels, found, strict=False):
        _panel(axes, chart, group)
        axes.set_title(textwrap.fill(name, 110 // across, break_on_hyphens=False), fontsize=8, loc="left")
    for spare in panels[len(found) :]:
        spare.set_axis_off()
    figure.legend(handles=_handles(chart), loc="outside right upper", fontsize=7, frameon=False)
    return _finish(figure, title, chart, note, provenance)


def _finish(figure: Figure, title: str, chart: Chart, note: str, provenance: str) -> Figure:
    """Title and footer."""
    if provenance:
        return style.captioned(figure, title, False, provenance, note)
    column, what = ("x_low", "lines at the ends of bars") if chart.kind == "bars" else ("low", "bars")
    known = chart.kind in ("bars", *_WITH_BARS) and chart.marks[column].notna().any()
    said = f"{what}: 95 % confidence intervals of the medians" * bool(known)
    return style.finish(figure, title, chart.shown, "; ".join(filter(None, (note, said))))


def _height(chart: Chart, group: pd.DataFrame) -> float:
    """Inches of a panel: a line per name on the left."""
    return 0.7 + 0.24 * group["y"].nunique() if chart.y.kind == "names" else 3.1


def _handles(chart: Chart) -> list[Line2D | Patch]:
    if chart.kind in ("bars", "matrix"):
        return [Patch(color=tint, label=name) for name, tint in chart.colors.items()]
    return [
        Line2D([], [], color=tint, marker=shape(chart, name), ls="", ms=5, label=name)
        for name, tint in chart.colors.items()
    ]


def shape(chart: Chart, name: str) -> str:
    """The mark of a series beside its colour: of an implementation and a router the same in every chart."""
    place = _PLACES.get(name.split("+")[0].split(" ")[0], list(chart.colors).index(name))
    return list(SHAPES)[place % len(SHAPES)]


def ratio(value: float) -> str:
    """A ratio in few letters, for a cell of a matrix."""
    if value >= 10:
        return (f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".removesuffix(".")) + "x"
    return (f"{value:.2f}" if value >= 0.01 else f"{value:.1g}") + "x"


def _panel(axes: Axes, chart: Chart, group: pd.DataFrame) -> None:
    names = {which: list(dict.fromkeys(group[which])) for which in ("x", "y")}
    if chart.kind == "matrix":
        _matrix(axes, chart, group, names)
    elif chart.kind == "bars":
        for mark in group.itertuples():
            place = names["y"].index(mark.y)
            axes.barh(place, mark.high - mark.low, left=mark.low, color=chart.colors[mark.series])
            if pd.notna(mark.x_low):
                axes.errorbar(mark.high, place, xerr=[[mark.high - mark.x_low], [mark.x_high - mark.high]], color="0.1", elinewidth=1, capsize=2)  # fmt: skip
    else:
        for name, mine in group.groupby("series", sort=False):
            _series(axes, chart, str(name), mine, names["y"])
    if (reference := chart.reference_in(str(group["panel"].iloc[0]))) is not None:
        (axes.axvline if chart.kind in ("dots", "bars") else axes.axhline)(
            reference, color="0.3", lw=1, ls="--", zorder=0
        )
    if chart.y.kind == "names":
        axes.set_yticks(range(len(names["y"])), names["y"], fontsize=7)
        axes.set_ylim(len(names["y"]) - 0.4, -0.6)
        axes.grid(False, axis="y")
    _scale(axes, *chart.scales(str(group["panel"].iloc[0])), [] if chart.x.kind == "names" else list(group["x"]))


def _series(axes: Axes, chart: Chart, name: str, mine: pd.DataFrame, names: list[str]) -> None:
    """One series: its points with their intervals, and lines through them."""
    known = mine.astype(dict.fromkeys(("x_low", "x_high", "low", "high"), float))
    look = {"color": chart.colors[name], "marker": shape(chart, name), "ms": 4, "elinewidth": 1, "ls": ""}
    y = known["y"].map(names.index) if chart.y.kind == "names" else known["y"].astype(float)
    x = known["x"].astype(float)
    if chart.kind == "dots":
        axes.errorbar(x, y, xerr=style.bars(x, known["low"], known["high"]), alpha=0.9, **look)
        return
    sides = style.bars(x, known["x_low"], known["x_high"]) if known["x_low"].notna().any() else None
    axes.errorbar(x, y, yerr=style.bars(y, known["low"], known["high"]), xerr=sides, **look)
    if chart.kind == "lines":
        for _, line in known.groupby(known["join"].astype(object).fillna(""), sort=False):
            ordered = line.sort_values("x")
            axes.plot(ordered["x"].astype(float), ordered["y"].astype(float), color=chart.colors[name], lw=1.2)


def _matrix(axes: Axes, chart: Chart, group: pd.DataFrame, names: dict[str, list[str]]) -> None:
    """Cells in the colours of their series, with what they say."""
    for mark in group.itertuples():
        at = names["x"].index(mark.x), names["y"].index(mark.y)
        axes.text(*at, mark.says, ha="center", va="center", fontsize=6, color="white", bbox={"facecolor": chart.colors[mark.series], "lw": 0, "pad": 2})  # fmt: skip
    axes.set_xticks(range(len(names["x"])), names["x"], fontsize=7, rotation=35, ha="right")
    axes.set_xlim(-0.6, len(names["x"]) - 0.4)
    axes.grid(False)


def _apart(counts: Sequence[float], low: float, high: float) -> list[float]:
    """The numbers whose labels have room on a logarithmic axis between the logarithms of its ends, preferably the largest."""
    kept: list[float] = []
    for one in sorted(set(counts), reverse=True):
        if not kept or np.log(kept[-1] / one) >= _LABEL * (high - low):
            kept.append(one)
    return kept[::-1]


def _scale(axes: Axes, x: Scale, y: Scale, counts: Sequence[float]) -> None:
    for scale, axis, put, limits in ((x, axes.xaxis, axes.set_xscale, axes.get_xlim), (y, axes.yaxis, axes.set_yscale, axes.get_ylim)):  # fmt: skip
        if scale.kind != "names":
            axis.set_label_text(scale.label, fontsize=8)
        if scale.kind == "log" and np.isfinite(limits()).all():
            put("log")
            style.plain_log(axis)
        if scale.label == TOKENS and scale.kind == "log":
            axis.set_major_locator(FixedLocator(_apart(counts, *np.log(limits()))))
            axis.set_minor_locator(NullLocator())
