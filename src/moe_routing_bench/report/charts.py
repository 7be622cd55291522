"""The figures that the page draws itself: their marks as data, by column, with the colours of light and dark pages."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.figures import palette
from moe_routing_bench.figures.chart import Chart, Scale
from moe_routing_bench.report.packing import packed
from moe_routing_bench.report.rows import row_id

_DIGITS = 5
_NUMBERS = ("x_low", "x_high", "low", "high")


def data(chart: Chart, provenance: str = "") -> dict[str, Any]:
    """Scales, legend and marks; a column that no mark has a value in is left out. `row` is the id of the row that a mark is of.

    `own` are the scales, and the reference, of panels that have others, `from` says on what machine and of how many rows (`provenance`).
    """
    marks = chart.marks
    columns: dict[str, Sequence[Any]] = {
        "panel": [str(one) for one in marks["panel"]],
        "series": [str(one) for one in marks["series"]],
        "x": [_value(one) for one in marks["x"]],
        "y": [_value(one) for one in marks["y"]],
        **{name: [_value(one) for one in marks[name]] for name in _NUMBERS if marks[name].notna().any()},
    }
    for name in ("says", "text", "aside", "join"):
        if marks[name].notna().any():
            columns[name] = [None if pd.isna(one) else str(one) for one in marks[name]]
    if marks["bench"].notna().any():
        columns["row"] = [row_id(one) for one in marks[["bench", "cell", "implementation"]].to_dict("records")]
    return {
        "kind": chart.kind,
        **_axes(chart.x, chart.y),
        "own": {panel: _axes(*scales) | _reference(chart, panel) for panel, scales in chart.own.items()},
        "reference": chart.reference,
        "from": provenance,
        "note": chart.note,
        "legend": [{"name": name, "light": tint, "dark": palette.dark(tint), "symbol": "square" if chart.kind in ("bars", "matrix") else palette.symbol(name, i)} for i, (name, tint) in enumerate(chart.colors.items())],
        "marks": {name: packed(values) for name, values in columns.items()},
        "count": len(marks),
    }  # fmt: skip


def _reference(chart: Chart, panel: str) -> dict[str, float | None]:
    """The reference of a panel where it is not that of the chart."""
    own = chart.reference_in(panel)
    return {} if own == chart.reference else {"reference": own}


def _axes(x: Scale, y: Scale) -> dict[str, dict[str, str]]:
    return {"x": {"label": x.label, "kind": x.kind}, "y": {"label": y.label, "kind": y.kind}}


def _value(value: Any) -> Any:
    """A name as text; a number with five digits, missing where it is none."""
    if isinstance(value, str):
        return value
    if pd.isna(value) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
