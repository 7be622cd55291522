"""Which implementation of a composite is the fastest, cell by cell, and how far behind the others are."""

import pandas as pd

from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

MOST_CELLS = 30
_SCALES = Scale("time over that of the fastest", "log"), Scale("cell", "names")
_ORDER = ["model", "phase", "hidden", "experts", "skew", "capacity_factor", "tokens"]


def chart(table: pd.DataFrame) -> Chart:
    """A line per cell: every implementation's time over that of the fastest, which is named with those that tie with it."""
    rows = _several(table)
    if rows.empty:
        return nothing("dots", *_SCALES, rows, _why(table))
    shown = choose(rows)
    labels = row_groups.labels(shown, but=["layout"])
    ties = {cell: " ≈ ".join(winners(group)) for cell, group in shown.groupby("cell")}
    records = []
    for i, one in shown.iterrows():
        says = us(one["median_us"]) + (f"; fastest: {ties[one['cell']]}" if one["behind"] == 1 else "")
        records.append(
            {
                "panel": one["bench"],
                "series": one["implementation"],
                "x": one["behind"],
                "y": labels[i],
                "low": one["low"],
                "high": one["high"],
                "says": says,
                "aside": f"{ties[one['cell']]}, {us(one['median_us'])}" if one["behind"] == 1 else None,
            }
            | row(one)
        )
    kept, every = shown["cell"].nunique(), rows["cell"].nunique()
    note = f"{kept} of {every} cells" if kept < every else ""
    return Chart("dots", *_SCALES, marks(records), palette.tints(shown["implementation"]), shown, 1.0, note=note)


def _several(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of composites in cells of two or more implementations."""
    rows = row_groups.composed(row_groups.ok(table))
    return rows[rows.groupby(["bench", "cell"])["implementation"].transform("size") > 1]


def _why(table: pd.DataFrame) -> str:
    return f"no cell of a composite has two implementations; {row_groups.why(table, *row_groups.COMPOSITES)}"


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
    return [fastest, *palette.ordered(cell.loc[against, "implementation"])]
