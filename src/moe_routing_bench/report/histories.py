"""The page of a run's rows over earlier runs: every row with its times then and now, verdicts, and a picture of the ratios."""

from collections.abc import Sequence
from pathlib import Path

from moe_routing_bench.comparison.history import History
from moe_routing_bench.comparison.verdicts import UNDECIDED
from moe_routing_bench.quantities import times, us
from moe_routing_bench.report import page
from moe_routing_bench.report.document import Dot
from moe_routing_bench.report.pictures import picture

_HOLLOW = ("same", UNDECIDED)


def render(rows: Sequence[History], earlier: Sequence[str], last: str, out: Path) -> None:
    """Write them to `out`; those that changed in some run come first, the largest change before the others. `earlier` and `last` name the runs."""
    ordered = sorted(rows, key=lambda one: -max((abs(then.ratio - 1) for then in one.then if then.verdict not in _HOLLOW), default=0))  # fmt: skip
    changed = sum(any(then.verdict not in _HOLLOW for then in one.then) for one in rows)
    lines = [(one, {then.run: then for then in one.then}, _picture(one)) for one in ordered]
    page.write("histories.html.j2", out, times=times, us=us, lines=lines, earlier=earlier, last=last, changed=changed)


def _picture(one: History) -> str:
    """The ratios, oldest first; hollow where the change is not told."""
    dots = [
        Dot(then.run, then.ratio, then.low, then.high, hollow=then.verdict in _HOLLOW, chosen=then.verdict not in _HOLLOW)
        for then in one.then
    ]  # fmt: skip
    return picture(dots, "times as fast now", "x", 1.0)
