"""The figures of a bar's cells in words: all of them, the range of each group, or the mean and the extremes. Pure functions; no torch."""

from collections.abc import Mapping, Sequence

import pandas as pd

from moe_routing_bench.figures import grouping
from moe_routing_bench.report.bar_figures import Figure
from moe_routing_bench.report.bars import Bar

_FEW = 6  # cells that are all shown


def joined(bar: Bar, found: Mapping[str, Figure]) -> bool:
    """Whether a mean is shown and the extremes, as where the bar has a mean or the cells are many, and not every cell."""
    return bar.level.mean is not None or len(found) > _FEW


def measured(bar: Bar, found: Mapping[str, Figure]) -> str:
    """The figures of some cells: all of them, or the range of each group, or the mean and the extremes."""
    groups = {name: [one for one in found.values() if one.group == name] for name in sorted({one.group for one in found.values()} - {""})}  # fmt: skip
    if not groups and not joined(bar, found):
        return "; ".join(_cell(bar, name, one) for name, one in found.items())
    parts = [_range(bar, name, own) for name, own in groups.items()] or [_mean(bar, found)]
    return "; ".join([*parts, *_missing(bar, found)])


def _mean(bar: Bar, found: Mapping[str, Figure]) -> str:
    """The mean of cells, of what cells where these are not named, and the extremes."""
    rows = pd.DataFrame([row for one in found.values() for row in one.rows])
    over = f" of {grouping.differing(rows, 'cells')}" if bar.cells is None and len(found) > 1 else ""
    mean = bar.unit.measured(bar.mean([one.estimate for one in found.values()]))
    ranked = sorted(found, key=lambda name: bar.side.off(found[name].estimate.value))
    ends = [f"{which}: {_cell(bar, name, found[name])}" for which, name in (("worst", ranked[-1]), ("best", ranked[0]))]
    return "; ".join([f"{mean} {bar.joined}{over}", *ends[: len(found)]])


def _range(bar: Bar, group: str, found: Sequence[Figure]) -> str:
    """The least and the most of a group's cells, and of what stands beside them where all cells have it."""
    ordered = sorted((one.estimate for one in found), key=lambda one: one.value)
    beside = sorted(one.beside for one in found if one.beside is not None)
    said = " to ".join(dict.fromkeys(bar.unit.measured(one) for one in (ordered[0], ordered[-1])))
    if len(beside) < len(found):
        return f"{group}: {said}"
    ends = " to ".join(dict.fromkeys(bar.unit.number(one) for one in (beside[0], beside[-1])))
    return f"{group}: {said} ({bar.beside}: {ends}{bar.unit.name})"


def _missing(bar: Bar, found: Mapping[str, Figure]) -> list[str]:
    """How many cells miss a bound that is the same for each."""
    bound = bar.level.each
    if bound is None or isinstance(bound, tuple):
        return []
    missing = sum(bar.side.off(one.estimate.value) > bar.side.off(bound) for one in found.values())
    return [f"{missing} of {len(found)} miss the bar of each"] if missing else []


def _cell(bar: Bar, name: str, one: Figure) -> str:
    """What one cell shows."""
    beside = f"{bar.beside}: {bar.unit.number(one.beside)}{bar.unit.name}" if one.beside is not None else ""
    said = ", ".join(part for part in (one.says, beside) if part)
    return f"{name}: {bar.unit.measured(one.estimate)}{f' ({said})' if said else ''}"
