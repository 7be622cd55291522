"""A figure as data: marks on two scales, in panels. The page draws them with hover and switches, `paper` draws the same for print."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette
from moe_routing_bench.quantities import count

TOKENS = "tokens"  # label of an axis whose ticks are the numbers that were measured
KINDS = ("lines", "points", "dots", "bars", "matrix")
_OPTIONAL = (
    "x_low",
    "x_high",
    "low",
    "high",
    "says",
    "text",
    "aside",
    "bench",
    "cell",
    "implementation",
    "join",
    "doubt",
)
DOUBTFUL, WARM, WARM_CACHE = "doubtful", "warm", "L2 may be warm"
_REQUIRED = ("panel", "series", "x", "y")


@dataclass(frozen=True)
class Scale:
    """What an axis shows. `kind`: linear, log, or names, whose order is that of the marks."""

    label: str
    kind: str = "linear"


@dataclass(frozen=True)
class Chart:
    """Marks of one `kind`: lines and points have an interval of y (`low`, `high`), points one of x, too; dots have one of x; bars reach from low to high,
    and have an interval (`x_low`, `x_high`) at their end.

    Columns of `marks`: panel, series, x, y and, where known, x_low, x_high, low, high, says (in words), bench, cell, implementation (the
    row), join (which points of a series a line joins; of kind points: which lie on one front), text (what is written in a bar or cell, or
    next to a point, where it has room), doubt (why the time of the row is to be doubted, see `doubts`) and aside (what is written at the end of its line of names). `colors` are those of the series, in the
    order of the legend. `shown` are the rows that the marks are of, for the line on where numbers come from; `reason` says why there are no
    marks. `own` are the scales (x, y) of panels that have others than the chart. `named`: there are so many series that each panel names
    its own at its right. `shared`: panels of one x-scale have the same ends; `level`: so have those of one y-scale. `timed`: it shows times or speeds, of which a CPU's say little.
    """

    kind: str
    x: Scale
    y: Scale
    marks: pd.DataFrame
    colors: Mapping[str, str]
    shown: pd.DataFrame
    reference: float | None = None
    reason: str = ""
    note: str = field(default="", kw_only=True)
    own: Mapping[str, tuple[Scale, Scale]] = field(default_factory=dict, kw_only=True)
    named: bool = field(default=False, kw_only=True)
    shared: bool = field(default=False, kw_only=True)
    level: bool = field(default=False, kw_only=True)
    timed: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """Raises ValueError for a kind that nothing draws, and for marks without a column that all have."""
        if self.kind not in KINDS:
            raise ValueError(f"a chart is one of {KINDS}, not {self.kind!r}")
        if missing := [name for name in _REQUIRED if name not in self.marks]:
            raise ValueError(f"marks lack {missing}")

    def scales(self, panel: str) -> tuple[Scale, Scale]:
        """The scales of x and y in a panel."""
        return self.own.get(panel, (self.x, self.y))

    def reference_in(self, panel: str) -> float | None:
        """The reference of a panel, which lies across x for dots and bars; none where a logarithmic axis has no place for it."""
        across = self.scales(panel)[0 if self.kind in ("dots", "bars") else 1]
        nowhere = self.reference is not None and self.reference <= 0 and across.kind == "log"
        return None if nowhere else self.reference


def marks(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Marks with all columns, missing where a record has none."""
    return pd.DataFrame(records, columns=[*_REQUIRED, *_OPTIONAL])


MOST_POINTS = 5_000  # of a chart of points: of more, those that would cover each other are one
_ACROSS, _UP = 128, 96  # places of a panel, each as large as a point


def thinned(marks: pd.DataFrame, scales: Callable[[str], tuple[Scale, Scale]]) -> tuple[pd.DataFrame, str]:
    """The marks of a chart of points without those that lie on another of their panel, series and look, and in words how many are left out."""
    if len(marks) <= MOST_POINTS:
        return marks, ""
    places = pd.DataFrame(index=marks.index, columns=["x", "y"], dtype=float)
    for panel, own in marks.groupby("panel", sort=False):
        for name, scale, steps in zip(("x", "y"), scales(str(panel)), (_ACROSS, _UP), strict=True):
            values = own[name].astype(float)
            values = np.log(values.where(values > 0)) if scale.kind == "log" else values
            width = values.max() - values.min()
            places.loc[own.index, name] = ((values - values.min()) / width * steps).round() if width > 0 else 0.0
    keys = places.assign(panel=marks["panel"], series=marks["series"], doubt=marks["doubt"])
    kept = marks[~keys.duplicated()]
    return kept, f"{len(marks) - len(kept):,} points that others cover are not drawn"


def row(record: Any) -> dict[str, Any]:
    """What names the row that a mark is of, and what speaks against its time."""
    return {name: record[name] for name in ("bench", "cell", "implementation")} | {"doubt": doubts(record)}


def doubts(record: Any) -> str | None:
    """What speaks against the time of a row, in words; None where nothing does. A CPU's caches are not judged."""
    known = {
        "suspect": record.get("suspect") == True,  # noqa: E712
        "not converged": record.get("converged") == False,  # noqa: E712
        WARM_CACHE: record.get("cold") == False and isinstance(record.get("gpu_name"), str),  # noqa: E712
    }
    return ", ".join(text for text, there in known.items() if there) or None


def look(chart: Chart, doubt: object) -> str:
    """How a mark is drawn: DOUBTFUL is hollow or pale, WARM (and nothing else) is small; empty for all others, and in charts without times."""
    if not chart.timed or not isinstance(doubt, str):
        return ""
    return WARM if doubt == WARM_CACHE else DOUBTFUL


def legend_of_doubts(chart: Chart) -> str:
    """What hollow and small marks mean, with their numbers; empty where there are none."""
    looks = [look(chart, doubt) for doubt in chart.marks["doubt"]]
    hollow = "pale" if chart.kind in ("bars", "matrix") else "hollow"
    small = "hatched" if chart.kind == "bars" else "with ‡" if chart.kind == "matrix" else "small"
    said = ((DOUBTFUL, f"{hollow}: suspect or not converged"), (WARM, f"{small}: {WARM_CACHE}"))
    return "; ".join(f"{text} ({count(looks.count(kind), 'mark')})" for kind, text in said if kind in looks)


MOST_SERIES = 6
NOT_CAUSAL = " \N{DAGGER}"  # after the name of a rule that looks at later tokens


def few(chart: Chart, preferred: Callable[[Chart], list[str]]) -> Chart:
    """The chart with at most MOST_SERIES series, each of another colour: one of each panel that would have none, then those that are preferred.

    Bars and matrices keep theirs, which are parts of a whole or classes of one number. A mark that is joined to a series, such as its best rate, goes with it.
    """
    if chart.kind in ("bars", "matrix"):
        return chart
    return _apart(chart if len(chart.colors) <= MOST_SERIES else _fewer(chart, preferred))


def _apart(chart: Chart) -> Chart:
    """The chart with a colour of its own for each series: a table of implementations has more names than there are colours."""
    colors, free = {}, [tint for tint in palette.PALETTE if tint not in chart.colors.values()]
    for name, tint in chart.colors.items():
        colors[name] = free.pop(0) if tint in colors.values() else tint
    return chart if colors == chart.colors else replace(chart, colors=colors)


def _fewer(chart: Chart, preferred: Callable[[Chart], list[str]]) -> Chart:
    order, shown, kept = preferred(chart), chart.shown, set()
    bare = {name: name.removesuffix(NOT_CAUSAL) for name in order}
    columns = [one for one in ("implementation", "contestant", "router") if one in shown]
    names_of = {one: {name: str(name).removesuffix(NOT_CAUSAL) for name in shown[one].unique()} for one in columns}
    known = {one: set(names.values()) for one, names in names_of.items()}
    column = next((one for one, there in known.items() if there & set(bare.values())), None)
    measured = {
        name for name in order if column is None or bare[name] in known[column]
    }  # the others are such as a roof
    for there in sorted((set(group["series"]) for _, group in chart.marks.groupby("panel", sort=False)), key=len):
        wanted = there & measured or there
        if not wanted & kept and len(kept) < MOST_SERIES:
            kept.add(next(name for name in order if name in wanted))
    kept |= set([name for name in order if name not in kept][: MOST_SERIES - len(kept)])
    names = {bare[name] for name in kept}
    rows = [name for name, own in names_of.get(column or "", {}).items() if own in names]
    note = f"{len(kept)} of {len(chart.colors)} series, the others are in the tables"
    return replace(
        chart,
        marks=chart.marks[chart.marks["series"].isin(kept) & ~chart.marks["join"].isin(set(chart.colors) - kept)],
        colors={name: tint for name, tint in chart.colors.items() if name in kept},
        shown=shown if column is None else shown[shown[column].isin(rows)],
        note="; ".join(filter(None, (chart.note, note))),
    )


def nothing(kind: str, x: Scale, y: Scale, rows: pd.DataFrame, reason: str) -> Chart:
    """A chart without marks, and why."""
    return Chart(kind, x, y, marks([]), {}, rows.iloc[:0], reason=reason)
