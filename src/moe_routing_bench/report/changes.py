"""The page of a comparison of two runs: every row with both times, their ratio and the verdict on it."""

from pathlib import Path

import pandas as pd

from moe_routing_bench.comparison.runs import Comparison
from moe_routing_bench.report import page


def render(found: Comparison, names: tuple[str, str], out: Path) -> None:
    """Write a comparison to `out`, what changed most first; `names` are those of the two runs."""
    page.write(
        "changes.html.j2",
        out,
        names=names,
        marks=found.marks,
        across=found.across,
        counts=list(found.counts().items()),
        rows=[_shown(row) for row in found.changed().to_dict("records")],
    )


def _shown(row: dict) -> dict[str, str]:
    """The texts of a row; a missing number is a dash."""
    known = {name: f"{row[name]:.4g}" if pd.notna(row[name]) else "–" for name in ("before_us", "after_us", "ratio")}
    if pd.notna(row["ratio_ci_low"]):
        known["ratio"] += f" ({row['ratio_ci_low']:.4g} to {row['ratio_ci_high']:.4g})"
    reason = row["reason"] if isinstance(row["reason"], str) else ""
    return (
        {name: str(row[name]) for name in ("bench", "implementation", "cell", "verdict")} | known | {"reason": reason}
    )
