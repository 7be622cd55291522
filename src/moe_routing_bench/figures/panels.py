"""One panel of a chart on paper, by matplotlib: the same marks, symbols and colours as on the page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from moe_routing_bench.figures.chart import DOUBTFUL, TOKENS, WARM, Chart, Scale, look
from moe_routing_bench.figures.palette import OTHER, symbols

# What Observable Plot and matplotlib call the same symbol
MARKERS = {
    "circle": "o",
    "triangle2": "v",
    "square": "s",
    "diamond2": "D",
    "cross": "P",
    "triangle": "^",
    "star": "*",
    "hexagon": "h",
}
_LABEL = 0.5  # inches that the label of a number of tokens takes, with a gap
_AXIS = 0.75  # share of a panel's width that its axis takes, next to labels and names
_LETTERS = 6.5  # points of a name next to a panel
_PALE = 0.38  # opacity of bars and cells whose time is doubtful, on which dark letters have a contrast of 4.5:1
_ROOM = 0.05  # share of a bar's axis that its text needs
_PAPER = {"facecolor": "white", "alpha": 0.7, "lw": 0, "pad": 0.5}  # behind a text that lines may cross
Names = Mapping[str, list[str]]


def marker(chart: Chart, name: str) -> str:
    """matplotlib's marker of a series."""
    return MARKERS[symbols(chart.colors)[name]]


def panel(axes: Axes, chart: Chart, group: pd.DataFrame) -> None:
    """Draw the marks of one panel."""
    title = str(group["panel"].iloc[0])
    x, y = chart.scales(title)
    names = {which: list(dict.fromkeys(group[which])) for which in ("x", "y")}
    if chart.kind == "matrix":
        _matrix(axes, chart, group, names)
    elif chart.kind == "bars":
        _bars(axes, chart, group, names["y"])
    else:
        for name, marks in group.groupby("series", sort=False):
            _series(axes, chart, str(name), marks, (x, y), names)
        if chart.kind == "points":
            _fronts(axes, group)
    if (reference := chart.reference_in(title)) is not None:
        across = axes.axvline if chart.kind in ("dots", "bars") else axes.axhline
        across(reference, color="0.3", lw=1, ls="--", zorder=0)
    if y.kind == "names":
        _lines_of_names(axes, group, names["y"])
    if x.kind == "names" and chart.kind != "matrix":
        axes.set_xticks(range(len(names["x"])), names["x"], fontsize=7)
        axes.set_xlim(-0.4, len(names["x"]) - 0.6)
    _scales(axes, x, y, group)


def _series(
    axes: Axes, chart: Chart, name: str, marks: pd.DataFrame, scales: tuple[Scale, Scale], names: Names
) -> None:
    """One series: its points with their intervals, lines through them, and their texts."""
    known = marks.astype(dict.fromkeys(("x_low", "x_high", "low", "high"), float))
    x, y = (_places(known[which], scale, names[which]) for which, scale in zip("xy", scales, strict=True))
    color = chart.colors[name]
    alpha = 0.4 if color == OTHER else 0.9  # a series without a colour of its own is a background
    drawn = {"color": color, "elinewidth": 1, "ls": "", "alpha": alpha, "marker": ""}
    if chart.kind == "dots":
        axes.errorbar(x, y, xerr=_sides(x, known["low"], known["high"]), **drawn)
        _points(axes, chart, name, known.assign(x=x, y=y), alpha)
        return
    banded = chart.kind == "lines" and chart.named
    sides = _sides(x, known["x_low"], known["x_high"]) if known["x_low"].notna().any() else None
    axes.errorbar(x, y, yerr=None if banded else _sides(y, known["low"], known["high"]), xerr=sides, **drawn)
    _points(axes, chart, name, known.assign(x=x, y=y), alpha)
    for at, up, text in zip(x, y, known["text"], strict=True):
        if isinstance(text, str):
            axes.annotate(text, (at, up), (6, 3), textcoords="offset points", fontsize=6.5, color="0.2", bbox=_PAPER)
    if chart.kind == "lines":
        for _, index in known["join"].astype(object).fillna("").groupby(known["join"].astype(object).fillna("")):
            order = x[index.index].sort_values(kind="stable").index
            axes.plot(x[order], y[order], color=color, lw=1.2, alpha=alpha)
            if banded and len(order) > 1:
                low, high = (known.loc[order, end] for end in ("low", "high"))
                axes.fill_between(x[order], low, high, color=color, alpha=min(0.15, 0.5 / len(chart.colors)), lw=0)


def _points(axes: Axes, chart: Chart, name: str, marks: pd.DataFrame, alpha: float) -> None:
    """The points of a series: hollow where the time is doubtful, small where the cache may be warm."""
    color = chart.colors[name]
    looks = marks["doubt"].map(lambda doubt: look(chart, doubt))
    for kind, found in marks.groupby(looks, sort=False):
        face, size = ("white" if kind == DOUBTFUL else color), (2.2 if kind == WARM else 4)
        style = {"marker": marker(chart, name), "ls": "", "ms": size, "mfc": face, "mec": color, "alpha": alpha}
        axes.plot(found["x"], found["y"], **style)


def _places(values: pd.Series, scale: Scale, names: Sequence[str]) -> pd.Series:
    """Where values lie on an axis: names in their order."""
    return values.map(names.index).astype(float) if scale.kind == "names" else values.astype(float)


def _sides(middle: pd.Series, low: pd.Series, high: pd.Series) -> list[np.ndarray]:
    """Lengths of error bars below and above; none where an end is missing."""
    return [np.nan_to_num(length.clip(lower=0).to_numpy(float)) for length in (middle - low, high - middle)]


def _fronts(axes: Axes, group: pd.DataFrame) -> None:
    """Steps through the points of each front: from each where less is better along x, else up to each."""
    for _, points in group[group["join"].notna()].groupby("join"):
        front = points.astype({"x": float, "y": float}).sort_values("x")
        rising = front["y"].iloc[-1] > front["y"].iloc[0]
        axes.step(front["x"], front["y"], where="pre" if rising else "post", color="0.2", lw=1, ls="--")


def _bars(axes: Axes, chart: Chart, group: pd.DataFrame, names: Sequence[str]) -> None:
    """Bars from low to high with their texts, and the intervals at their ends."""
    most = float(group["high"].astype(float).max())
    for mark in group.itertuples():
        place = names.index(mark.y)
        axes.barh(
            place, mark.high - mark.low, left=mark.low, color=chart.colors[mark.series], **_pale(chart, mark.doubt)
        )
        if isinstance(mark.text, str) and mark.high - mark.low > _ROOM * most:
            ink = _ink(chart, mark.doubt)
            axes.text((mark.low + mark.high) / 2, place, mark.text, ha="center", va="center", fontsize=7, color=ink)
        if pd.notna(mark.x_low):
            ends = [[mark.high - mark.x_low], [mark.x_high - mark.high]]
            axes.errorbar(mark.high, place, xerr=ends, color="0.1", elinewidth=1, capsize=2)


def _pale(chart: Chart, doubt: object) -> dict[str, Any]:
    """How a bar of a doubtful or warm time is drawn."""
    kind = look(chart, doubt)
    return (
        {"alpha": _PALE}
        if kind == DOUBTFUL
        else {"hatch": "///", "edgecolor": "white", "lw": 0}
        if kind == WARM
        else {}
    )


def _ink(chart: Chart, doubt: object) -> str:
    """The colour of a text in a bar or cell."""
    return "0.1" if look(chart, doubt) == DOUBTFUL else "white"


def _matrix(axes: Axes, chart: Chart, group: pd.DataFrame, names: Names) -> None:
    """Cells in the colours of their series, with what they say where it has room."""
    across = len(names["x"])
    roomy = across <= 40
    for mark in group.itertuples():
        at = names["x"].index(mark.x), names["y"].index(mark.y)
        pale = {"alpha": _PALE} if look(chart, mark.doubt) == DOUBTFUL else {}
        axes.barh(at[1], 0.96, left=at[0] - 0.48, height=0.9, color=chart.colors[mark.series], **pale)
        if roomy:
            size = 6 if across <= 20 else 4
            warm = "‡" * (look(chart, mark.doubt) == WARM)
            ink = _ink(chart, mark.doubt)
            axes.text(*at, mark.says + warm, ha="center", va="center", fontsize=size, color=ink)
    axes.set_xticks(range(across), names["x"], fontsize=7, rotation=35, ha="right")
    axes.set_xlim(-0.6, across - 0.4)
    axes.grid(False)


def _lines_of_names(axes: Axes, group: pd.DataFrame, names: Sequence[str]) -> None:
    """The names at the left of their lines, and what stands at the right of them."""
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    for name, text in group.dropna(subset="aside").drop_duplicates("y")[["y", "aside"]].itertuples(index=False):
        place = (1.01, names.index(name))
        axes.annotate(text, place, xycoords=("axes fraction", "data"), fontsize=7, va="center")


def _scales(axes: Axes, x: Scale, y: Scale, group: pd.DataFrame) -> None:
    """Labels, limits and ticks of both axes."""
    for which, scale, axis in (("x", x, axes.xaxis), ("y", y, axes.yaxis)):
        if scale.kind == "names":
            continue
        axis.set_label_text(scale.label, fontsize=8)
        put, limits = (getattr(axes, f"{verb}_{which}{noun}") for verb, noun in (("set", "scale"), ("get", "lim")))
        if scale.kind == "log" and np.isfinite(limits()).all():
            put("log")
            plain_log(axis)
        elif scale.kind == "linear":
            _framed(axes, which, group)
            axis.set_major_formatter(_short)
        if scale.label == TOKENS and scale.kind == "log":
            columns = grid.get_gridspec().ncols if (grid := axes.get_subplotspec()) else 1
            room = _LABEL * columns / (_AXIS * axes.get_figure().get_size_inches()[0])
            axis.set_major_locator(FixedLocator(_apart(list(group[which]), room, *np.log(limits()))))
            axis.set_minor_locator(NullLocator())


def _framed(axes: Axes, which: str, group: pd.DataFrame) -> None:
    """Limits of a linear axis: around the means, because one wide interval would hide all others; from 0 where some lie near it."""
    get, put = (getattr(axes, f"{verb}_{which}lim") for verb in ("get", "set"))
    middles = pd.to_numeric(group[which], errors="coerce").dropna()
    if middles.empty:
        return
    (low, high), span = sorted(get()), float(middles.max() - middles.min())
    if which == "y" and span > 0:
        low, high = max(low, middles.min() - 0.6 * span), min(high, middles.max() + 0.6 * span)
    if middles.min() == 0:
        high = high if middles.max() > 0 else 1.0
        low = -0.03 * high
    elif 0 < middles.min() < 0.25 * middles.max():
        low = 0.0
    put(low, high)


def _short(value: float, _: int) -> str:
    """A tick of a linear axis; of thousands and millions in few letters."""
    size, digits = abs(value), f"{value:.9g}"
    return f"{value / 1e6:g} M" if size >= 1e6 else f"{value / 1e3:g} k" if size >= 1e4 else digits


def plain_log(axis: Axis) -> None:
    """Ticks 1, 2, 5 per decade as plain numbers on a logarithmic axis that spans few decades; one upright has room for more."""
    low, high = sorted(axis.get_view_interval())
    most = 3000 if axis.axis_name == "y" else 300
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / max(low, 1e-300) < most else (1,)))
    if high / max(low, 1e-300) < 5:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter("{x:,.9g}")
    axis.set_minor_formatter(NullFormatter())


def _apart(counts: Sequence[float], room: float, low: float, high: float) -> list[float]:
    """The numbers whose labels have room, a share of a logarithmic axis between the logarithms of its ends, preferably the largest."""
    kept: list[float] = []
    for number in sorted(set(counts), reverse=True):
        if not kept or np.log(kept[-1] / number) >= room * (high - low):
            kept.append(number)
    return kept[::-1]


def name_series(axes: Axes, chart: Chart, group: pd.DataFrame) -> None:
    """Names at the right of a panel whose limits are final, one under the other in the order of the points: joined to the ends of lines, or with the mark of a point."""
    last = group.astype({"x": float, "y": float}).sort_values("x", kind="stable").groupby("series", sort=False).tail(1)
    axes.get_xlim(), axes.get_ylim()  # settles limits that are still to be derived from the data
    grid = axes.get_subplotspec()
    rows = grid.get_gridspec().nrows if grid else 1
    gap = 1.25 * _LETTERS / (72 * axes.get_figure().get_size_inches()[1] / rows * 0.72)
    points = last[["x", "y"]].to_numpy()
    at = axes.transLimits.transform(axes.transScale.transform(points))[:, 1]
    from scipy.optimize import isotonic_regression  # takes half a second to import, and few figures need it

    order, steps = np.argsort(at, kind="stable"), gap * np.arange(len(points))
    spread = isotonic_regression(at[order] - steps).x + steps  # nearest heights that keep the gap
    spread += max(0.0, -spread[0]) - max(0.0, spread[-1] - max(1.0, steps[-1]))
    for number, height in zip(order, spread, strict=True):
        name = str(last["series"].iloc[number])
        place, at_end = (1.04, height), chart.kind == "lines"
        if at_end:
            line = {"arrowstyle": "-", "lw": 0.5, "alpha": 0.6, "color": chart.colors[name], "relpos": (0, 0.5)}
            more = {"arrowprops": line | {"shrinkA": 1, "shrinkB": 2}}
        else:  # lines from points at different places would cross: the name has the mark of its point instead
            look = {"color": chart.colors[name], "marker": marker(chart, name), "ms": 4, "ls": "", "clip_on": False}
            axes.plot([1.02], [height], transform=axes.transAxes, **look)
            more = {}
        axes.annotate(
            name,
            tuple(points[number]) if at_end else place,
            place,
            "data" if at_end else "axes fraction",
            "axes fraction",
            fontsize=_LETTERS,
            va="center",
            color="0.1",
            annotation_clip=False,
            **more,
        )


def share(which: int, panels: Sequence[tuple[Axes, Scale]]) -> None:
    """Give panels of one scale the same limits of x (0) or y (1), so that lengths in them may be compared."""
    for scale in {scale for _, scale in panels if scale.kind != "names"}:
        mine = [axes for axes, other in panels if other == scale]
        ends = [end for axes in mine for end in (axes.get_xlim, axes.get_ylim)[which]()]
        for axes in mine:
            (axes.set_xlim, axes.set_ylim)[which](min(ends), max(ends))
            if scale.kind == "log" and scale.label != TOKENS:
                plain_log((axes.xaxis, axes.yaxis)[which])
