"""Rows over all stored states of a platform's runs: each time that a kernel took in a cell, and the steps between them. No torch.

A state is the file of a run's rows today, or as an earlier commit has it. A measurement that several states hold counts once. Each measurement is
compared with the one before it by the rule of `runs.compare`: all pairs of a platform are one family, and a step exceeds the noise floors and the
drift of the ceilings. Two cards of one kind may differ by more, so a step between cards is marked, and stands next to what kernels of other packages
did between the same two cards.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins, runs, verdicts
from moe_routing_bench.comparison.verdicts import FASTER, SLOWER
from moe_routing_bench.quantities import count, significant, times, us

_SHOWN = ("suspect", "converged", "cold", "gpu_name", "gpu_uuid")
COLUMNS = (*dict.fromkeys((*runs.COLUMNS, "started_at", "git_sha", "ci_low_us", "ci_high_us", *_SHOWN)),)
CHANGED = (FASTER, SLOWER)
_KEY, _NONE = list(runs.KEYS), float("nan")
_USUAL = re.compile(r"-(cfnone|skew0|exact|compact|seed\d+)(?=-|$)")  # of a cell's key, what a title can do without


@dataclass(frozen=True)
class Point:
    """A measurement. `ratio`: the time before it over this one (above 1 is faster now), with its interval; NaN for the first, which has no verdict.

    `row` has what may speak against the time. `moved`: the measurement before was on another card, or a card is not known.
    """

    run: str
    started: str
    commit: str
    us: float
    low: float
    high: float
    row: dict[str, Any] = field(default_factory=dict)
    ratio: float = _NONE
    ratio_low: float = _NONE
    ratio_high: float = _NONE
    verdict: str = ""
    moved: bool = False

    @property
    def card(self) -> str:
        """The serial number of the card; empty where it is not known."""
        return self.row["gpu_uuid"] if isinstance(self.row.get("gpu_uuid"), str) else ""


@dataclass(frozen=True)
class Line:
    """What one implementation took in one cell, oldest first: two measurements or more."""

    bench: str
    cell: str
    implementation: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Step:
    """A change beyond noise between two measurements that follow each other. `others`: the median ratio of `count` other implementations with
    kernels of other packages, in the same cell between the same two cards; NaN where there is none."""

    line: Line
    before: Point
    after: Point
    others: float = _NONE
    count: int = 0


def lines(states: Iterable[tuple[str, pd.DataFrame]]) -> list[Line]:
    """The rows that were measured more than once, by bench, cell and implementation. `states` are names of runs of one platform, each with the rows of
    one state, which have the columns of `COLUMNS`; of equal measurements the last counts."""
    tables = [timed for run, rows in states if len(timed := _timed(run, rows))]
    if not tables:
        return []
    every = pd.concat(tables).reset_index().drop_duplicates([*_KEY, "started_at", "median_us"], keep="last")
    several = every[every.duplicated(_KEY, keep=False)].sort_values([*_KEY, "started_at"], kind="stable")
    groups = [list(same) for _, same in groupby(several.to_dict("records"), lambda row: [row[name] for name in _KEY])]
    judged = _judged([two for rows in groups for two in pairwise(rows)])
    found = [_line(rows, judged) for rows in groups]
    return sorted(found, key=lambda one: (one.bench, one.cell, one.implementation))


def steps(found: Iterable[Line]) -> list[Step]:
    """All steps, the latest first."""
    pairs = [(line, *two) for line in found for two in pairwise(line.points)]
    foreign: dict[tuple[str, ...], dict[str, float]] = {}
    for line, before, after in pairs:
        if not is_ours(line):
            between = foreign.setdefault((line.bench, line.cell, before.card, after.card), {})
            between[line.implementation] = after.ratio
    result = []
    for line, before, after in pairs:
        if after.verdict in CHANGED:
            between = foreign.get((line.bench, line.cell, before.card, after.card), {})
            ratios = [ratio for name, ratio in between.items() if name != line.implementation]
            result.append(Step(line, before, after, median(ratios) if ratios else _NONE, len(ratios)))
    return sorted(result, key=lambda one: one.after.started, reverse=True)


def is_ours(line: Line) -> bool:
    """Whether a line is of a kernel of this project."""
    return line.implementation in origins.ours(line.bench)


def longest(lines: Sequence[Line], most: int) -> dict[str, list[Line]]:
    """The cell of each bench whose lines have most measurements, by its name: benches with most stages first, `most` of them."""
    of_cell: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        of_cell.setdefault((line.bench, line.cell), []).append(line)
    best: dict[str, list[Line]] = {}
    for (bench, _), mine in of_cell.items():
        if any(map(is_ours, mine)) and _length(mine) > _length(best.get(bench, [])):
            best[bench] = mine
    order = sorted(best, key=lambda name: (-len(BENCHES[name].stages), name))[:most]
    return {f"{name}, {_USUAL.sub('', best[name][0].cell).replace('-T', ' T')}": best[name] for name in order}


def _length(lines: Sequence[Line]) -> tuple[int, int]:
    """How often one of ours was measured at most, and measurements in all."""
    return max((len(line.points) for line in lines if is_ours(line)), default=0), sum(
        len(line.points) for line in lines
    )


STEPS = (
    "measured",
    "bench",
    "implementation",
    "before",
    "after",
    "before / after",
    "others",
    "card",
    "commits",
    "cell",
)
NUMBERS = ("before", "after", "before / after", "others")  # columns of numbers
MOST_STEPS = 200  # that a page or a terminal lists


def step(one: Step) -> list[str]:
    """A step as texts of `STEPS`: `others` is what as many other packages' kernels did between the same cards."""
    before, after = one.before, one.after
    others = f"{significant(one.others, 3)}x ({one.count})" if one.count else "–"
    ratio = times(after.ratio, after.ratio_low, after.ratio_high)
    card = "another" if after.moved else "the same"
    commits = f"{before.commit[:7] or '–'} to {after.commit[:7] or '–'}"
    named = [after.started[:10], one.line.bench, one.line.implementation]
    return [*named, us(before.us, exact=True), us(after.us, exact=True), ratio, others, card, commits, one.line.cell]


def told(lines: Sequence[Line], found: Sequence[Step], whole: bool) -> tuple[str, str]:
    """What was measured more than once and how often it changed, and what cards have to do with it; `whole`: all earlier states were there to read."""
    verdicts = Counter(step.after.verdict for step in found)
    moved = sum(step.after.moved for step in found)
    points = sum(len(line.points) for line in lines)
    about = (
        f"{count(len(lines), 'row')} measured more than once, {points} times in all, in stored runs and their earlier versions: "
        f"{count(len(found), 'step')} beyond noise, {verdicts[FASTER]} faster and {verdicts[SLOWER]} slower."
    )
    if not lines:
        about = "No row was measured more than once in stored runs and their earlier versions."
    if not whole:
        about += " Earlier versions were not read, because the git history is not here or not whole: only what is stored today counts."
    cards = "Each measurement of a step was made on the same card." if found else "No step was found."
    if moved:
        cards = (
            f"{'All' if moved == len(found) else moved} of these steps are between two cards of one kind, so a step may be due to the card and not to the code. "
            "Others: the median ratio of other packages' implementations in the same cell between the same two cards; a step of about that size is not of our code."
        )
    return about, cards


def _timed(run: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a time and a date, by their keys, with the noise floors of their state."""
    keyed = runs.keyed(rows)
    return keyed[(keyed["status"] == "ok") & keyed["median_us"].notna() & keyed["started_at"].notna()].assign(run=run)


def _judged(pairs: list[tuple[dict, dict]]) -> Iterator[dict]:
    """Ratio, interval and verdict of each pair, in their order."""
    if pairs:
        table = pd.DataFrame([_ratio(*two) for two in pairs])
        found = verdicts.of_pairs(table, "ratio", table["floor"].astype(float))
        yield from table.assign(verdict=found).to_dict("records")


def _ratio(before: dict, after: dict) -> dict:
    both = {f"{name}_before": value for name, value in before.items()}
    return runs.ratio(both | {f"{name}_after": value for name, value in after.items()}, drifts=True)


def _line(rows: list[dict], judged: Iterator[dict]) -> Line:
    points = [_point(rows[0])]
    for before, row in pairwise(rows):
        points.append(_point(row, next(judged), before))
    return Line(*(rows[-1][name] for name in ("bench", "cell", "implementation")), tuple(points))


def _point(row: dict, found: dict | None = None, before: dict | None = None) -> Point:
    named = (row["run"], row["started_at"], str(row["git_sha"] or ""))
    point = Point(
        *named,
        *(_number(row[name]) for name in ("median_us", "ci_low_us", "ci_high_us")),
        {name: row[name] for name in _SHOWN},
    )
    if found is None or before is None:
        return point
    change = [_number(found[name]) for name in ("ratio", "ratio_ci_low", "ratio_ci_high")]
    moved = not point.card or row["gpu_uuid"] != before["gpu_uuid"]
    return replace(
        point,
        **dict(zip(("ratio", "ratio_low", "ratio_high"), change, strict=True)),
        verdict=found["verdict"],
        moved=moved,
    )


def _number(value: Any) -> float:
    return _NONE if value is None else float(value)
