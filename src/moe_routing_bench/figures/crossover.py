"""Which implementation of a composite is the fastest, cell by cell, and how far behind the others are."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from moe_routing_bench.figures import grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

MOST_CELLS = 30
TITLE = "Who is fastest, cell by cell"
_NEAR, _TICKS = (1.1, 1.2), (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
_SCALES = Scale("time over that of the fastest", "log"), Scale("cell", "names")
_ORDER = ["model", "phase", "hidden", "experts", "skew", "capacity_factor", "tokens"]


def draw(table: pd.DataFrame) -> Figure:
    """A line per cell: every implementation's time over that of the fastest, which is named at the right with those that tie with it."""
    rows = _several(table)
    if rows.empty:
        figure, (axes,) = style.canvas(1, 1, 11, 3)
        style.empty(axes, _why(table))
        return style.finish(figure, TITLE, rows)
    shown = choose(rows)
    cells = shown["cell"].drop_duplicates().tolist()
    figure, (axes,) = style.canvas(1, 1, 11, 1.8 + 0.3 * len(cells))
    _points(axes, shown, cells)
    style.legend(axes, shown["implementation"], loc="lower center", bbox_to_anchor=(0.5, 1), ncols=6)
    some = f", {len(cells)} of {rows['cell'].nunique()} cells" if len(cells) < rows["cell"].nunique() else ""
    return style.finish(figure, f"{TITLE}: {', '.join(shown['bench'].unique())}{some}", shown)


def chart(table: pd.DataFrame) -> Chart:
    """The same marks for the page; what names and ties with the fastest is said at its mark."""
    rows = _several(table)
    if rows.empty:
        return nothing("dots", *_SCALES, rows, _why(table))
    shown = choose(rows)
    labels = grouping.labels(shown, but=["layout"])
    ties = {cell: " ≈ ".join(winners(group)) for cell, group in shown.groupby("cell")}
    records = []
    for i, one in shown.iterrows():
        says = us(one["median_us"]) + (f"; fastest: {ties[one['cell']]}" if one["behind"] == 1 else "")
        records.append({"panel": one["bench"], "series": one["implementation"], "x": one["behind"], "y": labels[i], "low": one["low"], "high": one["high"], "says": says} | row(one))  # fmt: skip
    tints = {name: style.color(name) for name in style.ordered(shown["implementation"])}
    return Chart("dots", *_SCALES, marks(records), tints, shown, 1.0)


def _several(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of composites in cells of two or more implementations."""
    rows = grouping.composed(style.ok(table))
    return rows[rows.groupby(["bench", "cell"])["implementation"].transform("size") > 1]


def _why(table: pd.DataFrame) -> str:
    return f"no cell of a composite has two implementations; {style.why(table, *grouping.COMPOSITES)}"


def choose(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of at most MOST_CELLS cells, those of models first, with `behind`, `low` and `high`: their times over that of the cell's
    fastest, and the interval."""
    ordered = rows.sort_values([*_ORDER, "cell"], kind="stable")
    kept = ordered[ordered["cell"].isin(ordered["cell"].drop_duplicates().head(MOST_CELLS))]
    least = kept.groupby(["bench", "cell"])["median_us"].transform("min")
    ends = {name: kept[column] / least for name, column in (("low", "ci_low_us"), ("high", "ci_high_us"))}
    return kept.assign(behind=kept["median_us"] / least, **ends)


def winners(cell: pd.DataFrame) -> list[str]:
    """The fastest implementation of a cell, and after it those whose paired ratio to it is not told apart from 1."""
    fastest = cell.loc[cell["median_us"].idxmin(), "implementation"]
    against = (cell["best_other"] == fastest) & (cell["best_speedup_ci_high"] >= 1) & (cell["best_verdict"] != "slower")
    return [fastest, *style.ordered(cell.loc[against, "implementation"])]


def _points(axes: Axes, shown: pd.DataFrame, cells: list[str]) -> None:
    labels = grouping.labels(shown, but=["layout"])
    for name, group in style.groups(shown):
        ends = style.bars(group["behind"], group["low"], group["high"])
        at = group["cell"].map(cells.index)
        axes.errorbar(
            group["behind"], at, xerr=ends, alpha=0.85, color=style.color(name), elinewidth=1, **style.marker(name)
        )
    for y, cell in enumerate(cells):
        found = shown[shown["cell"] == cell]
        least = found["median_us"].min()
        shortest = f"{least:,.0f}" if least >= 100 else f"{least:.3g}"
        text = f"{' ≈ '.join(winners(found))}, {shortest} µs"
        axes.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axes.axvline(1, color="0.3", lw=1, ls="--")
    first = shown.drop_duplicates("cell").index
    axes.set_yticks(range(len(cells)), labels.loc[first], fontsize=7)
    axes.set(xscale="log", xlabel="time over that of the fastest (bars: 95 % CI of the median)")
    most = max(shown[["behind", "high"]].max().max(), 1.2)
    axes.set_xlim(0.99 * min(shown[["behind", "low"]].min().min(), 0.98), 1.1 * most)
    near = _NEAR * bool(most < 8)  # their labels would run into each other
    axes.xaxis.set_major_locator(FixedLocator(sorted((*_TICKS, *near))))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.invert_yaxis()
