"""Which bars stored rows reach, with intervals. Pure functions; no torch.

Rows of several runs, cards or versions of the code are never pooled: each has a line of its own. A row that has no time takes no part,
and a cell one of whose compared rows is suspect neither; both are counted, and what would be with the suspect cells is said, but
decides nothing.
"""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from moe_routing_bench.figures import grouping
from moe_routing_bench.report.bars import PLATFORM, Bar, Figure, Level, Line, of_cell, usual

REACHED, STRETCH, MISSED, OPEN, ABSENT = "reached", "reached, and the stretch", "missed", "open", "not measured"
WITHIN_NOISE = ", within noise"  # the interval holds the bar
_ENDS = ("value", "low", "high")
_FEW = 6  # cells that are all shown


def lines(bars: Iterable[Bar], tables: Mapping[str, pd.DataFrame], absent: bool = False) -> list[Line]:
    """A line per bar, and per run, card and code of which there are rows; `tables` are rows by the name of their run.

    With `absent` also of bars without any. None on another platform.
    """
    ours = {run: rows[rows["platform"] == PLATFORM] for run, rows in tables.items()}
    found = []
    for bar in bars:
        of_it = [line for run, rows in ours.items() for line in _of_run(bar, run, rows)]
        if not of_it and absent:
            of_it = [_line(bar, "–", f"0 of {len(bar.cells)}" if bar.cells else "0", "–", ABSENT, "")]
        found += of_it
    return found


def _of_run(bar: Bar, run: str, rows: pd.DataFrame) -> Iterable[Line]:
    """The lines of one bar in one run, one for each card and version of the code."""
    rows = bar.among(rows[rows["bench"] == bar.bench])
    ok, lost = rows[rows["status"] == "ok"], rows[rows["status"] != "ok"]
    codes = ok["code_fingerprint"].fillna("")
    groups = [(key, found) for key, one in ok.groupby([grouping.card(ok), codes]) if (found := _figures(bar, one))]
    for (card, code), found in groups:
        apart = f", {card}, code {code[:8]}" if len(groups) > 1 else ""
        yield _judged(bar, found, _of_bar(bar, lost), f"{run}{apart}".removeprefix(", "))


def _figures(bar: Bar, rows: pd.DataFrame) -> dict[str, Figure]:
    """What the rows of each cell say, by its label."""
    if bar.cells is None:
        cells = {str(name): one for name, one in rows.groupby(grouping.labels(rows), sort=False)}
    else:
        having = usual(rows)
        cells = {name: own for name, one in bar.cells.items() if len(own := of_cell(rows, one, having))}
    records = dict(zip(rows.index, rows.to_dict("records"), strict=True)) if cells else {}  # once: it is slow
    found = {name: bar.figure([records[i] for i in one.index]) for name, one in cells.items()}
    return {name: one for name, one in found.items() if one is not None}


def _of_bar(bar: Bar, rows: pd.DataFrame) -> int:
    """How many of the rows are of the bar's cells."""
    if bar.cells is None or rows.empty:
        return len(rows)
    having = usual(rows)
    return len({index for one in bar.cells.values() for index in of_cell(rows, one, having).index})


def _judged(bar: Bar, found: Mapping[str, Figure], lost: int, where: str) -> Line:
    """The line of a bar of which cells show these figures; `lost` rows have no time."""
    sure = {name: one for name, one in found.items() if not one.suspect}
    wanted = list(found if bar.cells is None else bar.cells)
    suspect = len(found) - len(sure)
    parts = [_measured(bar, sure)] if sure else []
    if suspect and _joined(bar, found):
        parts.append(f"with the suspect cells: {_measured(bar, found)}")
    elif suspect:
        parts.append(f"suspect: {_measured(bar, {name: one for name, one in found.items() if name not in sure})}")
    left = [
        f"{what}: {number}" for what, number in (("suspect cells", suspect), ("rows without a time", lost)) if number
    ]
    return _line(
        bar, "; ".join(parts), f"{len(sure)} of {len(wanted)}", "; ".join(left), _verdict(bar, wanted, sure), where
    )


def _line(bar: Bar, measured: str, cells: str, left_out: str, verdict: str, where: str) -> Line:
    return Line(
        bar.what, bar.words(bar.level), bar.words(bar.stretch), measured, cells, left_out or "–", verdict, where
    )


def _joined(bar: Bar, found: Mapping[str, Figure]) -> bool:
    """Whether a mean is shown and the worst cell, as where the bar has a mean or the cells are many, and not every cell."""
    return bar.level.mean is not None or len(found) > _FEW


def _measured(bar: Bar, found: Mapping[str, Figure]) -> str:
    """The figures of some cells."""
    if not _joined(bar, found):
        return "; ".join(_cell(bar, name, one) for name, one in found.items())
    mean = bar.unit.measured(bar.mean([one.estimate for one in found.values()]))
    worst = (max if bar.at_most else min)(found, key=lambda name: found[name].estimate.value)
    return f"{mean} {bar.joined}; worst: {_cell(bar, worst, found[worst])}"


def _cell(bar: Bar, name: str, one: Figure) -> str:
    """What one cell shows."""
    return f"{name}: {bar.unit.measured(one.estimate)}{f' ({one.says})' if one.says else ''}"


def _verdict(bar: Bar, wanted: Sequence[str], found: Mapping[str, Figure]) -> str:
    """Whether a bar is reached: by the figures, and within noise where an end of the intervals says otherwise.

    A bound of each cell is missed as soon as one cell misses it; for anything else all cells are needed.
    """
    ends = [{name: getattr(one.estimate, end) for name, one in found.items()} for end in _ENDS]
    mean = bar.mean([one.estimate for one in found.values()]) if found else None

    def meets(level: Level) -> tuple[bool, bool]:
        """Whether all bounds that can be judged are met, and whether both ends of the intervals agree."""
        said = [
            _meets(bar, level, wanted, values, mean and getattr(mean, end))
            for end, values in zip(_ENDS, ends, strict=True)
        ]
        return said[0], len(set(said)) == 1

    whole = len(found) == len(wanted) and bool(found)
    met, sure = meets(bar.level if whole else Level(each=bar.level.each))
    if not met:
        return MISSED + WITHIN_NOISE * (not sure)
    if not whole:
        return OPEN
    further = meets(bar.stretch)[0] and bar.stretch != Level()
    return STRETCH if further else REACHED + WITHIN_NOISE * (not sure)


def _meets(bar: Bar, level: Level, wanted: Sequence[str], values: Mapping[str, float], mean: float | None) -> bool:
    """Whether the figures of cells, and their mean, are all on the right side of the level's bounds."""
    pairs = [(values[name], bound) for name, bound in zip(wanted, level.bounds(len(wanted)), strict=True) if name in values]  # fmt: skip
    pairs += [(mean, level.mean)] if mean is not None else []
    return all(value <= bound if bar.at_most else value >= bound for value, bound in pairs if bound is not None)
