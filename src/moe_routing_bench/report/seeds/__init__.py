"""Seed documents, replayed: what each publishes and what a run of its config measured, in columns that are never mixed.

The published figures and their sources are those of config/seeds/published.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.quantities import digits
from moe_routing_bench.report.parts import ABSENT
from moe_routing_bench.store import companions, paths
from moe_routing_bench.store.project_files import shipped


def folder() -> Path:
    """Where the files lie: in the checkout, or in what comes with a wheel."""
    return shipped(paths.PUBLISHED)


def sources() -> dict[str, Any]:
    """The authors, place, hardware and boundary of the times of every file."""
    return read_mapping(folder() / "sources.yaml")


def figures(name: str) -> pd.DataFrame:
    """The rows of one file, in its order."""
    return companions.table(folder() / f"{name}.csv")


def divisor(published: Mapping[str, int], measured: Mapping[str, int]) -> int | None:
    """What sizes were divided by, the same whole number for each, to measure them at a reduced size; None where there is none."""
    found = {published[name] / size for name, size in measured.items()}
    return int(found.pop()) if len(found) == 1 and all(one >= 1 and one == int(one) for one in found) else None


def number(value: float | None, unit: str = "") -> str:
    """Four digits, or all of a large whole part, and the unit; a dash where there is no number."""
    if value is None or math.isnan(value):
        return ABSENT
    return digits(value) + unit


def ratio(of: float | None, over: float | None) -> float:
    """One over the other; NaN where one of them is missing."""
    return math.nan if of is None or over is None else of / over


def gain(value: float) -> float:
    """A ratio of times as a gain of calls per second in per cent."""
    return 100 * (value - 1)
