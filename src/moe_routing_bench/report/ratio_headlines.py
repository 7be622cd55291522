"""What a report says first of cells that are equal but for one thing: skew, or the format of the weights. Pure functions; no torch.

Silent where the intervals, and what the ceilings of two processes may differ by, allow that nothing changed.
"""

import pandas as pd

from moe_routing_bench.config import axes
from moe_routing_bench.figures import grouping
from moe_routing_bench.figures.formats import beside_quantised
from moe_routing_bench.figures.formats import fastest as fastest_of_formats
from moe_routing_bench.quantities import times
from moe_routing_bench.report.costs import pairs
from moe_routing_bench.report.document import Dot, Picture, Sentence, pictured
from moe_routing_bench.report.headline import SIZES, shape
from moe_routing_bench.report.rows import row_id

DRIFT = 0.02  # what the ceilings of two processes may differ by without making their rows suspect


def formats(table: pd.DataFrame) -> Sentence | None:
    """How much of the time ours take with quantised weights, of all formats that one card measured beside unquantised ones the middle one.

    No row is compared within its cell here, so one that did not converge takes part, with the interval that it has.
    """
    known = table[(table["suspect"].fillna(False) != True) & table["ci_low_us"].notna() & table["ci_high_us"].notna()]  # noqa: E712
    ours = fastest_of_formats(beside_quantised(known))
    found = []
    for _, group in ours.groupby(["shape", "tokens", "card"], sort=False):
        plain = group[group["format"] == group["dtype"]]
        others = group[group["weights"] != group["dtype"]] if len(plain) == 1 else group.iloc[:0]
        found += [(one, plain.iloc[0]) for _, one in others.iterrows()]
    if not found:
        return None
    found.sort(key=lambda pair: _over(*pair))
    one, plain = found[(len(found) - 1) // 2]
    ratio, least, most = _over(one, plain)
    if _unchanged(least, most):
        return None
    where = f", the median of {len(found)} formats and sizes" if len(found) > 1 else ""
    text = f"{one['bench']}: with weights of {one['format']}, {one['implementation']} takes {times(ratio, least, most)} the time of {plain['implementation']} with {plain['dtype']} (the fastest of ours or torch in each){where}, at {shape(one)}."
    labels = grouping.labels(pd.DataFrame([one for one, _ in found]))
    dots = [Dot(label, *_over(*pair), chosen=pair[0] is one) for pair, label in zip(found, labels, strict=True)]
    return Sentence(text, f"row-{row_id(one.to_dict())}", pictured(dots, "time over that with unquantised weights", "x", 1.0))  # fmt: skip


def skew(rows: pd.DataFrame) -> Sentence | None:
    """What the widest range of skew costs the implementation that is fastest without it, in the largest batch of the widest bench."""
    free = rows[rows["skew"].notna() & rows["capacity_factor"].isna() & (rows["converged"] != False)]  # noqa: E712
    found = []
    for bench in reversed(grouping.reading("skew")):
        found = pairs(free[free["bench"] == bench], "skew")[0]
        if found:
            break
    if not found:
        return None
    low, high = min(found, key=lambda pair: (pair[0]["skew"] - pair[1]["skew"], -pair[0]["tokens"], pair[0]["median_us"]))  # fmt: skip
    cost, least, most = _over(high, low)
    if _unchanged(least, most):
        return None
    ratio = times(cost, least, most)
    text = f"{low['bench']}: at skew {high['skew']:g} {low['implementation']} takes {ratio} its time at skew {low['skew']:g}, in cells equal otherwise on one card, at {shape(low)}."
    same = "+".join(f"{name}%3D{int(low[name])}" for name in SIZES if pd.notna(low[name]))
    return Sentence(text, f"rows?filter=bench%3D{low['bench']}+implementation%3D{low['implementation']}+{same}+capacity_factor%3Anone&sort=skew", _between(free, low, high))  # fmt: skip


def _over(row: pd.Series, base: pd.Series) -> tuple[float, float, float]:
    """The ratio of two times, as wide as both intervals make it."""
    return row["median_us"] / base["median_us"], row["ci_low_us"] / base["ci_high_us"], row["ci_high_us"] / base["ci_low_us"]  # fmt: skip


def _unchanged(least: float, most: float) -> bool:
    """Whether an interval of a ratio, and what ceilings may differ by, allow that nothing changed."""
    return most >= 1 / (1 + DRIFT) and least <= 1 + DRIFT


def _between(rows: pd.DataFrame, low: pd.Series, high: pd.Series) -> Picture | None:
    """The times at every skew that the card of `low` measured in cells equal to it otherwise, over its own."""
    fixed = ["bench", "implementation", *axes.names(without=["skew"])]
    alike = rows[grouping.card(rows) == grouping.card(pd.DataFrame([low])).iloc[0]]
    for name in fixed:
        alike = alike[alike[name].isna() if pd.isna(low[name]) else alike[name] == low[name]]
    steps = alike[alike["skew"] > low["skew"]].drop_duplicates("skew").sort_values("skew")
    dots = [Dot(f"skew {row['skew']:g}", *_over(row, low), chosen=row["skew"] == high["skew"]) for _, row in steps.iterrows()]  # fmt: skip
    return pictured(dots, f"time over that at skew {low['skew']:g}", "x", 1.0)
