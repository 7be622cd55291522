"""What skew, a capacity factor and quantised weights cost in time: ratios of cells that are equal otherwise and were measured on one card.

A headline is silent where the intervals, and what the ceilings of two processes may differ by, allow that nothing changed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.config import axes
from moe_routing_bench.figures import row_groups
from moe_routing_bench.figures.formats import fastest as fastest_of_formats
from moe_routing_bench.figures.formats import with_quantised
from moe_routing_bench.quantities import count, times
from moe_routing_bench.report.document import Dot, Picture, Sentence, pictured
from moe_routing_bench.report.row_data import row_id
from moe_routing_bench.report.words import SIZES, shape

Pair = tuple[dict[Any, Any], dict[Any, Any]]
_READ = [
    "bench",
    "implementation",
    *axes.AXES,
    *("median_us", "ci_low_us", "ci_high_us", "gpu_uuid", "host"),
]
_APART = "not comparable: measured on different cards"
DRIFT = 0.02  # what the ceilings of two processes may differ by without making their rows suspect


def pairs(rows: pd.DataFrame, axis: str) -> tuple[list[Pair], int]:
    """The rows of lowest and highest `axis` among those of one card that are equal in all else.

    Also how many sets of equal rows have their lowest and highest on different cards. A missing value stands last.
    """
    if rows[axis].nunique(dropna=False) < 2:
        return [], 0
    sets = rows.groupby(["bench", "implementation", *axes.names(without=[axis])], dropna=False).ngroup()
    value = pd.factorize(rows[axis], use_na_sentinel=False)[0]
    rows = _several(rows[_READ].assign(set=sets, card=row_groups.card(rows), value=value), "set")
    rows = rows.sort_values(["set", axis], kind="stable")
    lowest, highest = rows.drop_duplicates("set"), rows.drop_duplicates("set", keep="last")
    own = _several(rows, "set", "card")
    low, high = own.drop_duplicates(["set", "card"]), own.drop_duplicates(["set", "card"], keep="last")
    high = low[["set", "card"]].merge(high, on=["set", "card"])  # in the order of the others
    apart = lowest["card"].to_numpy() != highest["card"].to_numpy()
    return list(zip(low.to_dict("records"), high.to_dict("records"), strict=True)), int(apart.sum())


def _several(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """The rows that agree in `by` with one of another value."""
    return rows[rows.groupby(list(by), sort=False)["value"].transform("nunique") > 1]


def cost_of_skew(ok: pd.DataFrame) -> str:
    """Time at the highest skew over time at the lowest, on cells that are equal otherwise, without a capacity limit."""
    rows = ok[ok["skew"].notna() & ok["capacity_factor"].isna()]

    def line(low: float, high: float, chosen: list[Pair]) -> str:
        return f"at skew {high:g} over {low:g} {_ratios(chosen)}"

    parts = _parts(rows, "skew", lambda pair: True, line)
    if not parts:
        return "Cost of skew without a capacity limit: not measured."
    return f"Cost of skew: median ratio of times at the higher over the lower skew, for the widest range that one card measured, on cells equal otherwise and without a capacity limit: {'; '.join(parts)}."


def cost_of_capacity(ok: pd.DataFrame) -> str:
    """Time with the lowest capacity factor over time without a limit, on cells that are equal otherwise."""

    def line(low: float, high: float, chosen: list[Pair]) -> str:
        skew = chosen[0][0]["skew"]
        said = "" if pd.isna(skew) else f" and skew {skew:g}"
        return f"at factor {low:g}{said} {_ratios([(free, tight) for tight, free in chosen])}"

    parts = _parts(ok, "capacity_factor", lambda pair: bool(pd.isna(pair[1]["capacity_factor"])), line)
    if not parts:
        return "Time with a capacity factor against none: not measured."
    return f"Time with a capacity factor: median ratio of times at a factor (the lowest that a card measured beside no limit) over no limit, on cells equal otherwise: {'; '.join(parts)}."


def _parts(
    rows: pd.DataFrame, axis: str, counts: Callable[[Pair], bool], line: Callable[[float, float, list[Pair]], str]
) -> list[str]:
    """What each bench that reads the axis has to say: its pairs of the widest range, or why there are none."""
    parts = []
    for bench in row_groups.reading(axis):
        found, apart = pairs(rows[rows["bench"] == bench], axis)
        ranges = [(low[axis], np.inf if pd.isna(high[axis]) else high[axis]) for low, high in filter(counts, found)]
        others = f"{count(apart, 'pair')} {_APART}" if apart else ""
        if ranges:
            widest = max(ranges, key=lambda ends: (ends[1] - ends[0], -ends[0]))
            chosen = [pair for pair, ends in zip(filter(counts, found), ranges, strict=True) if ends == widest]
            said = [line(*widest, equal) for equal in _by_skew(chosen, axis)]
            parts.append(f"{bench} {', '.join(said)}" + (f", and {others}" if others else ""))
        elif others:
            parts.append(f"{bench} {others}")
    return parts


def _by_skew(chosen: list[Pair], axis: str) -> list[list[Pair]]:
    """The pairs of each skew apart, in rising order: what a capacity costs depends on it. Together where the skew is what differs."""
    if axis == "skew":
        return [chosen]
    skews = sorted({low["skew"] for low, _ in chosen if pd.notna(low["skew"])})
    apart = [[pair for pair in chosen if pair[0]["skew"] == skew] for skew in skews]
    rest = [pair for pair in chosen if pd.isna(pair[0]["skew"])]
    return [*apart, *([rest] if rest else [])]


def _ratios(found: list[Pair]) -> str:
    """Median and range of second over first, how many are told apart, and in what the pairs differ."""
    ratios = [high["median_us"] / low["median_us"] for low, high in found]
    slower = sum(high["ci_low_us"] > low["ci_high_us"] for low, high in found)
    quicker = sum(high["ci_high_us"] < low["ci_low_us"] for low, high in found)
    number = row_groups.differing(pd.DataFrame([low for low, _ in found]), count(len(found), "pair"))
    told = f"{slower} slower and {quicker} faster with disjoint intervals"
    return f"{np.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x; {number}: {told})"


def formats(table: pd.DataFrame) -> Sentence | None:
    """The share of time that our implementations take with quantised weights: the median over the formats that one card measured together with unquantised weights.

    No row is compared within its cell here, so one that did not converge takes part, with the interval that it has.
    """
    known = table[(table["suspect"].fillna(False) != True) & table["ci_low_us"].notna() & table["ci_high_us"].notna()]  # noqa: E712
    ours = fastest_of_formats(with_quantised(known))
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
    labels = row_groups.labels(pd.DataFrame([one for one, _ in found]))
    dots = [Dot(label, *_over(*pair), chosen=pair[0] is one) for pair, label in zip(found, labels, strict=True)]
    return Sentence(
        text, f"row-{row_id(one.to_dict())}", pictured(dots, "time over that with unquantised weights", "x", 1.0)
    )


def skew(rows: pd.DataFrame) -> Sentence | None:
    """What the widest range of skew costs the implementation that is fastest without it, in the largest batch of the widest bench."""
    free = rows[rows["skew"].notna() & rows["capacity_factor"].isna() & (rows["converged"] != False)]  # noqa: E712
    found = []
    for bench in reversed(row_groups.reading("skew")):
        found = pairs(free[free["bench"] == bench], "skew")[0]
        if found:
            break
    if not found:
        return None
    low, high = min(
        found, key=lambda pair: (pair[0]["skew"] - pair[1]["skew"], -pair[0]["tokens"], pair[0]["median_us"])
    )
    cost, least, most = _over(high, low)
    if _unchanged(least, most):
        return None
    ratio = times(cost, least, most)
    text = f"{low['bench']}: at skew {high['skew']:g} {low['implementation']} takes {ratio} its time at skew {low['skew']:g}, in cells equal otherwise on one card, at {shape(low)}."
    same = "+".join(f"{name}%3D{int(low[name])}" for name in SIZES if pd.notna(low[name]))
    return Sentence(
        text,
        f"rows?filter=bench%3D{low['bench']}+implementation%3D{low['implementation']}+{same}+capacity_factor%3Anone&sort=skew",
        _between(free, low, high),
    )


def _over(row: pd.Series, base: pd.Series) -> tuple[float, float, float]:
    """The ratio of two times, as wide as both intervals make it."""
    return (
        row["median_us"] / base["median_us"],
        row["ci_low_us"] / base["ci_high_us"],
        row["ci_high_us"] / base["ci_low_us"],
    )


def _unchanged(least: float, most: float) -> bool:
    """Whether an interval of a ratio, and what ceilings may differ by, allow that nothing changed."""
    return most >= 1 / (1 + DRIFT) and least <= 1 + DRIFT


def _between(rows: pd.DataFrame, low: pd.Series, high: pd.Series) -> Picture | None:
    """The times at every skew that the card of `low` measured in cells equal to it otherwise, over its own."""
    fixed = ["bench", "implementation", *axes.names(without=["skew"])]
    alike = rows[row_groups.card(rows) == row_groups.card(pd.DataFrame([low])).iloc[0]]
    for name in fixed:
        alike = alike[alike[name].isna() if pd.isna(low[name]) else alike[name] == low[name]]
    steps = alike[alike["skew"] > low["skew"]].drop_duplicates("skew").sort_values("skew")
    dots = [
        Dot(f"skew {row['skew']:g}", *_over(row, low), chosen=row["skew"] == high["skew"])
        for _, row in steps.iterrows()
    ]
    return pictured(dots, f"time over that at skew {low['skew']:g}", "x", 1.0)
