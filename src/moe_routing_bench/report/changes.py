"""The page of a comparison of two runs: every row with both times, their ratio and the verdict on it."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from moe_routing_bench.report import page


def render(rows: pd.DataFrame, marks: Sequence[str], names: tuple[str, str], out: Path) -> None:
    """Write the rows of a `comparison.runs.Comparison` to `out`, in the order given; `names` are those of the two runs."""
    counts = [(name, int(n)) for name, n in rows["verdict"].value_counts().items()]
    page.write(
        "changes.html.j2",
        out,
        names=names,
        marks=marks,
        counts=counts,
        rows=[_shown(row) for row in rows.to_dict("records")],
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
