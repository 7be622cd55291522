"""What the rows of one cell show of a bar: an estimate, and the rows that it was made of. No torch."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moe_routing_bench.comparison import ratios
from moe_routing_bench.comparison.ratios import Estimate

_DRIFT = "ceilings drifted"  # how a worker's reason begins

Row = Mapping[Hashable, Any]


@dataclass(frozen=True)
class Figure:
    """What the rows of one cell say: an estimate, the rows that it was made of, and their names in words.

    `timed` has the interval of the times alone. Figures with a `group` are shown as the range of each group. `beside` is a second figure of the
    same unit, which decides nothing.
    """

    timed: Estimate
    rows: Sequence[Row]
    says: str = ""
    group: str = ""
    beside: float | None = None

    @property
    def estimate(self) -> Estimate:
        """The figure with its interval, which is wider by as much as the ceilings drifted in its cells where that makes rows suspect.

        It is not where rows of one cell are compared, as in `verdicts`: they took turns, and no ceiling is in their ratio.
        """
        drifts = {row["cell_hash"]: row["calibration_drift"] for row in self.rows if _drifted_alone(row)}
        return self.timed if self._compared else ratios.widened(self.timed, list(drifts.values()))

    @property
    def suspect(self) -> bool:
        """Whether something speaks against one of the times of which nobody knows the size, as one does of a drift."""
        return any(row["suspect"] is True and not _drifted_alone(row) for row in self.rows)

    @property
    def _compared(self) -> bool:
        """Whether it is the ratio of rows of one cell."""
        return len(self.rows) > 1 and len({row["cell_hash"] for row in self.rows}) == 1


def fastest(rows: Sequence[Row], names: Callable[[str], bool]) -> Row | None:
    """The row with the least time among the implementations for which `names` holds."""
    return min((row for row in rows if names(row["implementation"])), key=lambda row: row["median_us"], default=None)


def against(ours: Collection[str], others: Callable[[str], bool], rows: Sequence[Row]) -> Figure | None:
    """The time of the fastest of `others` over that of the fastest of ours."""
    own, other = fastest(rows, lambda name: name in ours), fastest(rows, others)
    if own is None or other is None:
        return None
    return Figure(ratios.speed(other, own), (own, other), f"{own['implementation']}, {other['implementation']}")


def own_figure(
    column: str, estimate: Callable[[Row, str], Estimate], ours: Collection[str], rows: Sequence[Row]
) -> Figure | None:
    """What a column of the fastest of ours says: `ratios.share` or `ratios.multiple`."""
    own = fastest([row for row in rows if not pd.isna(row[column])], lambda name: name in ours)
    return None if own is None else Figure(estimate(own, column), (own,), own["implementation"])


def uneven(ours: Collection[str], rows: Sequence[Row]) -> Figure | None:
    """The time with uneven loads over that with even ones, of the implementation that is the fastest of ours with even ones: nothing that
    a choice is made by knows the loads."""
    even = fastest([row for row in rows if not row["skew"]], lambda name: name in ours)
    if even is None:
        return None
    own = fastest([row for row in rows if row["skew"]], lambda name: name == even["implementation"])
    return None if own is None else Figure(ratios.speed(own, even), (even, own), own["implementation"])


def _drifted_alone(row: Row) -> bool:
    """Whether a row is suspect, and for nothing but a drift of the ceilings."""
    return row["suspect"] is True and all(one.startswith(_DRIFT) for one in str(row["suspect_reason"]).split("; "))
