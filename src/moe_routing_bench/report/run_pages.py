"""The pages on several runs of one grid: the comparison of two, and the rows of a run over earlier ones."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from moe_routing_bench.comparison.runs import ONLY_AFTER, ONLY_BEFORE, Comparison, History
from moe_routing_bench.comparison.verdicts import SAME, UNDECIDED
from moe_routing_bench.quantities import times, us
from moe_routing_bench.report import page
from moe_routing_bench.report.document import Dot
from moe_routing_bench.report.pictures import picture

_LATER = {SAME: 1, UNDECIDED: 1, ONLY_BEFORE: 2, ONLY_AFTER: 2}
_RATIO = ("ratio", "ratio_ci_low", "ratio_ci_high")
_HOLLOW = ("same", UNDECIDED)


def write_changes(found: Comparison, names: tuple[str, str], out: Path) -> None:
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
        rows=[_change(row) for row in rows.to_dict("records")],
    )


def _change(row: dict) -> dict[str, str]:
    """The texts of a row; a missing number is a dash."""
    known = {name: us(row[name], exact=True) if pd.notna(row[name]) else "–" for name in ("before_us", "after_us")}
    ratio = times(*(float(row[name]) for name in _RATIO)) if pd.notna(row["ratio"]) else "–"
    reason = row["reason"] if isinstance(row["reason"], str) else ""
    named = {name: str(row[name]) for name in ("bench", "implementation", "cell", "verdict")}
    return named | known | {"ratio": ratio, "reason": reason}


def write_history(rows: Sequence[History], earlier: Sequence[str], last: str, out: Path) -> None:
    """Write them to `out`; those that changed in some run come first, the largest change before the others. `earlier` and `last` name the runs."""
    ordered = sorted(
        rows, key=lambda one: -max((abs(then.ratio - 1) for then in one.then if then.verdict not in _HOLLOW), default=0)
    )
    changed = sum(any(then.verdict not in _HOLLOW for then in one.then) for one in rows)
    lines = [(one, {then.run: then for then in one.then}, _picture(one)) for one in ordered]
    page.write("histories.html.j2", out, times=times, us=us, lines=lines, earlier=earlier, last=last, changed=changed)


def _picture(one: History) -> str:
    """The ratios, oldest first; hollow where the change is not told."""
    dots = [
        Dot(
            then.run,
            then.ratio,
            then.low,
            then.high,
            hollow=then.verdict in _HOLLOW,
            chosen=then.verdict not in _HOLLOW,
        )
        for then in one.then
    ]
    return picture(dots, "times as fast now", "x", 1.0)
