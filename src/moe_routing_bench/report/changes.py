"""The page of a comparison of two runs: every row with both times, their ratio and the verdict on it."""

from pathlib import Path

import pandas as pd

from moe_routing_bench.comparison.runs import ONLY_AFTER, ONLY_BEFORE, Comparison
from moe_routing_bench.comparison.verdicts import SAME, UNDECIDED
from moe_routing_bench.quantities import times, us
from moe_routing_bench.report import page

_LATER = {SAME: 1, UNDECIDED: 1, ONLY_BEFORE: 2, ONLY_AFTER: 2}
_RATIO = ("ratio", "ratio_ci_low", "ratio_ci_high")


def render(found: Comparison, names: tuple[str, str], out: Path) -> None:
    """Write a comparison to `out`, what is told to have changed most first; `names` are those of the two runs."""
    rows = found.changed()
    rows = rows.iloc[rows["verdict"].map(_LATER).fillna(0).argsort(kind="stable")]
    page.write(
        "changes.html.j2",
        out,
        names=names,
        marks=found.marks,
        across=found.across,
        counts=list(found.counts().items()),
        rows=[_shown(row) for row in rows.to_dict("records")],
    )


def _shown(row: dict) -> dict[str, str]:
    """The texts of a row; a missing number is a dash."""
    known = {name: us(row[name], exact=True) if pd.notna(row[name]) else "–" for name in ("before_us", "after_us")}
    ratio = times(*(float(row[name]) for name in _RATIO)) if pd.notna(row["ratio"]) else "–"
    reason = row["reason"] if isinstance(row["reason"], str) else ""
    named = {name: str(row[name]) for name in ("bench", "implementation", "cell", "verdict")}
    return named | known | {"ratio": ratio, "reason": reason}
