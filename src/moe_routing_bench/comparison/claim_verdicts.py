"""Whether rows reproduce figures that others published, and hold our own. Pure functions; no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_routing_bench.config import axes
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.claims import UNITS, Check, Claim
from moe_routing_bench.statistics import gmean

REPRODUCED, NOT, ABSENT, NOT_RUNNABLE = "reproduced", "not reproduced", "no rows", "not runnable"
HELD, NOT_HELD = "held", "not held"  # of our own figures
VERDICTS = (NOT, REPRODUCED, NOT_HELD, HELD, ABSENT, NOT_RUNNABLE)  # in the order of a page
_OF_THE_ROUTING = ("drop_rate", "token_drop_rate", "load_cv", "load_max_over_mean", "load_gini", "gate_entropy")
_JOIN = {"gmean": gmean, "min": np.min, "max": np.max, "median": np.median}
_GPU = re.compile(r"\b[A-Z]{1,2}\d{2,3}S?\b")  # H100, GB200, L40S; not HBM3
_SMALLER_IS_BETTER = ("us", "ms")


@dataclass(frozen=True)
class Held:
    """A claim compared with rows: the verdict, our value in the unit of the claim (NaN without one), of how many cells, and why."""

    claim: Claim
    verdict: str
    ours: float = float("nan")
    cells: int = 0
    why: str = ""


def held(claims: Sequence[Claim], rows: pd.DataFrame, cpu: bool = False) -> list[Held]:
    """Each claim compared with the rows of one platform, in the order of the claims; `cpu`: it is a CPU, whose times count for none."""
    ok = rows[rows["status"] == "ok"]
    return [_held(claim, rows, ok, cpu) for claim in claims]


def _held(claim: Claim, rows: pd.DataFrame, ok: pd.DataFrame, cpu: bool) -> Held:
    """A claim compared with the rows that are `ok`; the others say why there are none."""
    check = claim.check
    if check is None:
        return Held(claim, NOT_RUNNABLE, why=claim.reason)
    if cpu and check.column not in _OF_THE_ROUTING:
        return Held(claim, ABSENT, why="a time on a CPU says nothing of it")
    mine = matching(ok, check, check.implementation)
    if mine.empty:
        return Held(claim, ABSENT, why=_absence(rows, check))
    values = mine.set_index(_card(mine))[check.column].astype(float)
    if check.against:
        other = matching(ok, check, check.against)
        if other.empty:
            return Held(claim, ABSENT, why=_absence(rows, check, check.against))
        values = (other.set_index(_card(other))[check.column].astype(float) / values).dropna()
    values = values.dropna() * UNITS[claim.unit]
    if values.empty or (len(values) > 1 and check.over is None):
        return Held(claim, ABSENT, cells=len(values), why=f"{len(values)} cells match, and one is meant")
    ours = float(_JOIN[check.over or "median"](values))
    near, far = (HELD, NOT_HELD) if claim.own else (REPRODUCED, NOT)
    return Held(claim, near if reproduced(claim, ours) else far, ours, len(values), _elsewhere(claim, mine))


def _elsewhere(claim: Claim, rows: pd.DataFrame) -> str:
    """That the claim names a GPU which is not that of the rows; empty where it is, or where one of the two is not known."""
    named, held = (
        set(_GPU.findall(text)) for text in (claim.hardware or "", " ".join(rows["gpu_name"].dropna().unique()))
    )
    if not named or not held or named & held:
        return ""
    return f"the claim is of {' and '.join(sorted(named))}, the rows are of {' and '.join(sorted(held))}"


def reproduced(claim: Claim, ours: float) -> bool:
    """Whether a value in the unit of the claim is as near as it asks, or better where that counts."""
    better = ours <= claim.figure if claim.unit in _SMALLER_IS_BETTER else ours >= claim.figure
    return abs(ours / claim.figure - 1) <= claim.within or (claim.at_least and better)


def matching(rows: pd.DataFrame, check: Check, implementation: str) -> pd.DataFrame:
    """The rows of an implementation with the axes of a check; an axis that is `none` there has no value."""
    # `isin` looks texts up, where `==` compares them one by one: a quarter of the time, for each of many claims.
    found = rows.index[rows["bench"].isin([check.bench]) & rows["implementation"].isin([implementation])]
    for name, asked in check.axes.items():
        column, value = rows.loc[found, name], axes.spelled(AXES[name], asked)
        found = found[column.isna() if value is None or value == "none" else column == value]
    return rows.loc[found]


def _card(rows: pd.DataFrame) -> list[pd.Series]:
    """What two rows of one comparison agree in: the cell, and the card that it was measured on."""
    return [rows["cell"], rows["gpu_uuid"].fillna("")]


def _absence(rows: pd.DataFrame, check: Check, name: str = "") -> str:
    """Why there is no row with a time: there is none at all, or it has another status."""
    others = matching(rows, check, name or check.implementation)
    if others.empty:
        return "not measured"
    first = others.iloc[0]
    return f"{first['implementation']} is {first['status']}: {first['reason']}"
