"""Runs of one rule that differ in one thing, as data for the page: a line per seed, and means over seeds with their intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.figures import colors, quality_rows
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks

SEED = "runs of one seed"


def records(panel: str, rows: pd.DataFrame, key: str, names: Sequence[str], column: str) -> list[dict[str, Any]]:
    """The marks of one rule: `column` by the value of `key`, in the order of `names`."""
    router = rows["router"].iloc[0]
    by_seed = rows.pivot_table(index="seed", columns=key, values=column)[list(names)]
    found = [
        {"panel": panel, "series": SEED, "x": name, "y": value, "says": f"seed {seed}", "join": str(seed)}
        for name in names
        for seed, value in by_seed[name].dropna().items()
    ]
    for name in names:
        mean, half = quality_rows.interval(by_seed[name])
        says = f"mean over n = {by_seed[name].notna().sum()} seeds"
        found.append({"panel": panel, "series": router, "x": name, "y": mean, "low": mean - half, "high": mean + half, "says": says, "join": name})  # fmt: skip
    return found


def chart(
    found: list[dict[str, Any]], x: Scale, y: Scale, shown: pd.DataFrame, own: Mapping[str, tuple[Scale, Scale]]
) -> Chart:
    """A chart of such marks; `own` as in `Chart`."""
    routers = dict.fromkeys(one["series"] for one in found if one["series"] != SEED)
    tints = {SEED: colors.OTHER} | {name: quality.color(name) for name in routers}
    return Chart("lines", x, y, marks(found), tints, shown, own=own)
