"""Which bars stored rows reach, with intervals. Pure functions; no torch.

Rows of several runs, cards or versions of the code are never pooled: each has a line of its own. A row that has no time takes no part,
nor does a cell with a compared row that is suspect for a reason of unknown size (a drift of the ceilings widens the interval); both
are counted, and what would be with the suspect cells is said, but decides nothing.

"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pandas as pd

from moe_routing_bench.comparison.ratios import Estimate
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import row_groups
from moe_routing_bench.report.bars import PLATFORM, Bar, Cells, Figure, Level, Row
from moe_routing_bench.report.parts import BarLine

REACHED, STRETCH, MISSED, OPEN, ABSENT = "reached", "reached, and the stretch", "missed", "open", "not measured"
APART = "not comparable"  # what a cell compares was measured, but not by one card and version of the code
WITHIN_NOISE, NO_INTERVAL = ", within noise", ", no interval"  # the interval holds the bar; there is none
_NONE = "–"
# What rows are told apart by, also by bars' `among`. What else they have is looked up in records: taking rows of all columns takes most of the time.
_KEYS = [*AXES, "bench", "implementation", "status", "gpu_uuid", "host", "code_fingerprint", "compulsory_bytes"]
_FEW = 6  # cells that are all shown


class _Columns(dict[Hashable, list[Any]]):
    """The columns of rows as lists, each made when it is asked for: bars look at few of some 170."""

    def __init__(self, rows: pd.DataFrame) -> None:
        super().__init__()
        self.rows = rows

    def __missing__(self, name: Hashable) -> list[Any]:
        self[name] = self.rows[name].tolist()
        return self[name]


class _Record(Mapping[Hashable, Any]):
    """A row whose columns are shared by all rows: a dict of so many takes three times the memory."""

    __slots__ = ("_columns", "_place")

    def __init__(self, columns: _Columns, place: int) -> None:
        """`place` is that of the row in each column."""
        self._columns, self._place = columns, place

    def __getitem__(self, name: Hashable) -> Any:
        """The value of a column."""
        return self._columns[name][self._place]

    def __iter__(self) -> Iterator[Hashable]:
        """The names of the columns."""
        return iter(self._columns.rows)

    def __len__(self) -> int:
        """How many columns there are."""
        return self._columns.rows.shape[1]


@dataclass(frozen=True)
class _Run:
    """Rows of this platform, by the name of their run."""

    name: str
    rows: pd.DataFrame

    @functools.cached_property
    def _columns(self) -> _Columns:
        return _Columns(self.rows)

    @functools.cached_property
    def keys(self) -> pd.DataFrame:
        """What the rows are told apart by, once for all bars; the index is their place among the rows."""
        keys = self.rows[_KEYS].reset_index(drop=True)
        return keys.astype(dict.fromkeys(keys.select_dtypes("str"), object))  # Arrow's are slow to take

    def of(self, bench: str) -> pd.DataFrame:
        return self.keys[self.keys["bench"] == bench]

    def records(self, places: Iterable[int]) -> list[Row]:
        """Rows by their place."""
        return [_Record(self._columns, place) for place in places]


def lines(bars: Iterable[Bar], tables: Mapping[str, pd.DataFrame], absent: bool = False) -> list[BarLine]:
    """A line per bar, and per run, card and code of which there are rows; `tables` are rows by the name of their run.

    With `absent` also of bars without any. None on another platform, nor of a run that has too few of a bar's cells where another decides.
    """
    runs = [_Run(name, _of_platform(rows)) for name, rows in tables.items()]
    found = []
    for bar in bars:
        of_it = [line for run in runs for line in _of_run(bar, run)]
        if not of_it and absent:
            of_it = [_line(bar, _NONE, f"0 of {len(bar.cells)}" if bar.cells else "0", _NONE, ABSENT, "")]
        found += without_too_few(of_it)
    return found


def _of_platform(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of this platform: mostly all, of which a copy would take much memory."""
    own = rows["platform"] == PLATFORM
    return rows if own.all() else rows[own]


def without_too_few(lines: list[BarLine]) -> list[BarLine]:
    """The lines of a bar without those of runs that have too few of its cells to decide it, where another run decides."""
    decided = any(one.verdict not in (OPEN, APART) for one in lines)
    return [one for one in lines if not (decided and one.verdict == OPEN and one.left_out == _NONE)]


def _of_run(bar: Bar, run: _Run) -> Iterable[BarLine]:
    """The lines of one bar in one run, one for each card and version of the code."""
    mine = bar.among(run.of(bar.bench))
    lost = mine[mine["status"] != "ok"]
    if len(lost) == len(mine):  # as in most runs, which have few benches
        return
    rows = pd.concat([mine, *(Cells(run.of(name)).of(one) for name, one in bar.others.items())])
    ok = rows[rows["status"] == "ok"]
    groups = [(key, found) for key, one in _comparable(ok) if (found := _figures(bar, one, run))]
    for (card, code), found in groups:
        apart = f", {card}, code {code}" if len(groups) > 1 else ""
        yield _judged(bar, found, _of_bar(bar, lost), f"{run.name}{apart}".removeprefix(", "))
    if not groups and (found := _figures(bar, ok, run)):
        said = f"{APART}: measured on different cards or by different code"
        yield _line(bar, said, f"0 of {len(bar.cells or found)}", _NONE, APART, run.name)


def _comparable(rows: pd.DataFrame) -> Iterable[tuple[tuple[str, str], pd.DataFrame]]:
    """Rows of one card and of one version of each bench, and what both are called."""
    for card, own in rows.groupby(row_groups.card(rows)):
        codes = own["code_fingerprint"].fillna("unknown")
        versions = [one.groupby(codes) for _, one in own.groupby("bench", sort=False)]
        for found in itertools.product(*versions):
            yield (str(card), ", ".join(str(code)[:8] for code, _ in found)), pd.concat([one for _, one in found])


def _figures(bar: Bar, rows: pd.DataFrame, run: _Run) -> dict[str, Figure]:
    """What the rows of each cell say, by its label; `rows` are the keys of rows of the run."""
    own, others = rows[rows["bench"] == bar.bench], rows.index[rows["bench"] != bar.bench]
    cells: dict[str, list[int]] = {}
    if bar.cells is None:
        for label, place in zip(row_groups.labels(own), own.index.tolist(), strict=True):
            cells.setdefault(label, []).append(place)
    else:
        known = Cells(own)
        cells = {name: places for name, values in bar.cells.items() if (places := known.of(values).index.tolist())}
    shared = run.records(others.tolist())
    found = {name: bar.figure([*run.records(places), *shared]) for name, places in cells.items()}
    return {name: one for name, one in found.items() if one is not None}


def _of_bar(bar: Bar, rows: pd.DataFrame) -> int:
    """How many of the rows are of the bar's cells."""
    if bar.cells is None or rows.empty:
        return len(rows)
    known = Cells(rows)
    return len({index for one in bar.cells.values() for index in known.of(one).index})


def _judged(bar: Bar, found: Mapping[str, Figure], lost: int, where: str) -> BarLine:
    """The line of a bar of which cells show these figures; `lost` rows have no time."""
    sure = {name: one for name, one in found.items() if not one.suspect}
    wanted = list(found if bar.cells is None else bar.cells)
    suspect = len(found) - len(sure)
    parts = [measured(bar, sure)] if sure else []
    if suspect and joined(bar, found) and not any(one.group for one in found.values()):
        parts.append(f"with the suspect cells: {measured(bar, found)}")
    elif suspect:
        parts.append(f"suspect: {measured(bar, {name: one for name, one in found.items() if name not in sure})}")
    left = [
        f"{what}: {number}" for what, number in (("suspect cells", suspect), ("rows without a time", lost)) if number
    ]
    return _line(
        bar, "; ".join(parts), f"{len(sure)} of {len(wanted)}", "; ".join(left), _verdict(bar, wanted, sure), where
    )


def _line(bar: Bar, measured: str, cells: str, left_out: str, verdict: str, where: str) -> BarLine:
    return BarLine(
        bar.what, bar.words(bar.level), bar.words(bar.stretch), measured, cells, left_out or _NONE, verdict, where
    )


def _verdict(bar: Bar, wanted: Sequence[str], found: Mapping[str, Figure]) -> str:
    """Whether a bar is reached: by the figures, and within noise where an end of the intervals says otherwise.

    A bound of each cell is missed as soon as one cell misses it; for anything else all cells are needed.
    """
    estimates = {name: one.estimate for name, one in found.items()}
    mean = bar.mean(list(estimates.values())) if found else None
    known = not any(math.isnan(one.low) or math.isnan(one.high) for one in estimates.values())

    def meets(level: Level, of: Callable[[Estimate], float]) -> bool:
        """Whether all bounds that can be judged are met by these values of the intervals."""
        return _meets(bar, level, wanted, {name: of(one) for name, one in estimates.items()}, mean and of(mean))

    whole = len(found) == len(wanted) and bool(found)
    level = bar.level if whole else Level(each=bar.level.each)
    value = attrgetter("value")
    met = meets(level, value)
    sure = met == meets(level, bar.side.best) == meets(level, bar.side.worst)
    doubt = NO_INTERVAL if not known else "" if sure else WITHIN_NOISE
    if not met:
        return MISSED + doubt
    if not whole:
        return OPEN
    return STRETCH if bar.stretch != Level() and meets(bar.stretch, value) else REACHED + doubt


def _meets(bar: Bar, level: Level, wanted: Sequence[str], values: Mapping[str, float], mean: float | None) -> bool:
    """Whether the figures of cells, and their mean, are all on the right side of the level's bounds."""
    pairs = [
        (values[name], bound) for name, bound in zip(wanted, level.bounds(len(wanted)), strict=True) if name in values
    ]
    pairs += [(mean, level.mean)] if mean is not None else []
    return all(bar.side.off(value) <= bar.side.off(bound) for value, bound in pairs if bound is not None)


def joined(bar: Bar, found: Mapping[str, Figure]) -> bool:
    """Whether a mean is shown and the extremes, as where the bar has a mean or the cells are many, and not every cell."""
    return bar.level.mean is not None or len(found) > _FEW


def measured(bar: Bar, found: Mapping[str, Figure]) -> str:
    """The figures of some cells: all of them, or the range of each group, or the mean and the extremes."""
    groups = {
        name: [one for one in found.values() if one.group == name]
        for name in sorted({one.group for one in found.values()} - {""})
    }
    if not groups and not joined(bar, found):
        return "; ".join(_cell(bar, name, one) for name, one in found.items())
    parts = [_range(bar, name, own) for name, own in groups.items()] or [_mean(bar, found)]
    return "; ".join([*parts, *_missing(bar, found)])


def _mean(bar: Bar, found: Mapping[str, Figure]) -> str:
    """The mean of cells, of what cells where these are not named, and the extremes."""
    compared = [row for one in found.values() for row in one.rows]
    rows = pd.DataFrame({name: [row[name] for row in compared] for name in AXES})
    over = f" of {row_groups.differing(rows, 'cells')}" if bar.cells is None and len(found) > 1 else ""
    mean = bar.unit.measured(bar.mean([one.estimate for one in found.values()]))
    ranked = sorted(found, key=lambda name: bar.side.off(found[name].estimate.value))
    ends = [f"{which}: {_cell(bar, name, found[name])}" for which, name in (("worst", ranked[-1]), ("best", ranked[0]))]
    return "; ".join([f"{mean} {bar.joined}{over}", *ends[: len(found)]])


def _range(bar: Bar, group: str, found: Sequence[Figure]) -> str:
    """The least and the most of a group's cells, and of their second figures where all cells have one."""
    ordered = sorted((one.estimate for one in found), key=lambda one: one.value)
    second = sorted(one.second for one in found if one.second is not None)
    said = " to ".join(dict.fromkeys(bar.unit.measured(one) for one in (ordered[0], ordered[-1])))
    if len(second) < len(found):
        return f"{group}: {said}"
    ends = " to ".join(dict.fromkeys(bar.unit.number(one) for one in (second[0], second[-1])))
    return f"{group}: {said} ({bar.second}: {ends}{bar.unit.name})"


def _missing(bar: Bar, found: Mapping[str, Figure]) -> list[str]:
    """How many cells miss a bound that is the same for each."""
    bound = bar.level.each
    if bound is None or isinstance(bound, tuple):
        return []
    missing = sum(bar.side.off(one.estimate.value) > bar.side.off(bound) for one in found.values())
    return [f"{missing} of {len(found)} miss the bar of each"] if missing else []


def _cell(bar: Bar, name: str, one: Figure) -> str:
    """What one cell shows."""
    second = f"{bar.second}: {bar.unit.number(one.second)}{bar.unit.name}" if one.second is not None else ""
    said = ", ".join(part for part in (one.says, second) if part)
    return f"{name}: {bar.unit.measured(one.estimate)}{f' ({said})' if said else ''}"
