"""What a bar is: a figure that was fixed before kernels were written, the cells that it is about, and how rows of a cell show it. No torch."""

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.comparison import ratios
from moe_routing_bench.comparison.ratios import Estimate
from moe_routing_bench.config.axes import AXES, PRESET

Row = Mapping[Hashable, Any]
PLATFORM = "nvidia-h200"

Values = Mapping[str, object]


@dataclass(frozen=True)
class Figure:
    """What the rows of one cell say: an estimate, the rows that it was made of, and their names in words.

    `timed` has the interval of the times alone. Figures with a `group` are shown as the range of each group. `second` is a second figure of the
    same unit, which decides nothing.
    """

    timed: Estimate
    rows: Sequence[Row]
    says: str = ""
    group: str = ""
    second: float | None = None

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The figure with its interval, which is wider by as much as the ceilings drifted in its cells where that makes rows suspect.

        It is not where rows of one cell are compared, as in `verdicts`: they took turns, and no ceiling is in their ratio.
        """
        drifts = {row["cell_hash"]: row["calibration_drift"] for row in self.rows if ratios.drifted_alone(row)}
        return self.timed if self._compared else ratios.widened(self.timed, list(drifts.values()))

    @functools.cached_property
    def suspect(self) -> bool:
        """Whether a time is suspect for a reason other than calibration drift, whose size is known."""
        return any(row["suspect"] is True and not ratios.drifted_alone(row) for row in self.rows)

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


class Cells:
    """Rows by the values of their axes, for many queries of the same rows: each comparison is made once."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows = rows
        known = {
            name: rows[axis.follows] if axis.follows else axis.default
            for name, axis in AXES.items()
            if axis.follows or axis.default is not None or axis.optional
        }
        absent = {name: rows[name].isna().to_numpy() for name in known}
        self._usual = {
            name: one if one.all() else one | (rows[name] == known[name]).to_numpy() for name, one in absent.items()
        }
        self._having: dict[tuple[str, object], np.ndarray] = {}

    def of(self, values: Values) -> pd.DataFrame:
        """The rows with these values, and the default of every other axis that has one. None: any value; a tuple: one of several.

        What a model sets has any value where one is named.
        """
        masks = [self._with(name, one) for name, one in values.items() if one is not None]
        free = {*values, *(PRESET if values.get("model") else ())}
        masks += [one for name, one in self._usual.items() if name not in free]
        return self._rows[np.logical_and.reduce(masks)]

    def _with(self, name: str, value: object) -> np.ndarray:
        """Whether each row (n,) has the value, or one of the values, of an axis."""
        if (name, value) not in self._having:
            several = value if isinstance(value, tuple) else (value,)
            self._having[name, value] = self._rows[name].isin(several).to_numpy()
        return self._having[name, value]


@dataclass(frozen=True)
class Side:
    """Where a figure has to lie: `sign` stands before a bound, `ideal` is the best of all figures.

    A figure is on the right side of a bound where it is no further from the ideal: with an ideal of 1, up to the bound and down to as far below 1.
    """

    sign: str
    ideal: float

    def off(self, value: float) -> float:
        """What has to be as small as it is for the bound."""
        return abs(value - self.ideal) if math.isfinite(self.ideal) else -math.copysign(1, self.ideal) * value

    def best(self, one: Estimate) -> float:
        """The value of the interval that is the best."""
        return min(max(self.ideal, one.low), one.high)

    def worst(self, one: Estimate) -> float:
        """The value of the interval that is the worst."""
        return max(one.low, one.high, key=self.off)


AT_LEAST, AT_MOST, WITHIN = Side("≥", math.inf), Side("≤", -math.inf), Side("within", 1.0)


@dataclass(frozen=True)
class Level:
    """What has to be reached: in the mean, and in each cell, of which every one may have its own bound; None: whatever it is."""

    mean: float | None = None
    each: float | tuple[float, ...] | None = None

    def bounds(self, cells: int) -> Sequence[float | None]:
        """The bound of each of so many cells."""
        return self.each if isinstance(self.each, tuple) else (self.each,) * cells


@dataclass(frozen=True)
class Unit:
    """How figures are printed: what is taken from them, what they are multiplied with, and what stands behind."""

    less: float = 0.0
    times: float = 1.0
    name: str = "x"
    digits: int = 3

    def number(self, value: float) -> str:
        """A measured figure without the unit; one that rounds to zero has no sign."""
        return f"{round(self.times * (value - self.less), self.digits) + 0.0:.{self.digits}f}"

    def bound(self, value: float) -> str:
        """A bound with the unit: a round number."""
        return f"{round(self.times * (value - self.less), 9):g}{self.name}"

    def measured(self, one: Estimate) -> str:
        """A figure with its interval, where it has one."""
        known = not (math.isnan(one.low) or math.isnan(one.high))
        ends = f"{self.number(one.low)}, {self.number(one.high)}" if known else "no interval"
        return f"{self.number(one.value)}{self.name} [{ends}]"


MICROSECONDS = Unit(name=" µs", digits=2)
PERCENT, PERCENT_MORE = Unit(times=100, name=" %", digits=1), Unit(less=1, times=100, name=" %", digits=1)


@dataclass(frozen=True)
class Bar:
    """A bar of a bench over some of its cells.

    `cells` are labels and the values of their axes; None: every cell that was measured, of the rows that `among` leaves. `figure` says
    what the rows of a cell with a time show, or None where one of those that it compares is absent; it is also given rows of `others`,
    which are benches and the values of their axes. Figures are joined by `mean`, which is called `joined`; `second` is how the second
    figure of a cell is called.
    """

    what: str
    bench: str
    figure: Callable[[Sequence[Row]], Figure | None]
    level: Level
    stretch: Level = Level()
    cells: Mapping[str, Values] | None = None
    among: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows
    others: Mapping[str, Values] = field(default_factory=dict)
    side: Side = AT_LEAST
    mean: Callable[[Sequence[Estimate]], Estimate] = ratios.gmean
    joined: str = "in the geometric mean"
    unit: Unit = Unit()
    second: str = ""

    def words(self, level: Level) -> str:
        """A level in words, such as ``≥ 1.05x, each ≥ 0.95x``; a dash for none."""
        known = [self.unit.bound(one) for one in dict.fromkeys(level.bounds(1)) if one is not None]
        parts = [f"{self.side.sign} {self.unit.bound(level.mean)} {self.joined}"] if level.mean is not None else []
        alone = self.cells is not None and len(self.cells) == 1
        parts += [f"{'' if alone else 'each '}{self.side.sign} {', '.join(known)}"] if known else []
        return ", ".join(parts) or "–"
