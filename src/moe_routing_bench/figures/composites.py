"""Composites: where their time goes, stage by stage, and which implementation is the fastest, cell by cell."""

import itertools

import pandas as pd

from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

MOST_BARS, MOST_PER_CELL = 30, 6
_SCALES = Scale("share of the sum of the stages' times"), Scale("cell and implementation", "names")


def stage_share(table: pd.DataFrame) -> Chart:
    """A bar per row of a composite: its stages one after the other, and at its end the time of the whole."""
    rows = _staged(table)
    if rows.empty:
        return nothing("bars", *_SCALES, rows, row_groups.why(table, *row_groups.COMPOSITES))
    found = _chosen(rows)
    shown = pd.concat(one for _, one, _ in found)
    labels = pd.concat(row_groups.labels(one, but=["layout"]) for _, one, _ in found)
    records = [
        part | {"panel": one["bench"], "y": f"{labels[i]} | {one['implementation']}"} | row(one)
        for i, one in shown.iterrows()
        for part in _parts(one)
    ]
    there = ordered({part for value in shown["stage_us"] for part in row_groups.stages(value)})
    colors = {_name(part): tint for part, tint in _tints(there).items()}
    note = "; ".join(f"{bench}: {some}" for bench, _, some in found if some)
    return Chart("bars", *_SCALES, marks(records), colors, shown, note=note, shared=True)


def _tints(parts: list[str]) -> dict[str, str]:
    """A colour for each part: of a fused one a colour of its own."""
    own = dict(zip((part for part in parts if "+" in part), itertools.cycle(palette.FUSED), strict=False))
    return {part: own.get(part) or palette.STAGES[part] for part in parts}


def _parts(one: pd.Series) -> list[dict[str, object]]:
    """The bars of a row, one after the other."""
    times, left, found = row_groups.stages(one["stage_us"]), 0.0, []
    total = sum(times.values())
    interval = () if pd.isna(one["ci_low_us"]) else (one["ci_low_us"], one["ci_high_us"])
    whole = us(one["median_us"], *interval)
    for name in ordered(times):
        share = times[name] / total
        says = f"{share:.0%}: {us(times[name])} of {us(total)}; the whole takes {us(one['median_us'])}"
        found.append(
            {
                "series": _name(name),
                "x": share,
                "low": left,
                "high": left + share,
                "says": says,
                "text": f"{share:.0%}".replace("%", " %"),
                "aside": whole,
            }
        )
        left += share
    return found


def _staged(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of composites whose stages have times."""
    rows = row_groups.ok(table, *row_groups.COMPOSITES)
    return rows[[sum(row_groups.stages(value).values()) > 0 for value in rows["stage_us"]]]


def choose(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows to show, at most about MOST_BARS: the MOST_PER_CELL fastest of a cell, one cell of every model first, then plain shapes.

    Of the cells of a model the one with most implementations and tokens comes first.
    """
    cells = rows.groupby("cell", sort=True).agg(
        n=("implementation", "size"), tokens=("tokens", "first"), model=("model", "first"), skew=("skew", "first")
    )
    cells = cells.sort_values(["n", "tokens", "skew"], ascending=[False, False, True], kind="stable")
    cells["n"] = cells["n"].clip(upper=MOST_PER_CELL)
    cells["turn"] = cells.groupby("model", dropna=False).cumcount()
    cells["plain"] = cells["model"].isna()
    cells = cells.sort_values(["turn", "plain"], kind="stable")
    keep = cells.index[(cells["n"].cumsum() <= MOST_BARS) | (cells["n"].cumsum() == cells["n"])]
    rank = {cell: i for i, cell in enumerate(keep)}
    names = palette.ordered(rows["implementation"])
    shown = rows[rows["cell"].isin(keep)].sort_values("median_us", kind="stable").groupby("cell").head(MOST_PER_CELL)
    shown = shown.assign(_cell=shown["cell"].map(rank), _name=shown["implementation"].map(names.index))
    return shown.sort_values(["_cell", "_name"]).head(2 * MOST_BARS)


def _chosen(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame, str]]:
    """Each composite that has rows: its name, the rows to show, and in words which of all these are."""
    of = {bench: rows[rows["bench"] == bench] for bench in row_groups.COMPOSITES}
    return [(bench, shown := choose(mine), _some(mine, shown)) for bench, mine in of.items() if len(mine)]


def _some(rows: pd.DataFrame, shown: pd.DataFrame) -> str:
    """Which of the rows of a composite are shown, in words; nothing where all are."""
    cells, kept = rows["cell"].nunique(), shown["cell"].nunique()
    whole = len(rows[rows["cell"].isin(shown["cell"])]) == len(shown)
    said = [f"{kept} of {cells} cells"] * (kept < cells) + [f"the {MOST_PER_CELL} fastest of each"] * (not whole)
    return ", ".join(said)


def ordered(parts: object) -> list[str]:
    """Parts of composites, each once, by their first stage in the order of the stage tables."""
    order = list(palette.STAGES)
    return sorted(set(parts), key=lambda part: [order.index(stage) for stage in part.split("+")])  # type: ignore[call-overload]


def _name(part: str) -> str:
    return f"{part} (fused)" if "+" in part else part


MOST_CELLS = 30
_BEHIND = Scale("time over that of the fastest", "log"), Scale("cell", "names")
_ORDER = ["model", "phase", "hidden", "experts", "skew", "capacity_factor", "tokens"]


def crossover(table: pd.DataFrame) -> Chart:
    """A line per cell: every implementation's time over that of the fastest, which is named with those that tie with it."""
    rows = _several(table)
    if rows.empty:
        return nothing("dots", *_BEHIND, rows, _why(table))
    shown = choose_cells(rows)
    labels = row_groups.labels(shown, but=["layout"])
    cells = shown.groupby(["bench", "cell"])
    ties, least = {key: " ≈ ".join(winners(group)) for key, group in cells}, cells["median_us"].min()
    records = []
    for i, one in shown.iterrows():
        cell = one["bench"], one["cell"]
        says = us(one["median_us"]) + (f"; fastest: {ties[cell]}" if one["behind"] == 1 else "")
        records.append(
            {
                "panel": one["bench"],
                "series": one["implementation"],
                "x": one["behind"],
                "y": labels[i],
                "low": one["low"],
                "high": one["high"],
                "says": says,
                "aside": f"{ties[cell]}, {us(least[cell])}",
            }
            | row(one)
        )
    kept, every = shown["cell"].nunique(), rows["cell"].nunique()
    note = f"{kept} of {every} cells" if kept < every else ""
    return Chart("dots", *_BEHIND, marks(records), palette.tints(shown["implementation"]), shown, 1.0, note=note)


def _several(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of composites in cells of two or more implementations."""
    rows = row_groups.composed(row_groups.ok(table))
    return rows[rows.groupby(["bench", "cell"])["implementation"].transform("size") > 1]


def _why(table: pd.DataFrame) -> str:
    return f"no cell of a composite has two implementations; {row_groups.why(table, *row_groups.COMPOSITES)}"


def choose_cells(rows: pd.DataFrame) -> pd.DataFrame:
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
