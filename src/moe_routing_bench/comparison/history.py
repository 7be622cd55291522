"""The rows of a run over the runs before it: how much faster each is now than it was in every one of them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from moe_routing_bench.comparison import runs


@dataclass(frozen=True)
class Then:
    """A row in an earlier run: its time, that time over today's (above 1 is faster now) with its 95 % interval, and the verdict on the change."""

    run: str
    us: float
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class History:
    """A row of the last run, and what it was in those of the earlier ones that timed it, oldest first."""

    bench: str
    cell: str
    implementation: str
    us: float
    then: tuple[Then, ...]


def history(earlier: Mapping[str, pd.DataFrame], last: pd.DataFrame, across: bool = False) -> list[History]:
    """The rows of `last` that have a time there and in an earlier run, by its name, in the order of their benches and cells.

    Tables have the columns of `runs.COLUMNS`; verdicts are those of `runs.compare`, one pair of runs at a time. Raises `UserError` as it does.
    """
    found: dict[tuple, History] = {}
    for run, table in earlier.items():
        rows = runs.compare(table, last, across).rows
        for row in rows[rows["ratio"].notna()].to_dict("records"):
            key = tuple(row[name] for name in runs.KEYS)
            now = History(row["bench"], row["cell"], row["implementation"], row["after_us"], ())
            then = Then(
                run,
                row["before_us"],
                *(float(row[name]) for name in ("ratio", "ratio_ci_low", "ratio_ci_high")),
                row["verdict"],
            )
            before = found.get(key, now)
            found[key] = History(now.bench, now.cell, now.implementation, now.us, (*before.then, then))
    return sorted(found.values(), key=lambda one: (one.bench, one.cell, one.implementation))
