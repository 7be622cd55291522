"""The look of the figures of training runs: colours by router, labels that never overlap, a footer."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from moe_routing_bench.figures import colors, style
from moe_routing_bench.figures.chart import Chart, Scale, marks
from moe_routing_bench.figures.quality_rows import NOT_CAUSAL, interval, ordered, over_tokens
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_bench.store.platforms import CPU
from moe_routing_kernels.routers.zoo import ZOO

_COLORS = colors.assigned(ZOO, [tuple(ZOO)])
_SHAPES = "ovsDP^*"
_LABEL = 6.5  # points
_PAPER = {"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 0.5}  # behind text that lines may cross


def nothing(title: str, rows: pd.DataFrame, reason: str, what: str = "training runs") -> Figure:
    """A figure that says why it is empty; hardware and versions are those of `rows`, where there are any."""
    figure, (axes,) = style.canvas(1, 1, 8, 4)
    style.empty(axes, reason)
    return finish(figure, title, rows, what=what)


def band(axes: Axes, x: np.ndarray, mean: np.ndarray, half: np.ndarray, tint: str, bands: int, line: str = "-") -> None:
    """A line with its interval; one of many bands is fainter, so that together they hide no line."""
    axes.plot(x, mean, color=tint, lw=1.2, ls=line, marker="o", ms=2.5)
    axes.fill_between(x, mean - half, mean + half, color=tint, alpha=min(0.15, 0.5 / bands), lw=0)


def curves(axes: Axes, rows: pd.DataFrame, column: str, least: float = -np.inf, dashed: bool = False) -> None:
    """`column` of each contestant over the bytes trained on, with bands and names; `dashed` for rules that are not causal."""
    ends, means = [], []
    for name, group in ordered(rows):
        tint = color(group["router"].iloc[0])
        x, mean, half = over_tokens(group, column)
        line = "--" if dashed and not group["causal"].all() else "-"
        band(axes, x, mean, half, tint, rows["contestant"].nunique(), line)
        ends.append((x[-1], mean[-1], name, tint))
        means += list(mean)
    frame(axes, y=means, least=least)
    axes.set_xlabel("bytes trained on (millions)")
    label(axes, ends)


def lines(contested: Sequence[tuple[str, pd.DataFrame]], column: str, x: Scale, y: Scale) -> Chart:
    """A chart of `column` over the bytes trained on (millions): a line per contestant through its means over seeds, with 95 % intervals."""
    records, tints = [], {}
    for title, rows in contested:
        for name, group in ordered(rows):
            tints[name] = color(group["router"].iloc[0])
            points = zip(*over_tokens(group, column), strict=True)
            records += [{"panel": title, "series": name, "x": at, "y": mean, "low": mean - half, "high": mean + half} for at, mean, half in points]  # fmt: skip
    return Chart("lines", x, y, marks(records), tints, pd.concat(rows for _, rows in contested))


def color(router: str) -> str:
    """Black for the dense model, grey for a router that is no longer in the zoo."""
    if router == DENSE:
        return "#000000"
    return _COLORS.get(router, colors.OTHER)


def marker(router: str, causal: bool = True) -> dict[str, Any]:
    """A second mark of identity beside the colour; hollow for a rule that is not causal."""
    if router == DENSE:
        return {"marker": "v", "ms": 9, "ls": ""}
    shape = _SHAPES[list(ZOO).index(router) % len(_SHAPES)] if router in ZOO else "o"
    return {"marker": shape, "ms": 5, "ls": ""} | ({} if causal else {"mfc": "white"})


def cross(axes: Axes, rows: pd.DataFrame, x: str, y: str, x_least: float = 0) -> tuple[float, float]:
    """The mean of one contestant in both columns with both 95 % intervals, at least `x_least` on each side of
    x; returns the mean."""
    (x_mean, x_half), (y_mean, y_half) = interval(rows[x]), interval(rows[y])
    x_half = max(x_half, x_least)
    router, causal = rows["router"].iloc[0], bool(rows["causal"].iloc[0])
    axes.errorbar(x_mean, y_mean, xerr=x_half, yerr=y_half, color=color(router), elinewidth=1, **marker(router, causal))
    return x_mean, y_mean


def paired(axes: Axes, rows: pd.DataFrame, key: str, names: Sequence[str], column: str) -> None:
    """Runs of one rule by what `key` says of them: a grey line per seed, and means with their 95 % intervals in words, too."""
    by_seed = rows.pivot_table(index="seed", columns=key, values=column)[list(names)]
    router, causal = rows["router"].iloc[0], bool(rows["causal"].iloc[0])
    for values in by_seed.to_numpy():
        axes.plot(range(len(names)), values, color="0.75", lw=1, marker=".", ms=3)
    for at, name in enumerate(names):
        mean, half = interval(by_seed[name])
        axes.errorbar(at, mean, yerr=half, color=color(router), capsize=3, **marker(router, causal))
        text = f"{mean:.3f} ± {half:.3f}\nn = {by_seed[name].notna().sum()}"
        axes.annotate(text, (at, mean), (7, 0), textcoords="offset points", fontsize=7, va="center", bbox=_PAPER)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.3, len(names) - 0.3)


def frame(axes: Axes, x: Sequence[float] = (), y: Sequence[float] = (), least: float = -np.inf) -> None:
    """Limits around means: the interval of one contestant with few seeds may run out of the panel, and hides no other."""
    for values, get, put, bound in (
        (x, axes.get_xlim, axes.set_xlim, -np.inf),
        (y, axes.get_ylim, axes.set_ylim, least),
    ):
        if len(values) and (span := max(values) - min(values)) > 0:
            low, high = get()
            put(max(low, min(values) - 0.6 * span, bound), min(high, max(values) + 0.6 * span))


def label(axes: Axes, points: Sequence[tuple[float, float, str, str]], left: bool = False) -> None:
    """Names beside the panel, to its right or `left`, one under the other, each joined to its point by a line: (x, y, name, color).

    Call it when the scales of the axes are set.
    """
    if not points:
        return
    axes.get_xlim(), axes.get_ylim()  # settles limits that are still to be derived from the data
    grid = axes.get_subplotspec()
    rows = grid.get_gridspec().nrows if grid else 1
    gap = 1.25 * _LABEL / (72 * axes.get_figure().get_size_inches()[1] / rows * 0.72)
    at = [axes.transLimits.transform(axes.transScale.transform(one[:2]))[1] for one in points]
    order = np.argsort(at, kind="stable")
    steps = gap * np.arange(len(points))
    spread = isotonic_regression(np.array(at)[order] - steps).x + steps  # nearest heights that keep the gap
    beside, ha, relpos = (-0.04, "right", (1, 0.5)) if left else (1.04, "left", (0, 0.5))
    spread += max(0.0, -spread[0]) - max(0.0, spread[-1] - max(1.0, steps[-1]))
    for number, height in zip(order, spread, strict=True):
        x, y, name, tint = points[number]
        axes.annotate(
            name, (x, y), (beside, height), "data", "axes fraction", fontsize=_LABEL, va="center", ha=ha, color="0.1", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "alpha": 0.6, "color": tint, "shrinkA": 1, "shrinkB": 2, "relpos": relpos},
        )  # fmt: skip


def panels(
    contests: Sequence[tuple[str, pd.DataFrame]], columns: int, width: float, height: float
) -> tuple[Figure, list[Axes], Iterator[tuple[str, pd.DataFrame, list[Axes]]]]:
    """A row of panels per contest, or two contests per row where each has one panel; `width` and `height` are those of a contest.

    Without a contest a single panel, to say why, and nothing to iterate over.
    """
    if not contests:
        figure, axes = style.canvas(1, 1, 8, 4)
        return figure, axes, iter(())
    across = 2 if columns == 1 and len(contests) > 1 else 1
    rows = -(-len(contests) // across)
    figure, axes = style.canvas(rows, columns * across, width * across, height * rows)
    for spare in axes[len(contests) * columns :]:
        spare.set_axis_off()
    own = (axes[i * columns : (i + 1) * columns] for i in range(len(contests)))
    return figure, axes, ((title, group, row) for (title, group), row in zip(contests, own, strict=True))


def finish(
    figure: Figure, title: str, rows: pd.DataFrame, note: str = "", timed: bool = False, what: str = "training runs"
) -> Figure:
    """Title above, provenance below: hardware, versions, days, numbers of runs. `timed`: the figure shows a speed."""
    cpu = timed and not rows.empty and (rows["platform"] == CPU).all()
    return style.captioned(figure, title, cpu, " | ".join(filter(None, [provenance(rows, what), note])))


def provenance(rows: pd.DataFrame, what: str) -> str:
    """Hardware, torch, days and counts of the runs shown."""
    if rows.empty:
        return f"no {what}"
    machine, torch, days = (
        style.distinct(rows["device"]),
        style.distinct(rows["torch_version"]),
        style.days(rows["ended_at"]),
    )
    seen = "" if rows["causal"].all() else f" | {NOT_CAUSAL} sees later tokens: not ranked with the others"
    drawn = "means over seeds, 95 % CI by Student's t"
    if rows["seed"].nunique() == 1:
        drawn = "one seed: no intervals over seeds, differences may be chance"
    return f"{machine} | torch {torch} | {days} | n = {rows['run'].nunique()} {what.split()[-1]} | {drawn}{seen}"
