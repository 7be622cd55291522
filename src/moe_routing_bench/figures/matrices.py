"""Every implementation of a cell or shape as an entry of a matrix: its speed-up over the baseline, and its verdict against the best other."""

import pandas as pd

from moe_routing_bench.comparison.verdicts import FASTER, SAME, SLOWER, UNDECIDED
from moe_routing_bench.figures import footer, palette, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import count

MOST_SHAPES = 25
MOST_CELLS = 12  # of a bench
ABOVE, BELOW, UNSURE = "faster than the baseline", "slower", "not told apart"
SLIGHTLY, HALF = "slower, 0.9x or more", "less than half as fast"  # of SLOWER: 0.99x is no 0.28x
RATIO_COLORS = {ABOVE: "#0173b2", UNSURE: "#767676", SLIGHTLY: "#996666", BELOW: "#992255", HALF: "#550000"}
VERDICT_COLORS = {
    FASTER: "#0173b2",
    SAME: "#445577",
    UNDECIDED: "#767676",
    SLIGHTLY: "#996666",
    SLOWER: "#992255",
    HALF: "#550000",
}
_SHAPES = Scale("implementation", "names"), Scale("shape", "names")
_CELLS = Scale("implementation", "names"), Scale("cell", "names")
_SHAPE = ("tokens", "hidden", "experts", "top_k")
_MOSTLY = "half or more of its rows are suspect or not converged"


def speedup(table: pd.DataFrame) -> Chart:
    """Shapes down and implementations across, a panel per bench: medians over the cells of a shape; the note says in what these differ."""
    rows = _besides(table)
    if rows.empty:
        return nothing("matrix", *_SHAPES, rows, _no_other(table))
    grid, unsure, doubtful, shown, shapes = _grid(rows)
    records = [
        {
            "panel": bench,
            "series": UNSURE if unsure.loc[shape, column] >= 0.5 else ABOVE if value > 1 else _behind(value),
            "x": name,
            "y": shape,
            "says": ratio(value),
            "doubt": _MOSTLY if doubtful.loc[shape, column] >= 0.5 else None,
        }
        for column in grid
        for bench, name in [column.split(": ")]
        for shape, value in grid[column].dropna().items()
    ]
    return Chart("matrix", *_SHAPES, marks(records), RATIO_COLORS, shown, note=_of_shapes(grid, shown, shapes))


def _of_shapes(grid: pd.DataFrame, rows: pd.DataFrame, shapes: int) -> str:
    """How many of the shapes are shown, what the baseline is, and what medians are taken over, where a shape has several cells."""
    shown = f"{len(grid)} of {count(shapes, 'shape')}" if len(grid) < shapes else count(shapes, "shape")
    over = row_groups.differing(rows, "cells", by=["what", "shape"])
    medians = f"; medians over {over}" * bool(rows.duplicated(["what", "shape"]).any())
    doubtful = int(rows["doubtful"].sum())
    doubts = f"; {doubtful} of {count(len(rows), 'row')} suspect or not converged" * bool(doubtful)
    return f"{shown}; baseline: {footer.distinct(rows['baseline'])}{medians}{doubts}"


def _besides(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of implementations that are not the baseline of their cell."""
    rows = row_groups.ok(table)
    return rows[(rows["implementation"] != rows["baseline"]) & (rows["speedup"] > 0)]


def _no_other(table: pd.DataFrame) -> str:
    return f"no implementation besides the baseline is ok; {row_groups.why(table)}"


def _grid(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame, int]:
    """Median speed-ups of shape and column, the shares of cells that are not told apart from 1 and of doubtful ones, the rows shown, and how many shapes there are."""
    within = ~((rows["speedup_ci_low"] > 1) | (rows["speedup_ci_high"] < 1))  # also without an interval
    unsure = rows["verdict"].isin((SAME, UNDECIDED)).where(rows["verdict"].notna(), within)
    cells = rows.assign(
        shape=row_groups.shape(rows, _SHAPE),
        what=rows["bench"] + ": " + rows["implementation"],
        unsure=unsure.astype(float),
        doubtful=((rows["suspect"] == True) | (rows["converged"] == False)).astype(float),  # noqa: E712
    )
    every = cells.pivot_table(index="shape", columns="what", values="speedup", aggfunc="median")
    keep = informative(every)
    order = cells.sort_values(list(_SHAPE))["shape"].drop_duplicates()
    columns = [
        c
        for b in row_groups.benches(rows)
        for c in (f"{b}: {n}" for n in palette.ordered(rows["implementation"]))
        if c in every
    ]
    grid = every.loc[[s for s in order if s in keep], columns]
    shares = [
        cells.pivot_table(index="shape", columns="what", values=name).reindex_like(grid)
        for name in ("unsure", "doubtful")
    ]
    return grid, *shares, cells[cells["shape"].isin(keep)], len(every)


def informative(grid: pd.DataFrame) -> set[str]:
    """At most MOST_SHAPES rows: two for every column first, then those with most entries."""
    ranked = grid.loc[grid.notna().sum(axis=1).sort_values(ascending=False, kind="stable").index]
    first = [shape for column in ranked for shape in ranked.index[ranked[column].notna()][:2]]
    return set(list(dict.fromkeys([*first, *ranked.index]))[:MOST_SHAPES])


def verdict_matrix(table: pd.DataFrame) -> Chart:
    """The stored verdict and ratio of every row of each bench's first cells: those of models, then most implementations and tokens first."""
    rows = row_groups.ok(table)
    rows = rows[rows["best_verdict"].notna() & rows["best_speedup"].notna()]
    if rows.empty:
        return nothing("matrix", *_CELLS, rows, f"no row has a verdict (too few twins); {row_groups.why(table)}")
    shown = pd.concat(_chosen(rows[rows["bench"] == bench]) for bench in row_groups.benches(rows))
    labels = row_groups.labels(shown)
    order = palette.ordered(shown["implementation"])
    benches = row_groups.benches(shown)
    shown = shown.assign(
        label=labels, place=shown["implementation"].map(order.index), bench_place=shown["bench"].map(benches.index)
    )
    records = [
        {
            "panel": one["bench"],
            "series": _shade(one["best_verdict"], one["best_speedup"]),
            "x": one["implementation"],
            "y": one["label"],
            "says": ratio(one["best_speedup"]),
        }
        | row(one)
        for _, one in shown.sort_values(["bench_place", "turn", "place"], kind="stable").iterrows()
    ]
    return Chart("matrix", *_CELLS, marks(records), VERDICT_COLORS, shown, note=row_groups.shown_of(shown, rows))


def _shade(verdict: str, ratio: float) -> str:
    """The series of a verdict: a slower one by how far it is behind."""
    return _behind(ratio) if verdict == SLOWER else verdict


def _behind(ratio: float) -> str:
    """The series of what is slower."""
    return HALF if ratio < 0.5 else BELOW if ratio < 0.9 else SLIGHTLY


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    cells = rows.groupby("cell").agg(model=("model", "first"), n=("implementation", "size"), tokens=("tokens", "first"))
    cells = cells.assign(plain=cells["model"].isna()).sort_values(
        ["plain", "n", "tokens"], ascending=[True, False, False], kind="stable"
    )
    rank = {cell: i for i, cell in enumerate(cells.index[:MOST_CELLS])}
    kept = rows[rows["cell"].isin(set(rank))]
    return kept.assign(turn=[rank[one] for one in kept["cell"]])


def ratio(value: float) -> str:
    """A ratio in few letters, for a cell of a matrix."""
    if value >= 10:
        return (f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".removesuffix(".")) + "x"
    return (f"{value:.2f}" if value >= 0.01 else f"{value:.1g}") + "x"
