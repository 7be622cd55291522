"""What the part of the page that answers questions is given besides the rows: how axes compare, who reads them, sizes of models."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes
from moe_routing_bench.config.axes import AXES, PRESET, Axis

_FIRST = ("tokens", "hidden", "intermediate", "experts", "top_k", "phase", "dtype", "skew", "capacity_factor")
_FREE = ("model", "phase", "dtype", "sampler")  # any value answers where the reader names none
_LEFT_OUT = ("seed", "shared_gate")
_WHOLE = ("model",)  # benches of whole models, whose sizes do not say all; elsewhere a model is a label of its sizes


def questions(frame: pd.DataFrame, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the page's script on questions reads, fit for JSON.

    `axes` in the order of the form, `reads` the axes of each bench, `measured` the benches with rows, and of each of the
    `models` what its preset sets.
    """
    order = ["model", *_FIRST, *(name for name in AXES if name not in ("model", *_FIRST, *_LEFT_OUT))]
    return {
        "axes": [_asked(AXES[name], frame) for name in order],
        "reads": {
            name: [one.name for one in axes.of(bench.axes) if one.name != "model" or name in _WHOLE]
            for name, bench in BENCHES.items()
        },
        "measured": [name for name in BENCHES if name in set(frame["bench"])],
        "models": {name: {key: sizes[key] for key in PRESET} for name, sizes in models.items()},
    }


def _asked(axis: Axis, frame: pd.DataFrame) -> dict[str, Any]:
    """How the page asks for an axis. `scale`: by what two values differ, octaves (`log`), units (`linear`) or not at all (`name`)."""
    known = [axis.kind(one) for one in sorted(frame[axis.name].dropna().unique())]
    return {
        "name": axis.name, "label": axis.prefix if axis.prefix.isupper() or axis.prefix == "k" else axis.name.replace("_", " "), "says": axis.summary,
        "scale": "name" if axis.kind is str else "linear" if axis.least == 0 else "log", "default": axis.default, "follows": axis.follows,
        "free": axis.name in _FREE, "none": axis.optional, "first": axis.name in _FIRST, "known": known,
    }  # fmt: skip
