"""Figures of the page of a platform: over tokens, prefill and decode on one axis, at most six series, equal scales in all panels.

Series are ours, which is `auto` where it was measured and else the fastest of our kernels, and those others that are fastest most often; or one
line per format of weights, and the fastest other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moe_routing_bench.answers import pairs
from moe_routing_bench.answers.stored import Cell, Row
from moe_routing_bench.config.axes import AXES, PRESET
from moe_routing_bench.figures import chart, palette
from moe_routing_bench.figures.chart import Chart, Scale
from moe_routing_bench.report.packing import packed
from moe_routing_bench.report.platform import address
from moe_routing_bench.report.row_data import row_id
from moe_routing_bench.report.script_data import chart_data

MOST_SERIES, MOST_PANELS = 6, 6
OURS, OTHER = "ours", "fastest other"
LABELS = ("tokens", "phase", "model")  # axes that cells of one panel may differ in
FORMATS = ("weights", "packed")


@dataclass(frozen=True)
class Drawn:
    """A figure, and the addresses of the rows that its marks are of."""

    chart: Chart
    rows: list[str]

    @property
    def data(self) -> dict[str, Any]:
        """What the page's scripts draw it from."""
        data = chart_data(self.chart)
        data["marks"]["row"] = packed(self.rows)
        return data | {"level": self.chart.kind == "lines"}


_TINTS = {OURS: palette.COLORS["triton"], OTHER: palette.BLACK, **palette.FORMATS}


def plain(cell: Cell) -> bool:
    """Whether weights and rows have the format of the activations."""
    return all(cell.axes.get(name) in (None, cell.axes.get("dtype")) for name in FORMATS)


def _groups(cells: Iterable[Cell], but: Sequence[str], several: bool = False) -> dict[str, list[Cell]]:
    """Cells that differ in these axes alone, under their name, those with most numbers of tokens first; no more than have room.

    `several`: those with one format of weights are left out where others have more.
    """
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = tuple((name, value) for name, value in cell.axes.items() if name not in but)
        found.setdefault((cell.bench, key), []).append(cell)
    order = sorted(found.values(), key=lambda group: -len({cell.axes["tokens"] for cell in group}))
    forms = [group for group in order if several and len({cell.axes["weights"] for cell in group}) > 1]
    order = forms or order
    long = [group for group in order if len({cell.axes["tokens"] for cell in group}) > 1]
    named: dict[str, list[Cell]] = {}
    for group in (long or order)[:MOST_PANELS]:
        named.setdefault(_name(group[0], but, group), []).extend(group)
    return named


def _name(cell: Cell, but: Sequence[str], group: Sequence[Cell]) -> str:
    """The model, or the sizes, and what else is not usual."""
    model = next((one.rows[0]["model"] for one in group if one.rows[0]["model"]), None)
    sizes = [
        f"{AXES[name].prefix}={cell.axes[name]}"
        for name in ("hidden", "intermediate", "experts", "top_k")
        if cell.axes.get(name)
    ]
    return " ".join([f"{cell.bench},", *([model] if model else sizes), *unusual(cell, but)]).rstrip(",")


def unusual(cell: Cell, but: Sequence[str]) -> list[str]:
    """What else a cell has that is not the default, without sizes and these axes."""
    found = []
    for name, value in cell.axes.items():
        axis = AXES[name]
        usual = cell.axes.get(axis.follows) if axis.follows else axis.default
        if value not in (None, usual) and name not in (*but, *PRESET, "seed"):
            found.append(f"{name.replace('_', ' ')} {value}")
    return found


def against_others(cells: Sequence[Cell]) -> Drawn | None:
    """Ours and up to five others over tokens, in a panel per set of sizes."""
    groups = _groups(cells, LABELS)
    shown = [cell for group in groups.values() for cell in group]
    first, there = Counter(), Counter()
    for cell in shown:
        mine = pairs.ours(cell)
        others = [row["implementation"] for row in cell.timed if row["implementation"] not in mine]
        there.update(others)
        first.update(others[:1])
    order = sorted(there, key=lambda name: (-first[name], -there[name], name))[: MOST_SERIES - 1]
    records = []
    for panel, group in groups.items():
        for cell in group:
            own = pairs.own(cell)
            records += [_mark(panel, OURS, cell, own)] if own else []
            records += [
                _mark(panel, row["implementation"], cell, row) for row in cell.timed if row["implementation"] in order
            ]
    return drawn(records, [OURS, *order])


def formats(cells: Sequence[Cell]) -> Drawn | None:
    """The fastest of ours with each format of weights over tokens, in a panel per set of sizes, and the fastest other."""
    groups = _groups([cell for cell in cells if "weights" in cell.axes], (*LABELS, *FORMATS), several=True)
    counts = Counter(cell.axes["weights"] for group in groups.values() for cell in group if pairs.own(cell))
    usual = [name for name in counts if any(plain(cell) and cell.axes["weights"] == name for cell in cells)]
    order = sorted(counts, key=lambda name: (name not in usual, -counts[name], name))[: MOST_SERIES - 1]
    records = []
    for panel, group in groups.items():
        for tokens in sorted({cell.axes["tokens"] for cell in group}):
            same = [cell for cell in group if cell.axes["tokens"] == tokens]
            for form in order:
                records += _fastest(panel, form, [cell for cell in same if cell.axes["weights"] == form], pairs.own)
            records += _fastest(panel, OTHER, [cell for cell in same if cell.axes["weights"] in order], pairs.rival)
    return drawn(records, [*order, OTHER])


def _fastest(
    panel: str, series: str, cells: Sequence[Cell], which: Callable[[Cell], Row | None]
) -> list[dict[str, Any]]:
    held = [(row, cell) for cell in cells if (row := which(cell))]
    if not held:
        return []
    row, cell = min(held, key=lambda pair: pair[0]["median_us"])
    return [_mark(panel, series, cell, row)]


def _mark(panel: str, series: str, cell: Cell, row: Row) -> dict[str, Any]:
    form = cell.axes.get("weights")
    kinds = [cell.axes["phase"], *([form] if form and form != cell.axes.get("dtype") else [])]
    return {
        "panel": panel,
        "series": series,
        "x": cell.axes["tokens"],
        "y": row["median_us"],
        "low": row["ci_low_us"],
        "high": row["ci_high_us"],
        "says": f"{row['implementation']}, {', '.join(kinds)}, run {cell.run}",
        "doubt": chart.doubts(row),
        "row": f"{address(cell.run)}#row-{row_id(row)}",
    }


def drawn(records: Sequence[Mapping[str, Any]], order: Sequence[str]) -> Drawn | None:
    """A figure of such marks, with equal scales in all panels; None without marks."""
    if not records:
        return None
    there = [name for name in order if any(one["series"] == name for one in records)]
    tokens = {(one["panel"], one["x"]) for one in records}
    if len(tokens) == len({panel for panel, _ in tokens}):  # a line has two points
        scales = Scale("µs", "log"), Scale("", "names")
        names = {panel: f"{panel}, T={count}" for panel, count in tokens}
        records = [one | {"panel": names[one["panel"]], "x": one["y"], "y": one["series"]} for one in records]
        records.sort(key=lambda one: there.index(one["series"]))
    else:
        scales = Scale(chart.TOKENS, "log"), Scale("µs", "log")
    kind = "dots" if scales[1].kind == "names" else "lines"
    marks = chart.marks(list(map(dict, records)))
    one = Chart(kind, *scales, marks, tints(there), pd.DataFrame(), shared=True)
    return Drawn(one, [record["row"] for record in records])


def tints(series: Sequence[str]) -> dict[str, str]:
    """The colours of a figure's series, no two alike: of an implementation that of all figures, of a format that of its place among formats."""
    result: dict[str, str] = {}
    for name in series:
        free = [tint for tint in palette.PALETTE if tint not in result.values()]
        own = _TINTS.get(name) or palette.color(name)
        result[name] = own if own not in result.values() else free[0]
    return result
