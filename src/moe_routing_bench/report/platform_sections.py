"""What the page of a platform shows by operation: cells in sections, a figure of each, and how ours compare with the fastest others."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from moe_routing_bench.answers import pairs
from moe_routing_bench.answers.stored import Cell, Row
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.timeline import CHANGED, Line, Point, is_ours, longest
from moe_routing_bench.config.axes import AXES, PRESET
from moe_routing_bench.figures import chart
from moe_routing_bench.figures.chart import Chart, Scale
from moe_routing_bench.quantities import count, digits, significant, us
from moe_routing_bench.report.platform import address, is_seed
from moe_routing_bench.report.platform_charts import (
    FORMATS,
    LABELS,
    MOST_PANELS,
    MOST_SERIES,
    OURS,
    Drawn,
    against_others,
    formats,
    plain,
    tints,
    unusual,
)
from moe_routing_bench.report.row_data import row_id
from moe_routing_bench.report.script_data import chart_data


@dataclass(frozen=True)
class Section:
    """A part of the page. `cells` are places in the list of all cells; `chart` is None where nothing was measured."""

    name: str
    title: str
    text: str
    cells: list[int] = field(default_factory=list)
    caption: str = ""
    chart: dict[str, Any] | None = None


_RANKED = tuple(name for name, bench in BENCHES.items() if "ranks" in bench.axes)
# name, title, benches, which of their cells, whether lines are formats
_SECTIONS: Sequence[tuple[str, str, tuple[str, ...], Callable[[Cell], bool], bool]] = (
    ("layers", "Whole layers: prefill and decode", ("layer",), plain, False),
    ("quantised", "Quantised weights", ("layer", "experts"), lambda cell: True, True),
    ("routing", "Routing", ("routing", "gate", "router", "permute", "pack", "combine"), lambda cell: True, False),
    ("training", "A training step of a layer", ("training",), lambda cell: True, False),
    ("whole-models", "Whole models", ("model",), lambda cell: True, False),
    ("ranks", "Several GPUs", _RANKED, lambda cell: True, False),
)


def sections(cells: Sequence[Cell]) -> list[Section]:
    """The sections of these cells, without those of replayed seed documents, whose sizes are of these documents."""
    return [_section(cells, *one) for one in _SECTIONS]


def _section(
    cells: Sequence[Cell],
    name: str,
    title: str,
    benches: tuple[str, ...],
    keep: Callable[[Cell], bool],
    by_format: bool,
) -> Section:
    mine = [
        place
        for place, cell in enumerate(cells)
        if cell.bench in benches and cell.timed and keep(cell) and not is_seed(cell.run)
    ]
    kept = [cells[place] for place in mine]
    if not kept:
        return Section(name, title, f"No published row of {', '.join(benches)} on this platform.")
    drawn = formats(kept) if by_format else against_others([one for one in kept if one.bench == kept_bench(kept)])
    return Section(name, title, tally(kept), mine, _caption(drawn, by_format), drawn and drawn.data)


_HOVER = "Hover over a point for the kernel, its phase and its interval."
_OVER_TOKENS = "Median time of a call over tokens of the batch, prefill and decode on one axis."
_AT_TOKENS = "Median time of a call; one number of tokens was measured of each."
_OTHERS_SAID = "Ours is auto where it was measured, and else the fastest of our kernels; the others are those that are fastest among others most often."
_FORMATS_SAID = "The fastest of our kernels with each format of the experts' weights, and the fastest of other packages with any of these formats."


def _caption(drawn: Drawn | None, by_format: bool) -> str:
    """What a figure shows."""
    what = _OVER_TOKENS if drawn and drawn.chart.kind == "lines" else _AT_TOKENS
    return f"{what} {_FORMATS_SAID if by_format else _OTHERS_SAID} {_HOVER}"


def kept_bench(cells: Sequence[Cell]) -> str:
    """The widest of the benches of these cells, which their figure shows: the one with most stages, and of those with as many the one with most cells."""
    counts = Counter(cell.bench for cell in cells)
    return max(counts, key=lambda name: (len(BENCHES[name].stages), counts[name], name))


def tally(cells: Sequence[Cell]) -> str:
    """In how many cells ours is faster or slower than the fastest other, by verdict."""
    both = [pairs.pair(own, other) for cell in cells if (own := pairs.own(cell)) and (other := pairs.rival(cell))]
    verdicts = Counter(pair.verdict for pair in both)
    counts = {how: verdicts.pop(how, 0) for how in (pairs.FASTER, pairs.SLOWER)} | {"not told apart": verdicts.total()}
    told = [f"{how} in {number}" for how, number in counts.items() if number]
    has = "has" if (lone := len(cells) - len(both)) == 1 else "have"
    alone = f"; {lone} more {has} no time of ours or of another" if lone else ""
    if not both:
        return f"{count(len(cells), 'cell')}, none with a time of both ours and another package."
    return f"{count(len(cells), 'cell')}. Against the fastest of other packages, torch included, ours is {', '.join(told)} of {len(both)}{alone}."


def over_time(lines: Sequence[Line]) -> dict[str, Any] | None:
    """The speed of ours and up to five others over the days of their measurements, relative to the first: a panel for the longest history of each bench."""
    panels = longest(lines, MOST_PANELS)
    counts = Counter(line.implementation for mine in panels.values() for line in mine if not is_ours(line))
    order = [name for name, _ in counts.most_common(MOST_SERIES - 1)]
    begin = min((line.points[0].started for mine in panels.values() for line in mine), default="")
    records = []
    for panel, mine in panels.items():
        own = max(
            filter(is_ours, mine), key=lambda line: (len(line.points), line.implementation == pairs.AUTO), default=None
        )
        for line in mine:
            if line is own or line.implementation in order:
                records += [
                    _then(panel, OURS if line is own else line.implementation, line, one, begin) for one in line.points
                ]
    if not records:
        return None
    there = [name for name in (OURS, *order) if any(one["series"] == name for one in records)]
    scales = Scale(f"days since {begin[:10]}"), Scale("speed, first time = 1", "log")
    one = Chart("lines", *scales, chart.marks(records), tints(there), pd.DataFrame(), reference=1.0, shared=True)
    return chart_data(one) | {"level": True}


def _then(panel: str, series: str, line: Line, point: Point, begin: str) -> dict[str, Any]:
    first, changed = line.points[0].us, point.verdict in CHANGED
    since = pd.to_datetime(point.started, utc=True) - pd.to_datetime(begin, utc=True)
    change = f", {significant(point.ratio, 3)}x the speed of the time before ({point.verdict})" if point.verdict else ""
    return {
        "panel": panel,
        "series": series,
        "x": since / pd.Timedelta(days=1),
        "y": first / point.us,
        "low": first / point.high,
        "high": first / point.low,
        "says": f"{line.implementation}, {us(point.us)}, {point.started[:10]}, commit {point.commit[:7]}{', another card' * point.moved}{change}",
        "text": f"{significant(point.ratio, 3)}x" if changed and series == OURS else None,
        "doubt": chart.doubts(point.row),
    }


SIZES = tuple(name for name in PRESET if AXES[name].kind is int)
COLUMNS = ("stage", "T", "phase", "formats", "also", "ours, µs", "fastest other, µs", "ours is", "run")
_OF_MODEL = {
    "layer": "Whole layers",
    "experts": "Experts alone",
    "training": "A training step of a layer",
    "model": "Whole models",
}


def of_model(cells: Sequence[Cell], sizes: Mapping[str, Any]) -> list[Cell]:
    """The cells with a time of layers, experts, training steps and models of these sizes, by stage, tokens and formats."""
    found = [
        cell
        for cell in cells
        if cell.timed and cell.bench in _OF_MODEL and all(cell.axes.get(name) == sizes[name] for name in SIZES)
    ]
    return sorted(
        found, key=lambda one: (list(_OF_MODEL).index(one.bench), one.axes["tokens"], one.axes.get("weights") or "")
    )


def model_sections(cells: Sequence[Cell]) -> list[Section]:
    """A section per stage that has cells: a line per format of weights, or ours and others where a stage has no formats."""
    of_bench = {bench: [cell for cell in cells if cell.bench == bench] for bench in _OF_MODEL}
    figures = {bench: (mine, *_figure(mine)) for bench, mine in of_bench.items() if mine}
    return [
        Section(bench, _OF_MODEL[bench], tally(mine), caption=caption, chart=figure and figure.data)
        for bench, (mine, figure, caption) in figures.items()
    ]


def _figure(cells: Sequence[Cell]) -> tuple[Drawn | None, str]:
    """The figure of a stage of a model, and its caption."""
    by_format = len({cell.axes.get("weights") for cell in cells}) > 1
    drawn = formats(cells) if by_format else against_others(cells)
    return drawn, _caption(drawn, by_format)


def preview(cells: Sequence[Cell]) -> Chart | None:
    """The first panel of the figure of a model's first stage with a line, which stands for its page elsewhere; None where all have one number of tokens."""
    for bench in _OF_MODEL:
        drawn, _ = _figure([cell for cell in cells if cell.bench == bench])
        if drawn and drawn.chart.kind == "lines":
            marks = drawn.chart.marks
            shown = marks[marks["panel"] == marks["panel"].iloc[0]]
            tints_ = {name: tint for name, tint in drawn.chart.colors.items() if name in set(shown["series"])}
            return replace(drawn.chart, marks=shown, colors=tints_)
    return None


def line(cell: Cell) -> list[tuple[str, str]]:
    """A cell as texts of `COLUMNS`, each with the address that it leads to, or none."""
    own, other = pairs.own(cell), pairs.rival(cell)
    kinds = dict.fromkeys(str(cell.axes[name]) for name in ("dtype", *FORMATS) if cell.axes.get(name))
    return [
        (cell.bench, ""),
        (str(cell.axes["tokens"]), ""),
        (cell.axes["phase"], ""),
        (", ".join(kinds), ""),
        (", ".join(unusual(cell, (*LABELS, *FORMATS, "dtype"))) or "–", ""),
        _timed(cell, own),
        _timed(cell, other),
        (pairs.pair(own, other).text if own and other else "–", ""),
        (cell.run, f"../{address(cell.run)}"),
    ]


def _timed(cell: Cell, row: Row | None) -> tuple[str, str]:
    if row is None:
        return "–", ""
    doubt = " ?" if chart.doubts(row) else ""
    return f"{row['implementation']} {digits(row['median_us'])}{doubt}", f"../{address(cell.run)}#row-{row_id(row)}"
