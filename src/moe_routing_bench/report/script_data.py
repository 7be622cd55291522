"""What the page's scripts are given besides the rows: the marks of figures, with the colours of light and dark pages, and how axes are asked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.answers import nearest
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes
from moe_routing_bench.config.axes import AXES, PRESET, Axis
from moe_routing_bench.figures import palette
from moe_routing_bench.figures.chart import Chart, Scale, legend_of_doubts
from moe_routing_bench.report.packing import packed
from moe_routing_bench.report.row_data import row_id

_DIGITS = 5
_NUMBERS = ("x_low", "x_high", "low", "high")
_FIRST = ("tokens", "hidden", "intermediate", "experts", "top_k", "phase", "dtype", "skew", "capacity_factor")
_FREE = ("model", "phase", "dtype", "sampler")  # any value answers where the reader names none
_LEFT_OUT = ("seed", "shared_gate")
_WHOLE = ("model",)  # benches of whole models, whose sizes do not say all; elsewhere a model is a label of its sizes


def chart_data(chart: Chart, provenance: str = "") -> dict[str, Any]:
    """Scales, legend and marks; a column that no mark has a value in is left out. `row` is the id of the row that a mark is of.

    `own` are the scales, and the reference, of panels that have others, `from` says on what machine and of how many rows (`provenance`).
    """
    marks, symbols = chart.marks, palette.symbols(chart.colors)
    columns: dict[str, Sequence[Any]] = {
        "panel": [str(one) for one in marks["panel"]],
        "series": [str(one) for one in marks["series"]],
        "x": [_value(one) for one in marks["x"]],
        "y": [_value(one) for one in marks["y"]],
        **{name: [_value(one) for one in marks[name]] for name in _NUMBERS if marks[name].notna().any()},
    }
    for name in ("says", "text", "aside", "join", *(["doubt"] if chart.timed else [])):
        if marks[name].notna().any():
            columns[name] = [None if pd.isna(one) else str(one) for one in marks[name]]
    if marks["bench"].notna().any():
        columns["row"] = [row_id(one) for one in marks[["bench", "cell", "implementation"]].to_dict("records")]
    return {
        "kind": chart.kind,
        **_axes(chart.x, chart.y),
        "own": {panel: _axes(*scales) | _reference(chart, panel) for panel, scales in chart.own.items()},
        "reference": chart.reference,
        "shared": chart.shared,
        "level": chart.level,
        "from": provenance,
        "note": "; ".join(filter(None, (chart.note, legend_of_doubts(chart)))),
        "legend": [
            {
                "name": name,
                "light": tint,
                "dark": palette.dark(tint),
                "symbol": "square" if chart.kind in ("bars", "matrix") else symbols[name],
            }
            for name, tint in chart.colors.items()
        ],
        "marks": {name: packed(values) for name, values in columns.items()},
        "count": len(marks),
    }


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


def questions(frame: pd.DataFrame, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the page's script on questions reads, fit for JSON. Axes of ranks are asked for where a row has a value.

    `axes` in the order of the form, `rule` how far apart names are (`answers.nearest`), `reads` the axes of each bench, `measured` the benches with rows, and of each of the
    `models` what its preset sets.
    """
    absent = [axis.name for axis in AXES.values() if axis.sparse and not axis.shared and frame[axis.name].isna().all()]
    order = ["model", *_FIRST, *(name for name in AXES if name not in ("model", *_FIRST, *_LEFT_OUT, *absent))]
    return {
        "axes": [_asked(AXES[name], frame) for name in order],
        "reads": {
            name: [one.name for one in axes.of(bench.axes) if one.name != "model" or name in _WHOLE]
            for name, bench in BENCHES.items()
        },
        "rule": {
            "far": nearest.FAR,
            "octaves": nearest.RULE,
            "of": {name: nearest.rules(name) for name in BENCHES},
        },
        "measured": [name for name in BENCHES if name in set(frame["bench"])],
        "models": {name: {key: sizes[key] for key in PRESET} for name, sizes in models.items()},
    }


def _asked(axis: Axis, frame: pd.DataFrame) -> dict[str, Any]:
    """How the page asks for an axis. `scale`: by what two values differ, octaves (`log`), units (`linear`) or not at all (`name`); `exact`: it must match."""
    known = [axis.kind(one) for one in sorted(frame[axis.name].dropna().unique())]
    return {
        "name": axis.name,
        "label": axis.prefix if axis.prefix.isupper() or axis.prefix == "k" else axis.name.replace("_", " "),
        "says": axis.summary,
        "scale": "name" if axis.kind is str else "linear" if axis.least == 0 else "log",
        "default": axis.default,
        "follows": axis.follows,
        "free": axis.name in _FREE,
        "exact": nearest.of_ranks(axis.name),
        "none": axis.optional,
        "first": axis.name in _FIRST,
        "known": known,
    }
