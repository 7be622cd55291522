"""Speed-up of every implementation over the baseline of its cell, shape by shape."""

import pandas as pd
import seaborn as sns
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.verdicts import SAME, UNDECIDED
from moe_routing_bench.figures import grouping, plain, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.quantities import count

MOST_SHAPES = 25
FASTER, SLOWER, UNSURE = "faster than the baseline", "slower", "not told apart"
COLORS = {FASTER: "#0173b2", UNSURE: "#767676", SLOWER: "#992255"}
_SCALES = Scale("implementation", "names"), Scale("shape", "names")
_SHAPE = ("tokens", "hidden", "experts", "top_k")


def draw(table: pd.DataFrame) -> Figure:
    """Heatmap: shapes down, bench and implementation across; medians over the cells of a shape, of which the subtitle says in what they differ."""
    rows = _besides(table)
    if rows.empty:
        figure, (axes,) = style.canvas(1, 1, 9, 3)
        style.empty(axes, _why(table))
        return style.finish(figure, "Speed-up over the baseline", rows)
    grid, share, shown, shapes = _grid(rows)
    return _heatmap(grid, share, shown, shapes)


def chart(table: pd.DataFrame) -> Chart:
    """The same entries for the page, a panel per bench."""
    rows = _besides(table)
    if rows.empty:
        return nothing("matrix", *_SCALES, rows, _why(table))
    grid, unsure, shown, shapes = _grid(rows)
    records = [
        {"panel": bench, "series": UNSURE if unsure.loc[shape, column] >= 0.5 else FASTER if ratio > 1 else SLOWER, "x": name, "y": shape, "says": plain.ratio(ratio)}
        for column in grid
        for bench, name in [column.split(": ")]
        for shape, ratio in grid[column].dropna().items()
    ]  # fmt: skip
    return Chart("matrix", *_SCALES, marks(records), COLORS, shown, note=_of_shapes(grid, shown, shapes))


def _of_shapes(grid: pd.DataFrame, rows: pd.DataFrame, shapes: int) -> str:
    """How many of the shapes are shown, what the baseline is, and what medians are taken over, where a shape has several cells."""
    shown = f"{len(grid)} of {count(shapes, 'shape')}" if len(grid) < shapes else count(shapes, "shape")
    over = grouping.differing(rows, "cells", by=["what", "shape"])
    medians = f"; medians over {over}" * bool(rows.duplicated(["what", "shape"]).any())
    return f"{shown}; baseline: {style.distinct(rows['baseline'])}{medians}"


def _besides(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of implementations that are not the baseline of their cell."""
    rows = style.ok(table)
    return rows[(rows["implementation"] != rows["baseline"]) & (rows["speedup"] > 0)]


def _why(table: pd.DataFrame) -> str:
    return f"no implementation besides the baseline is ok; {style.why(table)}"


def _grid(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, int]:
    """Median speed-ups of shape and column, the share of cells that are not told apart from 1, the rows shown, and how many shapes there are."""
    within = ~((rows["speedup_ci_low"] > 1) | (rows["speedup_ci_high"] < 1))  # also without an interval
    unsure = rows["verdict"].isin((SAME, UNDECIDED)).where(rows["verdict"].notna(), within)
    cells = rows.assign(
        shape=grouping.shape(rows, _SHAPE),
        what=rows["bench"] + ": " + rows["implementation"],
        unsure=unsure.astype(float),
    )
    every = cells.pivot_table(index="shape", columns="what", values="speedup", aggfunc="median")
    keep = informative(every)
    order = cells.sort_values(list(_SHAPE))["shape"].drop_duplicates()
    columns = [c for b in BENCHES for c in (f"{b}: {n}" for n in style.ordered(rows["implementation"])) if c in every]
    grid = every.loc[[s for s in order if s in keep], columns]
    share = cells.pivot_table(index="shape", columns="what", values="unsure").reindex_like(grid)
    shown = cells[cells["shape"].isin(keep)]
    return grid, share, shown, len(every)


def informative(grid: pd.DataFrame) -> set[str]:
    """At most MOST_SHAPES rows: two for every column first, then those with most entries."""
    ranked = grid.loc[grid.notna().sum(axis=1).sort_values(ascending=False, kind="stable").index]
    first = [shape for column in ranked for shape in ranked.index[ranked[column].notna()][:2]]
    return set(list(dict.fromkeys([*first, *ranked.index]))[:MOST_SHAPES])


def _heatmap(grid: pd.DataFrame, unsure: pd.DataFrame, rows: pd.DataFrame, shapes: int) -> Figure:
    figure, (axes,) = style.canvas(1, 1, max(8, 3 + 0.75 * grid.shape[1]), max(5, 2.9 + 0.27 * grid.shape[0]))
    span = max(grid.max().max(), 1 / grid.min().min(), 1.5)
    text = grid.map(lambda v: "" if pd.isna(v) else f"{v:.2f}")
    text = text.where(~(unsure >= 0.5), text + " ≈")
    sns.heatmap(
        grid,
        ax=axes,
        cmap="RdBu",
        norm=LogNorm(1 / span, span),
        annot=text,
        fmt="",
        annot_kws={"size": 7},
        linewidths=0.5,
        cbar_kws={"label": "baseline time / time (above 1 is faster)"},
    )
    scale = axes.collections[0].colorbar
    near = (0.75, 1.33) * bool(span < 4)  # their labels would run into that of 1
    ticks = [
        t for t in sorted((0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, *near)) if 1 / span <= t <= span
    ]
    scale.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
    scale.minorticks_off()
    axes.set(
        xlabel="≈: not told apart from the baseline in at least half of the cells; blank: not ok or not asked for",
        ylabel="",
    )
    axes.set_title(_of_shapes(grid, rows, shapes), fontsize=8)
    axes.tick_params(axis="y", rotation=0, labelsize=7)
    axes.tick_params(axis="x", rotation=60, labelsize=8)
    axes.grid(False)
    return style.finish(figure, "Speed-up over the baseline", rows)
