"""The figures that the page draws itself: their marks as data, by column, with the colours of light and dark pages."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import pandas as pd

from moe_routing_bench.figures import (
    backward,
    bandwidth,
    capacity_bits,
    colors,
    crossover,
    decode,
    format_limits,
    formats,
    limits,
    loss_seconds,
    over_tokens,
    padding,
    quality_pareto,
    roofline,
    speedup,
    stage_share,
    training_curves,
    training_load_cv,
    verdict_matrix,
)
from moe_routing_bench.figures.chart import Chart
from moe_routing_bench.figures.plain import SHAPES, shape
from moe_routing_bench.report.rows import packed, row_id

CHARTS: Mapping[str, Callable[[pd.DataFrame], Chart]] = {
    one.__name__.rpartition(".")[2]: one.chart
    for one in (
        bandwidth, over_tokens, crossover, formats, format_limits, decode, limits, verdict_matrix, padding, backward, stage_share, speedup, roofline,
        quality_pareto, loss_seconds, capacity_bits, training_curves, training_load_cv,
    )
}  # fmt: skip
LIBRARY = resources.files("moe_routing_bench.report").joinpath("vendor/plot.js")
_DIGITS = 5
_NUMBERS = ("x_low", "x_high", "low", "high")


def charts(tables: Mapping[str, pd.DataFrame | None], sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Of each figure in `sources` (its name and that of its table) that the page can draw and that has marks, its data, fit for JSON."""
    found = {name: CHARTS[name](table) for name, source in sources.items() if name in CHARTS and (table := tables.get(source)) is not None}  # fmt: skip
    return {name: data(one) for name, one in found.items() if len(one.marks)}


def data(chart: Chart) -> dict[str, Any]:
    """Scales, legend and marks; a column that no mark has a value in is left out. `row` is the id of the row that a mark is of."""
    marks = chart.marks
    columns: dict[str, Sequence[Any]] = {
        "panel": [str(one) for one in marks["panel"]],
        "series": [str(one) for one in marks["series"]],
        "x": [_value(one) for one in marks["x"]],
        "y": [_value(one) for one in marks["y"]],
        **{name: [_value(one) for one in marks[name]] for name in _NUMBERS if marks[name].notna().any()},
    }
    for name in ("says", "join"):
        if marks[name].notna().any():
            columns[name] = [None if pd.isna(one) else str(one) for one in marks[name]]
    if marks["bench"].notna().any():
        columns["row"] = [row_id(one) for one in marks[["bench", "cell", "implementation"]].to_dict("records")]
    return {
        "kind": chart.kind,
        "x": {"label": chart.x.label, "kind": chart.x.kind},
        "y": {"label": chart.y.label, "kind": chart.y.kind},
        "reference": chart.reference,
        "note": chart.note,
        "legend": [{"name": name, "light": tint, "dark": colors.dark(tint), "symbol": "square" if chart.kind in ("bars", "matrix") else SHAPES[shape(chart, name)]} for name, tint in chart.colors.items()],
        "marks": {name: packed(values) for name, values in columns.items()},
        "count": len(marks),
    }  # fmt: skip


def library() -> str:
    """The charting library as the page embeds it."""
    return LIBRARY.read_text(encoding="utf-8")


def _value(value: Any) -> Any:
    """A name as text; a number with five digits, missing where it is none."""
    if isinstance(value, str):
        return value
    if pd.isna(value) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
