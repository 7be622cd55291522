"""Where the time of composites goes, stage by stage."""

import itertools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from moe_routing_bench.figures import grouping, style
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

MOST_BARS, MOST_PER_CELL = 30, 6
TITLE = "Where the time goes: share of the stages' times"
_FUSED = ("#6666dd", "#550000", "#d55e00", "#443333")
_SCALES = Scale("share of the sum of the stages' times"), Scale("cell and implementation", "names")
_LEGEND_COLUMNS = 5
_HATCHES = ("//", "\\\\", "..", "++")  # of the second and later stages of a fused part


def draw(table: pd.DataFrame) -> Figure:
    """One panel per composite: stacked bars of stage shares, whole cells at a time."""
    rows = _staged(table)
    if rows.empty:
        figure, (axes,) = style.canvas(1, 1, 11, 3)
        style.empty(axes, style.why(table, *grouping.COMPOSITES))
        return style.finish(figure, TITLE, rows)
    found = _chosen(rows)
    heights = [len(shown) + 6 for _, shown, _ in found]
    figure, panels = style.canvas(len(found), 1, 11, 0.3 * sum(heights), height_ratios=heights)
    for axes, (bench, shown, some) in zip(panels, found, strict=True):
        _panel(axes, shown, f"{bench} ({some})" if some else bench)
    return style.finish(figure, TITLE, pd.concat(shown for _, shown, _ in found))


def chart(table: pd.DataFrame) -> Chart:
    """The same bars for the page."""
    rows = _staged(table)
    if rows.empty:
        return nothing("bars", *_SCALES, rows, style.why(table, *grouping.COMPOSITES))
    found = _chosen(rows)
    shown = pd.concat(one for _, one, _ in found)
    labels = pd.concat(grouping.labels(one, but=["layout"]) for _, one, _ in found)
    records = [part | {"panel": one["bench"], "y": f"{labels[i]} | {one['implementation']}"} | row(one) for i, one in shown.iterrows() for part in _parts(one)]  # fmt: skip
    there = ordered({part for value in shown["stage_us"] for part in style.stages(value)})
    colors = {_name(part): tint for part, tint in _tints(there).items()}
    note = "; ".join(f"{bench}: {some}" for bench, _, some in found if some)
    return Chart("bars", *_SCALES, marks(records), colors, shown, note=note)


def _tints(parts: list[str]) -> dict[str, str]:
    """A colour for each part: of a fused one, which is hatched only in print, one of its own."""
    own = dict(zip((part for part in parts if "+" in part), itertools.cycle(_FUSED), strict=False))
    return {part: own.get(part) or style.STAGES[part] for part in parts}


def _parts(one: pd.Series) -> list[dict[str, object]]:
    """The bars of a row, one after the other."""
    times, left, found = style.stages(one["stage_us"]), 0.0, []
    total = sum(times.values())
    for name in ordered(times):
        share = times[name] / total
        says = f"{share:.0%}: {us(times[name])} of {us(total)}; the whole takes {us(one['median_us'])}"
        found.append({"series": _name(name), "x": share, "low": left, "high": left + share, "says": says})
        left += share
    return found


def _staged(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of composites whose stages have times."""
    rows = style.ok(table, *grouping.COMPOSITES)
    return rows[[sum(style.stages(value).values()) > 0 for value in rows["stage_us"]]]


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
    names = style.ordered(rows["implementation"])
    shown = rows[rows["cell"].isin(keep)].sort_values("median_us", kind="stable").groupby("cell").head(MOST_PER_CELL)
    shown = shown.assign(_cell=shown["cell"].map(rank), _name=shown["implementation"].map(names.index))
    return shown.sort_values(["_cell", "_name"]).head(2 * MOST_BARS)


def _chosen(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame, str]]:
    """Of each composite that has rows: its name, the rows to show, and in words which of all these are."""
    of = {bench: rows[rows["bench"] == bench] for bench in grouping.COMPOSITES}
    return [(bench, shown := choose(mine), _some(mine, shown)) for bench, mine in of.items() if len(mine)]


def _some(rows: pd.DataFrame, shown: pd.DataFrame) -> str:
    """Which of the rows of a composite are shown, in words; nothing where all are."""
    cells, kept = rows["cell"].nunique(), shown["cell"].nunique()
    whole = len(rows[rows["cell"].isin(shown["cell"])]) == len(shown)
    said = [f"{kept} of {cells} cells"] * (kept < cells) + [f"the {MOST_PER_CELL} fastest of each"] * (not whole)
    return ", ".join(said)


def _panel(axes: Axes, shown: pd.DataFrame, title: str) -> None:
    texts = grouping.labels(shown, but=["layout"]) + " | " + shown["implementation"]
    for y, (_, one) in enumerate(shown.iterrows()):
        _bar(axes, y, one)
    axes.set(yticks=range(len(shown)), xlim=(0, 1.22))
    axes.set_xlabel("share of the sum of the stages' times (label: median time of the whole, 95 % CI)")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticklabels(texts, fontsize=7)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    parts = ordered(part for value in shown["stage_us"] for part in style.stages(value))
    axes.set_title(title, loc="left", fontsize=9, pad=8 + 14 * -(-len(parts) // _LEGEND_COLUMNS))  # above the legend
    axes.legend(
        [patches(part) for part in parts], [_name(part) for part in parts], handler_map={tuple: HandlerTuple(1)}, handleheight=1.2,
        ncols=_LEGEND_COLUMNS, loc="lower left", bbox_to_anchor=(0.0, 0.99), borderpad=0, frameon=False, fontsize=8,
    )  # fmt: skip


def ordered(parts: object) -> list[str]:
    """Parts of composites, each once, by their first stage in the order of the stage tables."""
    order = list(style.STAGES)
    return sorted(set(parts), key=lambda part: [order.index(stage) for stage in part.split("+")])  # type: ignore[call-overload]


def patches(part: str) -> tuple[Patch, ...]:
    """What a part looks like: the colour of its first stage, hatched in those of the others that are fused with it."""
    first, *others = (style.STAGES[stage] for stage in part.split("+"))
    over = [
        Patch(facecolor="none", edgecolor=color, hatch=_HATCHES[i % len(_HATCHES)], lw=0)
        for i, color in enumerate(others)
    ]
    return (Patch(facecolor=first, lw=0), *over)


def _name(part: str) -> str:
    return f"{part} (fused)" if "+" in part else part


def _bar(axes: Axes, y: int, row: pd.Series) -> None:
    times, left = style.stages(row["stage_us"]), 0.0
    total = sum(times.values())
    for name in ordered(times):
        share = times[name] / total
        for patch in patches(name):
            look = {"facecolor": patch.get_facecolor(), "edgecolor": patch.get_edgecolor(), "hatch": patch.get_hatch()}
            axes.barh(y, share, left=left, lw=0, **look)
        if share > 0.05:
            paper = {"facecolor": style.STAGES[name.split("+")[0]], "lw": 0, "pad": 1} if "+" in name else None
            axes.text(
                left + share / 2,
                y,
                f"{share:.0%}".replace("%", " %"),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
                bbox=paper,
            )
        left += share
    interval = () if pd.isna(row["ci_low_us"]) else (row["ci_low_us"], row["ci_high_us"])
    axes.text(1.01, y, us(row["median_us"], *interval), va="center", fontsize=7)
