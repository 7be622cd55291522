"""What the parts of a report beyond its sentences say, computed anew from Parquet and CSV files: bars, claims, replayed seeds, and the rest.

`PARTS` has a checker for each field of a report that holds numbers of rows; each yields what is false of the field. What a bar or a claim is
of (cells, names, bounds) is a table and is taken as it is; times, ratios, intervals, means and verdicts are made here.
"""

import functools
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

import page_quality
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.origins import ours  # whose kernels they are is a table, not arithmetic
from moe_routing_bench.config.axes import AXES, PRESET
from moe_routing_bench.config.claims import Claim
from moe_routing_bench.config.load import read_mapping as load
from moe_routing_bench.report import format_bars, layer_bars, routing_bars
from moe_routing_bench.report.parts import BarLine, Choices, Evidence, Failed, Seed, Table
from page_numbers import ROOT, N, faults, firm, gmean, stored, timed, wrong

NUMBER = re.compile(rf"(?<![\w.=:-]){N}(?:e-?\d+)?(?![\w-]*[a-z_]{{2}})")


@dataclass(frozen=True)
class Run:
    """A published run: the rows as stored, training runs, adaptations, the accuracy matrix, and tables of its folder."""

    name: str
    rows: pd.DataFrame
    trained: pd.DataFrame | None = None
    adapted: pd.DataFrame | None = None
    matrix: pd.DataFrame | None = None
    claims: Sequence[Claim] = ()
    profiles: Sequence[Mapping[str, Any]] = ()
    stored: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    @functools.cached_property
    def ok(self) -> pd.DataFrame:
        """The rows with a time."""
        return timed(self.rows)

    @functools.cached_property
    def compared(self) -> pd.DataFrame:
        """The rows with a time and the columns that bars read: a third of all."""
        return self.ok[[name for name in self.ok if name in COMPARED or str(name).startswith("share_of_")]]

    @functools.cached_property
    def format_bars(self) -> dict[str, Any]:
        """The bars of formats that the run has, by name."""
        return {one.what: one for one in format_bars.bars({"": self.rows})}


COMPARED = {
    *AXES,
    *("bench", "implementation", "status", "card", "cell", "cell_hash", "code_fingerprint", "median_us", "ci_low_us"),
    *(
        "ci_high_us",
        "block_medians_us",
        "block_turns",
        "turns",
        "set_aside",
        "no_interval",
        "suspect",
        "suspect_reason",
    ),
    *("calibration_drift", "over_dense", "stage_us", "compulsory_bytes", "configuration", "plugin", "gpu_name"),
    *("best_verdict", "started_at", "git_sha", "git_dirty", "driver"),
    *("torch_version", "triton_version", "cutlass_dsl_version"),
}


def numbers(text: str) -> list[str]:
    """The numbers of a text that are no part of a name."""
    return [m[0] for m in NUMBER.finditer(text)]


def holds(where: str, text: str, *values: float | None) -> Iterator[str]:
    """What is false of a text whose numbers should be these, in their order."""
    found = numbers(text.replace("\u00a0", " "))
    if len(found) != len(values):
        yield f"{where}: {text!r} has {len(found)} numbers, not {values}"
        return
    for i, (one, value) in enumerate(zip(found, values, strict=True)):
        if value is not None and "e" in one:
            power = 10 ** int(one.partition("e")[2])
            one, value = one.partition("e")[0], value / power
        yield from (f"{where}: {what}" for what in wrong(**{f"number {i + 1} of {text!r}": (one, value)}))


# Intervals of ratios, from block medians


@dataclass(frozen=True)
class Place:
    """Where logarithms of times lie: median, centre of the interval, standard error and degrees of freedom."""

    median: float
    centre: float
    error: float
    freedom: float


def place_of_blocks(values: np.ndarray) -> Place:
    """By Yuen's trimmed mean, with the correlation of neighbours (docs/method.md)."""
    n, cut = len(values), int(0.2 * len(values))
    ordered = np.sort(values)
    kept = n - 2 * cut
    apart = np.clip(values, ordered[cut], ordered[n - cut - 1])
    apart = apart - apart.mean()
    squares = float((apart**2).sum())
    centre = float(stats.trim_mean(values, 0.2))
    if not squares:
        return Place(float(np.median(values)), centre, 0.0, 1.0)
    r = float((apart[1:] * apart[:-1]).sum()) / squares
    r = min(max((r + 1 / n) / max(1 - 3 / n, 0.5), 0.0), 0.97)
    share = (1 - r) / (1 + r)
    error = math.sqrt(squares / (kept * (kept - 1)) / share)
    return Place(float(np.median(values)), centre, error, max(kept * share**1.75 - 1, 1.0))


def place(values: np.ndarray, turns: Sequence[int] | None) -> Place | None:
    if len(values) < 3:
        return None
    if turns is None:
        return place_of_blocks(values)
    medians = pd.Series(values).groupby(list(turns)).median()
    if len(medians) < 2:
        return None
    whole = Place(
        float(np.median(values)),
        float(medians.mean()),
        float(medians.std() / math.sqrt(len(medians))),
        len(medians) - 1,
    )
    inner = place_of_blocks(values - medians.loc[list(turns)].to_numpy())
    wide = len(medians) <= 3 and reach(inner) > reach(whole)
    return Place(whole.median, whole.centre, inner.error, inner.freedom) if wide else whole


def reach(one: Place) -> float:
    return float(stats.t.ppf(0.975, one.freedom) * one.error)


def turns(row: Mapping[Any, Any]) -> list[int] | None:
    if row["turns"] != "long":
        return None
    known = row.get("block_turns")  # older rows have none
    if not isinstance(known, float | None):
        return [int(one) for one in known]
    n = len(row["block_medians_us"])
    return [0] * (n // 2) + [1] * (n - n // 2)


Ratio = tuple[
    float, float, float, float
]  # with both ends of its interval, and p of its being 1; NaN where there is none


def over(base: Mapping[Any, Any], row: Mapping[Any, Any], paired: bool) -> Ratio:
    """The time of `base` over that of `row`."""
    logs = [np.log(np.asarray(one["block_medians_us"], float)) for one in (base, row)]
    if paired:
        found = place(logs[0] - logs[1], turns(base))
        median = float(np.median(logs[0] - logs[1]))
    else:
        sides = [place(one, turns(of)) for one, of in zip(logs, (base, row), strict=True)]
        median = float(np.median(logs[0]) - np.median(logs[1]))
        found = None if None in sides else welch(median, *sides)  # type: ignore[arg-type]
    if found is None:
        return math.exp(median), math.nan, math.nan, math.nan
    low, high = min(found.centre - reach(found), median), max(found.centre + reach(found), median)
    if max(median - low, high - median) > 2 * math.log(10):
        return math.exp(median), math.nan, math.nan, math.nan
    p = 2 * stats.t.sf(abs(found.centre) / found.error, found.freedom) if found.error else float(found.centre == 0)
    return math.exp(median), math.exp(low), math.exp(high), float(p)


def welch(median: float, a: Place, b: Place) -> Place:
    error = math.hypot(a.error, b.error)
    freedom = error**4 / (a.error**4 / a.freedom + b.error**4 / b.freedom) if error else 1.0
    return Place(median, a.centre - b.centre, error, freedom)


# Bars


def usual(axis: Any) -> bool:
    """Whether a cell may leave the axis out."""
    return bool(axis.follows or axis.optional) or axis.default is not None


def defaults(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Which rows have the default, for each axis that a cell may leave out and that not all rows leave out."""
    found = {}
    for name, axis in AXES.items():
        if usual(axis) and not (absent := rows[name].isna().to_numpy()).all():
            found[name] = absent | (rows[name] == (rows[axis.follows] if axis.follows else axis.default)).to_numpy()
    return found


def having(rows: pd.DataFrame, cells: Mapping[str, Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """The rows of each cell that has some: those with its values, and defaults elsewhere. None is any value, a tuple one of several."""
    standard, found = defaults(rows), {}
    for label, values in cells.items():
        kept = np.ones(len(rows), bool)
        for name, value in values.items():
            if value is not None:
                kept &= rows[name].isin(value if isinstance(value, tuple) else (value,)).to_numpy()
        for name, one in standard.items():
            if name not in values and not (values.get("model") and name in PRESET):
                kept &= one
        if kept.any():
            found[label] = rows[kept]
    return found


Estimate = tuple[float, float, float]


@dataclass(frozen=True)
class Kind:
    """How a cell of a bar is computed: `of` names its implementations in a row's text, or a column."""

    what: str
    figure: Callable[[pd.DataFrame, Sequence[str]], tuple[Estimate, list[pd.Series]] | None]
    times: float = 1.0
    less: float = 0.0
    joined: Callable[[Sequence[Estimate]], Estimate] | None = None


def by_name(rows: pd.DataFrame, name: str) -> pd.Series:
    mine = rows[rows["implementation"] == name]
    return mine.loc[mine["median_us"].idxmin()]


def speed(base: pd.Series, row: pd.Series) -> Estimate:
    if base.name == row.name:
        return 1.0, 1.0, 1.0
    same = base["cell_hash"] == row["cell_hash"]
    aside = base["set_aside"] or row["set_aside"]
    alike = turns(base) == turns(row) and len(base["block_medians_us"]) == len(row["block_medians_us"])
    ratio, low, high, _ = over(base, row, bool(same and alike and not aside))
    lacking = any(isinstance(one.get("no_interval"), str) for one in (base, row))
    return (ratio, math.nan, math.nan) if lacking else (ratio, low, high)


def drifted(row: pd.Series) -> bool:
    """Whether nothing but a drift of the ceilings speaks against a row, whose time may be off by as much."""
    return row["suspect"] is True and all(
        one.startswith("ceilings drifted") for one in row["suspect_reason"].split("; ")
    )


def widened(one: Estimate, rows: Sequence[pd.Series]) -> Estimate:
    """With drifts of the ceilings in the interval, unless rows of one cell are compared."""
    if len(rows) > 1 and len({row["cell_hash"] for row in rows}) == 1:
        return one
    drifts = {row["cell_hash"]: row["calibration_drift"] for row in rows if drifted(row)}
    more = math.sqrt(sum(math.log1p(one) ** 2 for one in drifts.values()))
    value, low, high = one
    return (
        value,
        value * math.exp(-math.hypot(math.log(value / low), more)),
        value * math.exp(math.hypot(math.log(high / value), more)),
    )


def share_of(row: pd.Series, column: str) -> Estimate:
    value, us = float(row[column]), row["median_us"]
    return value, value * us / row["ci_high_us"], value * us / row["ci_low_us"]


def times_of(row: pd.Series, column: str) -> Estimate:
    value, us = float(row[column]), row["median_us"]
    return value, value * row["ci_low_us"] / us, value * row["ci_high_us"] / us


@dataclass(frozen=True)
class Cell:
    """What the rows of a cell show: an estimate, the rows behind it, numbers in the words about it, and a second figure."""

    estimate: Estimate
    rows: Sequence[pd.Series]
    said: tuple[float, ...] = ()
    second: float | None = None
    group: str = ""

    @property
    def suspect(self) -> bool:
        return any(row["suspect"] is True and not drifted(row) for row in self.rows)


CUTE = ("cute",)
QUANTISED = ("cute_quantised", "cute_fp8")
RIVALS = {"QuACK": "quack"}


def against(rows: pd.DataFrame, ours: Sequence[str], others: Callable[[str], bool]) -> Cell | None:
    mine = rows[rows["implementation"].isin(ours)]
    rest = rows[rows["implementation"].map(others).astype(bool)]
    if mine.empty or rest.empty:
        return None
    own, other = (one.loc[one["median_us"].idxmin()] for one in (mine, rest))
    return Cell(widened(speed(other, own), (own, other)), (own, other))


def own(rows: pd.DataFrame, ours: Sequence[str], column: str, estimate: Callable[..., Estimate]) -> Cell | None:
    mine = rows[rows["implementation"].isin(ours) & rows[column].notna()]
    if mine.empty:
        return None
    first = mine.loc[mine["median_us"].idxmin()]
    return Cell(widened(estimate(first, column), (first,)), (first,))


def cell_of(what: str, rows: pd.DataFrame, run: Run) -> Cell | None:
    """What a cell shows of a bar of this name; None where something that is compared has no time."""
    layers = layer_bars.OURS + (layer_bars.AROUND_QUACK if "QuACK's products" in what else ())
    if m := re.fullmatch(r"\w+, .*: cute's share of (?:the (stream) of its mix|a copy)", what):
        found = own(rows, CUTE, f"share_of_{m[1] or 'copy'}", share_of)
        if found is None:
            return None
        short = found.rows[0]["share_of_short_stream"]
        group = f"k={found.rows[0]['top_k']:g}" if m[1] else ""
        return Cell(found.estimate, found.rows, second=None if pd.isna(short) else short, group=group)
    if m := re.search(r"speed of cute over (\w+)$", what):
        found = against(rows, CUTE, RIVALS.get(m[1], m[1]).__eq__)
        return found and Cell(
            found.estimate, found.rows, (found.rows[0]["median_us"],) if what.startswith("routing, ") else ()
        )
    if what.endswith("over the sum of its floors"):
        return floors(rows)
    if m := re.fullmatch(r"(\w+), .*: time of cute", what):
        found = own(rows, CUTE, "median_us", times_of)
        slow = against(rows, CUTE, "torch".__eq__) if m[1] == "routing" else None
        return found and Cell(found.estimate, found.rows, (slow.estimate[0],) if slow else ())
    if what.endswith("time of both as stages of routing"):
        mine = rows[
            rows["implementation"].isin(CUTE) & rows["stage_us"].map(lambda one: not isinstance(one, float | None))
        ]
        if mine.empty:
            return None
        first = mine.loc[mine["median_us"].idxmin()]
        us = sum(float(one) for name, one in first["stage_us"] if name in ("router", "permute"))
        return Cell((us, math.nan, math.nan), (first,))
    if "loads" in what and what.endswith("less 1"):
        ours = CUTE if what.startswith("routing") else layers
        even = rows[rows["implementation"].isin(ours) & (rows["skew"] == 0)]
        if even.empty:
            return None
        base = even.loc[even["median_us"].idxmin()]
        skewed = rows[(rows["implementation"] == base["implementation"]) & (rows["skew"] > 0)]
        if skewed.empty:
            return None
        row = skewed.loc[skewed["median_us"].idxmin()]
        return Cell(widened(speed(row, base), (base, row)), (base, row))
    if what.startswith("auto, chosen"):
        return regret_of(rows, int("left out" in what))
    if "dense products" in what:
        return own(rows, layers, "over_dense", times_of)
    if "of copy" in what:
        return own(rows, layers if what.startswith("layer") else QUANTISED[:1], "share_of_copy", share_of)
    if what.startswith("layer forward and backward"):
        return against(rows, ("ops",), "sonicmoe".__eq__)
    if what.startswith("model, one token"):
        return against(rows, ("ops",), ("transformers_batched_mm", "transformers_grouped_mm").__contains__)
    if what.startswith("experts, seed 003"):
        strong = "dequant_cute" in set(rows["implementation"])
        return against(rows, QUANTISED[:1], ("dequant", "dequant_cute").__contains__) if strong else None
    if what.endswith("speed over the fastest peer"):
        return against(rows, QUANTISED, format_bars._PEERS.__contains__)
    if m := re.fullmatch(r"layer, prefill, (\w+) x (\w+): speed over our bf16 layer", what):
        plain = rows[(rows["weights"] == rows["dtype"]) & rows["implementation"].isin(layers)]
        mine = rows[(rows["weights"] == m[1]) & (rows["packed"] == m[2])]
        mine = mine[mine["implementation"] == (QUANTISED[1] if m[2].startswith("fp8") else QUANTISED[0])]
        if plain.empty or mine.empty:
            return None
        pair = [one.loc[one["median_us"].idxmin()] for one in (plain, mine)]
        return Cell(widened(speed(*pair), pair), pair)
    if "torch sort and grouped_mm" in what:
        return against(rows, layers, "torch_grouped_mm".__eq__)
    if "speed over the fastest other" in what:
        return against(rows, layers, lambda name: name not in (*layers, "auto"))
    raise ValueError(f"nothing here computes the bar {what}")


STAGES = {"pack": "share_of_stream", "combine": "share_of_stream", "gate": "share_of_copy", "permute": "share_of_copy"}


def floors(rows: pd.DataFrame) -> Cell | None:
    """The time of routing over the sum of its stages' floors."""
    mine = rows[rows["implementation"].isin(CUTE)]
    parts = [mine[mine["bench"] == bench].iloc[:1] for bench in ("routing", *STAGES)]
    if any(part.empty for part in parts):
        return None
    whole, *stages = (part.iloc[0] for part in parts)
    floor = sum(one["median_us"] * one[STAGES[one["bench"]]] for one in stages)
    ends = [whole[name] / floor for name in ("median_us", "ci_low_us", "ci_high_us")]
    return Cell(widened((ends[0], ends[1], ends[2]), (whole, *stages)), (whole, *stages), (floor,))


def regret_of(rows: pd.DataFrame, kind: int) -> Cell | None:
    """The time of what is chosen (by the table that ships) over the least of all."""
    from moe_routing_bench.comparison import regret
    from moe_routing_kernels import choices

    (line,) = regret.lines(regret.entries(rows, ""), choices.load()) or [None]
    if line is None:
        return None
    ran = rows.assign(
        implementation=[
            str(way).partition(";")[0] if name == "auto" else name
            for name, way in zip(rows["implementation"], rows["configuration"], strict=True)
        ]
    )
    pair = [ran[ran["implementation"] == name].iloc[0] for name in (line.choices[kind].name, line.best)]
    return Cell(widened(speed(pair[0], pair[1]), pair), pair)


BARS = {bar.what: bar for bar in (*routing_bars.BARS, *layer_bars.BARS)}


def groups_of(bar: Any, run: Run) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows with a time that may be compared: of one card, and of one version of the code of each bench."""
    rows = run.compared
    parts = [bar.among(rows[rows["bench"] == bar.bench])]
    parts += [
        one for name, values in bar.others.items() for one in having(rows[rows["bench"] == name], {"": values}).values()
    ]
    for card, mine in pd.concat(parts).groupby("card"):
        codes: list[tuple[str, ...]] = [()]
        for _, one in mine.groupby("bench", sort=False):
            codes = [
                (*rest, code) for rest in codes for code in sorted(one["code_fingerprint"].fillna("unknown").unique())
            ]
        for picked in codes:
            kept = mine[mine["code_fingerprint"].fillna("unknown").isin(picked)]
            yield f"{card}, code {', '.join(code[:8] for code in picked)}", kept


def cells_of(bar: Any, rows: pd.DataFrame, run: Run) -> dict[str, Cell]:
    mine, rest = rows[rows["bench"] == bar.bench], rows[rows["bench"] != bar.bench]
    if bar.cells is None:
        groups = {str(name): one for name, one in mine.groupby("cell", sort=False)}
    else:
        groups = having(mine, bar.cells)
    found = {name: cell_of(bar.what, pd.concat([one, rest]), run) for name, one in groups.items()}
    return {name: one for name, one in found.items() if one is not None}


def joint(bar: Any, cells: Sequence[Cell]) -> Estimate:
    """The mean of cells, whose errors are independent."""
    values = np.array([one.estimate for one in cells])
    if bar.joined == "in the mean":
        middle = values.mean(0)[0]
        below, above = (np.sqrt(((values[:, 0] - values[:, i]) ** 2).sum()) / len(values) for i in (1, 2))
        return middle, middle - below, middle + above
    logs = np.log(values)
    middle = logs.mean(0)[0]
    below, above = (np.sqrt(((logs[:, 0] - logs[:, i]) ** 2).sum()) / len(logs) for i in (1, 2))
    return math.exp(middle), math.exp(middle - below), math.exp(middle + above)


def misses(bar: Any, value: float, bound: float) -> bool:
    if bar.side.sign == "within":
        return abs(value - 1) > abs(bound - 1)
    return value < bound if bar.side.sign == "≥" else value > bound


def shown(bar: Any, cells: Mapping[str, Cell]) -> list[float]:
    """The numbers of what is said of some cells, in their order."""
    unit, each = bar.unit, list(cells.values())

    def printed(one: Estimate) -> list[float]:
        return [unit.times * (value - unit.less) for value in one if not math.isnan(value)]

    def of(name: str, one: Cell) -> list[float]:
        label = [float(value) for value in numbers(name)] if bar.cells is not None else []
        second = [] if one.second is None else [unit.times * one.second]
        return [*label, *printed(one.estimate), *one.said, *second]

    groups = sorted({one.group for one in each if one.group})
    found: list[float] = []
    if groups:
        for group in groups:
            ranked = sorted(one.estimate for one in each if one.group == group)
            seconds = sorted(one.second for one in each if one.group == group and one.second is not None)
            found += [value for end in dict.fromkeys((ranked[0], ranked[-1])) for value in printed(end)]
            if len(seconds) == len(ranked):
                found += [unit.times * value for value in dict.fromkeys((seconds[0], seconds[-1]))]
    elif bar.level.mean is None and len(each) <= 6:
        return [value for name, one in cells.items() for value in of(name, one)]
    else:
        worst = sorted(cells, key=lambda name: bar.side.off(cells[name].estimate[0]))
        found = [*printed(joint(bar, each))]
        for name in (worst[-1], worst[0])[: len(each)]:
            found += of(name, cells[name])
    bound = bar.level.each
    if bound is not None and not isinstance(bound, tuple):
        missing = sum(misses(bar, one.estimate[0], bound) for one in each)
        found += [missing, len(each)] if missing else []
    return found


def bar(line: BarLine, run: Run) -> Iterator[str]:
    """What is false of a bar's line: figures, their number, what is left out, and the verdict."""
    if line.what.startswith("experts: results compared"):
        yield from exact(line, run)
        return
    known = BARS | run.format_bars
    if line.what not in known:
        yield f"no bar is called {line.what}"
        return
    bar = known[line.what]
    groups = {name: rows for name, rows in groups_of(bar, run) if line.where.endswith(name) or not line.where}
    found = {name: cells for name, rows in groups.items() if (cells := cells_of(bar, rows, run))}
    if line.verdict == "not comparable":
        yield from holds(line.what, line.cells, 0, len(bar.cells or ()))
        yield from (f"{line.what}: rows of {name} can be compared" for name in found)
        return
    if len(found) != 1:
        yield f"{line.what}, {line.where}: {len(found)} groups of rows"
        return
    (cells,) = found.values()
    sure = {name: one for name, one in cells.items() if not one.suspect}
    wanted = list(cells if bar.cells is None else bar.cells)
    doubtful = {name: one for name, one in cells.items() if one.suspect}
    whole = (bar.level.mean is not None or len(cells) > 6) and not any(one.group for one in cells.values())
    values = shown(bar, sure) if sure else []
    values += shown(bar, cells if whole else doubtful) if doubtful else []
    yield from holds(line.what, line.measured, *values)
    yield from holds(line.what, line.cells, len(sure), len(wanted))
    rows = bar.among(run.rows[run.rows["bench"] == bar.bench])
    lost = rows[rows["status"] != "ok"]
    if bar.cells is not None:
        lost = lost.loc[sorted({i for one in having(lost, bar.cells).values() for i in one.index})]
    yield from holds(line.what, line.left_out, *(n for n in (len(doubtful), len(lost)) if n))
    yield from verdict(line, bar, sure, wanted)
    yield from bounds(line, bar)


def verdict(line: BarLine, bar: Any, sure: Mapping[str, Cell], wanted: Sequence[str]) -> Iterator[str]:
    values = {name: one.estimate[0] for name, one in sure.items()}

    def met(level: Any) -> bool:
        each = level.each if isinstance(level.each, tuple) else (level.each,) * len(wanted)
        pairs = [(values[name], bound) for name, bound in zip(wanted, each, strict=True) if name in values]
        if level.mean is not None and len(values) == len(wanted):
            pairs.append((joint(bar, list(sure.values()))[0], level.mean))
        return not any(bound is not None and misses(bar, value, bound) for value, bound in pairs)

    expected = "missed" if not met(bar.level) else "open" if not values or len(values) < len(wanted) else "reached"
    stretch = expected == "reached" and (bar.stretch.mean or bar.stretch.each) is not None and met(bar.stretch)
    if line.verdict.partition(",")[0] != expected or ("stretch" in line.verdict) != stretch:
        yield f"{line.what}: {line.verdict}, but it is {expected}{', and the stretch' * stretch}"


def bounds(line: BarLine, bar: Any) -> Iterator[str]:
    for text, level in ((line.bar, bar.level), (line.stretch, bar.stretch)):
        each = level.each if isinstance(level.each, tuple) else () if level.each is None else (level.each,)
        known = [*(() if level.mean is None else (level.mean,)), *dict.fromkeys(each)]
        yield from holds(line.what, text, *(bar.unit.times * (one - bar.unit.less) for one in known))


def exact(line: BarLine, run: Run) -> Iterator[str]:
    """How many cases of seed 003, and others, have right results, by rows and by the accuracy matrix."""
    names = ("cute", *QUANTISED)
    rows = run.rows[(run.rows["bench"] == "experts") & run.rows["implementation"].isin(names)]
    rows = rows[rows["status"].isin(["ok", "incorrect"])]
    judged = [
        ((row["weights"], row["packed"]), row["status"] == "ok", row["rel_l2_error"] / row["tolerance"])
        for _, row in rows.iterrows()
    ]
    matrix = run.matrix if run.matrix is not None else pd.DataFrame(columns=["status", "weights", "activations"])
    for case, tried in matrix[matrix["status"].notna()].groupby(["weights", "activations"]):
        mine = tried[tried["implementation"].isin(names)]
        for _, row in (mine if len(mine) else tried).iterrows():
            right = row["status"] == "ok" and not row["of_bound"] > 1
            judged.append((case, right, row["kernel_error"] / row["tolerance"]))
    known = csv("003_accuracy")
    cases = {(FORMATS.get(one["format"], one["format"]), one["activations"]) for _, one in known.iterrows()}
    right = {case: all(well for other, well, _ in judged if other == case) for case, *_ in judged}
    mine, rest = ([well for case, well in right.items() if (case in cases) is there] for there in (True, False))
    most = np.nanmax([share for *_, share in judged])
    yield from holds(line.what, line.measured, sum(mine), len(cases), sum(rest), len(rest), 100 * most)
    yield from holds(line.what, line.cells, len(mine), len(cases))
    yield from holds(line.what, line.bar, len(cases), len(cases), 3)
    if (line.verdict == "missed") == all(right.values()):
        yield f"{line.what}: {line.verdict}"


FORMATS = {
    name: f"{name.partition('_')[0]}{'z' * ('asym' in name)}_g128"
    for name in ("int8", "int8_asym", "int4", "int4_asym", "int2", "int2_asym", "e4m3", "e5m2")
}


@functools.cache
def csv(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"config/seeds/published/{name}.csv")


# Published figures


PLAIN = {"%": 100.0, "ms": 1e-3}
JOIN = {"gmean": gmean, "min": min, "max": max, "median": np.median}


def of_check(rows: pd.DataFrame, check: Any, name: str) -> pd.DataFrame:
    rows = rows[(rows["bench"] == check.bench) & (rows["implementation"] == name)]
    for axis, value in check.axes.items():
        none = value is None or value == "none"
        rows = rows[rows[axis].isna()] if none else rows[rows[axis] == AXES[axis].kind(value)]
    return rows


def claims(lines: Sequence[Any], run: Run) -> Iterator[str]:
    """Our value, of how many cells, and the verdict, of each published figure; what is quoted stands in config/claims.yaml."""
    known = {claim.statement: claim for claim in run.claims}
    for line in lines:
        claim = known.get(line.statement)
        if claim is None or (line.boundary, line.source) != (claim.boundary, claim.source):
            yield f"no such claim: {line.statement}"
            continue
        if line.hardware != (claim.hardware or "not said"):
            yield f"{claim.id}: {line.hardware}"
        yield from holds(claim.id, line.published, claim.figure)
        check, joined = claim.check, None
        values: list[float] = []
        if check is not None:
            mine = of_check(run.ok, check, check.implementation)
            mine = mine.set_index(["cell", "card"])[check.column].astype(float)
            if check.against:
                other = of_check(run.ok, check, check.against).set_index(["cell", "card"])[check.column].astype(float)
                mine = other.reindex(mine.index) / mine
            values = list(mine.dropna() * PLAIN.get(claim.unit, 1.0))
            joined = JOIN[check.over or "median"](pd.Series(values)) if values else None
        if line.ours == "–":
            told = joined is not None and (len(values) == 1 or check.over)  # type: ignore[union-attr]
            yield from [f"{claim.id}: ours is {joined}"] * bool(told)
            continue
        yield from holds(claim.id, line.ours, joined)
        yield from holds(claim.id, str(line.cells), len(values))
        near = joined is not None and abs(joined / claim.figure - 1) <= claim.within
        near |= claim.at_least and (joined <= claim.figure if claim.unit in ("us", "ms") else joined >= claim.figure)
        said = ("held" if near else "not held") if claim.own else "reproduced" if near else "not reproduced"
        if line.verdict != said:
            yield f"{claim.id}: {line.verdict}, but it is {said}"


# What auto chooses


def choices(found: Choices, run: Run) -> Iterator[str]:
    """Times of the best, regrets of the names that are chosen, and their means."""
    rows = run.ok[(run.ok["bench"] == "layer") & run.ok["gpu_name"].notna()]
    auto = rows[rows["implementation"] == "auto"]
    chose = auto.assign(implementation=[str(one).partition(";")[0] for one in auto["configuration"]])
    both = pd.concat([rows[rows["implementation"] != "auto"], chose])
    us = {
        (cell, name): round(float(one["median_us"].iloc[0]), 3)  # as the table of choices keeps times
        for (cell, name), one in both.groupby(["cell", "implementation"])
    }
    own_us = dict(zip(auto["cell"], auto["median_us"], strict=True))
    regrets: list[list[float]] = [[], [], [], []]
    for line in found.lines:
        best_own, best = (us[line.key, text.partition(",")[0]] for text in (line.best_own, line.best))
        least = min(time for (cell, _), time in us.items() if cell == line.key)
        yield from wrong(least=(f"{best}", least))
        for text, time in ((line.best_own, best_own), (line.best, best)):
            yield from holds(line.cell, text, time)
        for i, (name, mine, every) in enumerate(line.choices):
            ratios = [us[line.key, name] / one - 1 for one in (best_own, best)]
            yield from holds(line.cell, f"{mine} {every}", *(100 * one for one in ratios))
            regrets[2 * i].append(ratios[0])
            regrets[2 * i + 1].append(ratios[1])
        if line.auto != "–":
            yield from holds(line.cell, line.auto, 100 * (own_us[line.key] / best_own - 1))
        for cell, why in re.findall(r"(suspect): ([^;]*)", line.notes):
            if why not in set(both.loc[both["cell"] == line.key, "suspect_reason"].dropna().str.split("; ").explode()):
                yield f"{line.cell}: {cell}, {why}"
    for one, values in zip(found.summaries, regrets, strict=True):
        yield from summary(one, values)
    for one in found.always:
        values = [
            us[line.key, one.what] / us[line.key, line.best_own.partition(",")[0]] - 1
            for line in found.lines
            if (line.key, one.what) in us
        ]
        yield from summary(one, values)
    table = json.loads((ROOT / "src/moe_routing_kernels/choices/choices.json").read_text())
    yield from wrong(table=(str(found.cells), len(table["entries"])))
    yield from holds("bar", found.bar, 3, 15)


def summary(one: Any, values: Sequence[float]) -> Iterator[str]:
    yield from holds(one.what, one.cells, len(values))
    yield from holds(one.what, f"{one.mean} {one.worst}", 100 * float(np.mean(values)), 100 * max(values))
    if one.met != (np.mean(values) <= 0.03 and max(values) <= 0.15):
        yield f"{one.what}: met {one.met}"


# Scope, machine and method


def scope(one: Any, run: Run) -> Iterator[str]:
    """The first sentence is that of `faults`; then commits, days and cards of rows, training runs and adaptations."""
    first, _, rest = one.text.partition(". ")
    held = load(ROOT / f"results/{run.name}/manifest.yaml")
    versions = {
        str(entry["commit"])[:7]: entry["version"] for table in held["tables"].values() for entry in table["measured"]
    }
    yield from faults(f"{first}.", run.rows)
    tables = {"Measured": run.rows, "Training runs measured": run.trained, "Adaptations measured": run.adapted}
    for what, parts in re.findall(
        r"((?:Training runs m|Adaptations m|M)easured) by (.*?)\.(?= (?:Training|Adaptations)|$)", rest
    ):
        rows = tables[what]
        if rows is None:
            yield f"{what}: there are none"
            continue
        entries, total = parts.split("; by "), 0
        for entry in entries:
            m = re.fullmatch(
                r"(?:version ([\d.]+), )?commit (\w+)( with changes)? \(([^)]*)\), on (.*?)(?:: (\d+) rows?)?", entry
            )
            if not m:
                yield f"{what}: {entry}"
                continue
            mine = rows[rows["git_sha"].str.startswith(m[2]) & (rows["git_dirty"].eq(True) == bool(m[3]))]
            moments = [
                str(day)[:10] for name in ("started_at", "ended_at") if name in mine for day in mine[name].dropna()
            ]
            if moments and m[4] != " to ".join(dict.fromkeys((min(moments), max(moments)))):
                yield f"{what}: {m[4]}, but {min(moments)} to {max(moments)}"
            cards = mine["gpu_uuid"].dropna().unique() if "gpu_uuid" in mine else ()
            yield from (f"{what}: {card} is not among {m[5]}" for card in cards if str(card)[:12] not in m[5])
            yield from [f"{what}: version {m[1]} of {m[2]}"] * (m[1] != versions.get(m[2]))
            total += len(mine)
            yield from wrong(rows=(m[6], len(mine)))
        if total != len(rows):
            yield f"{what}: {total} rows of {len(rows)} are of these commits"


CEILINGS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us", "graph_node_us")


def machine(lines: Sequence[tuple[str, str]], run: Run) -> Iterator[str]:
    """Values as stored; of ceilings the median and both ends."""
    for name, text in lines:
        if name == "measured":
            moments = pd.concat([run.rows["started_at"], run.rows["ended_at"]]).dropna().astype(str).str[:16]
            if text != f"{moments.min()} to {moments.max()}".replace("T", " ") + " UTC":
                yield f"measured: {text}"
        elif name in CEILINGS:
            values = run.rows[name].dropna()
            yield from holds(name, text, *((values.median(), values.min(), values.max()) if len(values) else ()))
        else:
            known = list(dict.fromkeys(str(one) for one in run.rows[name].dropna()))
            known = [
                str(int(float(one))) if re.fullmatch(r"\d+\.0", one) and name != "cuda_version" else one
                for one in known
            ]
            more = f" and {len(known) - 4} more" if len(known) > 4 else ""
            if text != (", ".join(known[:4]) + more or "–"):
                yield f"{name}: {text}, but {known}"


def method(one: Any, run: Run) -> Iterator[str]:
    counts = run.ok["turns"].value_counts()
    yield from holds("turns", one.turns, *((counts["short"], counts["long"]) if len(counts) > 1 else ()))
    warm = (run.ok["cold"].eq(False)).sum() / len(run.ok)
    yield from holds("caches", one.caches.replace("L2", "L"), *((100 * warm,) if "%" in one.caches else ()))


def failed(lines: Sequence[Failed], run: Run) -> Iterator[str]:
    """Each row without a time, once, with its reason."""
    bad = run.rows[run.rows["status"] != "ok"]
    known = sorted(
        (*map(str, row[["status", "bench", "implementation"]]), row["reason"] or "no reason recorded", row["cell"])
        for _, row in bad.iterrows()
    )
    said = sorted(
        (one.status, one.bench, one.implementation, one.reason, cell) for one in lines for cell, _ in one.cells
    )
    yield from [f"rows that are not ok: {set(known) ^ set(said)}"] * (known != said)


def evidence(tables: Sequence[Evidence], run: Run) -> Iterator[str]:
    """Each number is that of the file of its table, line by line."""
    for table in tables:
        rows = run.stored[table.name]
        yield from wrong(lines=(re.search(r"n = (\d+)", table.about)[1], len(rows)))  # type: ignore[index]
        columns = {
            "ncu": ("duration_us", "dram_read_mb", "dram_write_mb", "dram_percent_of_peak", "l2_percent_of_peak"),
            "backward": ("us", "share_of_copy"),
        }[table.name]
        if len(rows) != len(table.lines):
            yield f"{table.name}: {len(table.lines)} lines of {len(rows)}"
        for line, (_, row) in zip(table.lines, rows.iterrows(), strict=False):
            for text, column in zip(line[-table.results :], columns, strict=True):
                times = 100 if column == "share_of_copy" else 1
                value = row[column]
                yield from holds(f"{table.name} {column}", text, *(() if pd.isna(value) else (times * value,)))
            sizes = re.findall(r"\b([THEk])=(\d+)", " ".join(line))
            names = {"T": "tokens", "H": "hidden", "E": "experts", "k": "top_k"}
            yield from (f"{table.name}: {a}={b}" for a, b in sizes if int(b) != int(row[names[a]]))


# Replayed seed documents


def texts(where: str, line: Sequence[str], *values: float | str | None) -> Iterator[str]:
    """What is false of the texts of a line: a number is compared as it is printed, None is a dash, a text is equal."""
    for i, (text, value) in enumerate(zip(line, values, strict=True)):
        if isinstance(value, str) or value is None or pd.isna(value):
            expected = value if isinstance(value, str) else "–"
            yield from [f"{where}, column {i + 1}: {text} is said, {expected} is stored"] * (text != expected)
        else:
            yield from holds(f"{where}, column {i + 1}", text, value)


def ms(rows: pd.DataFrame, name: str) -> float | None:
    mine = rows[(rows["implementation"] == name) & (rows["status"] == "ok")]
    return float(mine["median_us"].iloc[-1]) / 1000 if len(mine) else None


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


BASES = ("torch_loop", "dequant", "dequant_cute", "dequant_uncached", "dequant_loop")


def grouped(rows: pd.DataFrame) -> tuple[list[float | str | None], float | None, float | None]:
    """The nine measured columns of a shape's line, and both of its ratios."""
    loop, looped = ms(rows, "torch_loop"), ms(rows, "dequant_loop")
    kept = min((one for name in ("dequant", "dequant_cute") if (one := ms(rows, name)) is not None), default=None)
    able = rows[(rows["status"] == "ok") & ~rows["implementation"].isin(BASES)]
    doubts = ", ".join(rows.loc[rows["anomaly"].notna(), "implementation"].drop_duplicates()) or None
    if able.empty:
        return [loop, looped, kept, "", None, None, None, None, doubts], None, None
    best = able.loc[able["median_us"].idxmin()]
    time = best["median_us"] / 1000
    quantised = (rows["implementation"] == "dequant_loop").any()
    first, second = (ratio(looped, time), ratio(kept, time)) if quantised else (ratio(loop, time),) * 2
    return [loop, looped, kept, best["implementation"], time, first, second, best["tflops"], doubts], first, second


def shape_rows(known: Mapping[str, Any], run: Run) -> pd.DataFrame:
    """The rows of one published shape: its format of weights, and the loop over unquantised ones."""
    rows = run.rows[(run.rows["bench"] == "experts") & (run.rows["tokens"] == known["tokens"])]
    rows = rows[(rows["experts"] == known["experts"]) & (rows["dtype"] == known["activations"])]
    rows = rows[(rows["hidden"] == known["k"]) & (rows["intermediate"] == known["n"] // 2)]
    form = FORMATS.get(known["format"], known["format"])
    plain = (rows["weights"] == known["activations"]) & (rows["implementation"] == "torch_loop")
    return rows[(rows["weights"] == form) | plain]


def seven_shapes(table: Table, run: Run) -> Iterator[str]:
    published = csv("003").to_dict("records")
    measured = [(one, rows) for one in published if len(rows := shape_rows(one, run))]
    yield from [f"{len(table.rows)} lines of {len(measured)}"] * (len(table.rows) != len(measured))
    for line, (known, rows) in zip(table.rows, measured, strict=False):
        theirs = [known[name] for name in ("experts", "n", "k", "tokens")]
        times = [known[f"{name}_ms"] for name in ("base_mm", "base_dequant", "kernel")]
        ours, *_ = grouped(rows)
        where = " ".join(line[:7])
        yield from texts(
            where, [line[0], *line[5:7], line[12]], *(known[n] for n in ("shape", "format", "activations", "machine"))
        )
        yield from texts(where, line[1:5], *theirs)
        yield from texts(where, line[7:12], *times, known["speedup"], known["tflops"])
        if ours[3] == "":
            ours[3] = line[17]  # why there is no kernel
        yield from texts(where, line[14:], *ours)


def means_of_shapes(table: Table, run: Run) -> Iterator[str]:
    published = csv("003")
    for line in table.rows:
        known = published[(published["format"] == line[0]) & (published["activations"] == line[1])]
        pairs = [(one, rows) for one in known.to_dict("records") if len(rows := shape_rows(one, run))]
        speeds = pd.Series([one["speedup"] for one, _ in pairs])
        steady = pd.Series([one["speedup"] for one, _ in pairs if one["machine"] == "steady"])
        ours = [grouped(rows)[1:] for _, rows in pairs]
        both = [pd.Series([one[i] for one in ours if one[i] is not None], dtype=float) for i in (0, 1)]
        values = [gmean(one) if len(one) else None for one in (speeds, steady, *both)]
        yield from texts(" ".join(line[:2]), line[2:], *values, len(pairs))


def exact_by_format(table: Table, run: Run) -> Iterator[str]:
    known = csv("003_accuracy").set_index(["format", "activations"])
    experts = run.rows[(run.rows["bench"] == "experts") & run.rows["status"].isin(["ok", "incorrect"])]
    for line in table.rows:
        row = known.loc[(line[0], line[1])]
        rows = experts[(experts["weights"] == FORMATS.get(line[0], line[0])) & (experts["dtype"] == line[1])]
        right = rows[rows["status"] == "ok"]
        yield from texts(" ".join(line[:2]), line[2:4], "passed" if row["passed"] else "failed", row["tolerance"])
        yield from holds(" ".join(line[:2]), line[4], len(right), len(rows))
        yield from texts(" ".join(line[:2]), line[5:], *(right[name].max() for name in ("rel_l2_error", "tolerance")))


def decoding(table: Table, run: Run) -> Iterator[str]:
    rows = run.rows[(run.rows["bench"] == "experts") & (run.rows["phase"] == "decode")]
    for line in table.rows:
        alike = rows[rows["dtype"] == line[5]]
        plain = alike[(alike["weights"] == alike["dtype"]) & (alike["implementation"] == "torch_loop")]
        own_rows = alike[alike["weights"] == FORMATS.get(line[4], line[4])]
        sizes = own_rows.iloc[0][["hidden", "intermediate", "experts", "top_k"]]
        ours, *_ = grouped(pd.concat([plain, own_rows]).drop_duplicates("implementation", keep="last"))
        if ours[3] == "":
            ours[3] = line[9]
        yield from texts(" ".join(line[4:6]), [*line[:4], *line[6:]], *map(float, sizes), *ours)


def layer_rows(run: Run) -> pd.DataFrame:
    """Layers with a time, those of `auto` under what it ran unless that was measured."""
    rows = run.ok[run.ok["bench"] == "layer"]
    auto = rows["implementation"] == "auto"
    ran = rows[auto].assign(implementation=rows.loc[auto, "configuration"].astype(str).str.partition(";")[0])
    return pd.concat([rows[~auto], ran]).drop_duplicates(["cell", "card", "implementation"])


def guarded_layers(table: Table, run: Run) -> Iterator[str]:
    guard, rows = float(csv("003_models")["guard"].max()), layer_rows(run)
    for line in table.rows:
        mine = rows[(rows["model"] == line[0]) & (rows["phase"] == line[1]) & (rows["tokens"] == int(line[2]))]
        mine = mine[mine["dtype"] == line[3]]
        full, best = (
            one.loc[one["median_us"].idxmin()]
            for one in (mine[mine["weights"] == line[3]], mine[mine["weights"] == line[4]])
        )
        gain, decodes = full["median_us"] / best["median_us"], line[1] == "decode"
        values = [guard if decodes else None, full["implementation"], full["median_us"], best["implementation"]]
        values += [best["median_us"], gain, ("yes" if gain >= 1 / guard else "no") if decodes else None]
        yield from texts(" ".join(line[:5]), line[5:12], *values)


def dispatched(table: Table, run: Run) -> Iterator[str]:
    """Times of what ran in each phase, their sum over a prefill and 32 steps, and its ratio to the best of each."""
    rows, totals = layer_rows(run), {}
    auto = run.ok[(run.ok["bench"] == "layer") & (run.ok["implementation"] == "auto")]
    for line in table.rows:
        us = []
        for phase, name, text in (("prefill", line[4], line[5]), ("decode", line[6], line[7])):
            from_rows = auto if name.startswith("auto: ") else rows
            mine = from_rows[(from_rows["model"] == line[0]) & (from_rows["dtype"] == line[1])]
            mine = mine[(mine["weights"] == line[2]) & (mine["phase"] == phase)]
            mine = mine[name.startswith("auto: ") | (mine["implementation"] == name)]
            time = float(mine["median_us"].iloc[0]) if len(mine) else None
            yield from texts(" ".join(line[:4]), [text], time)
            us.append(time)
        total = None if None in us else (us[0] + 32 * us[1]) / 1000
        totals[(*line[:3], line[3])] = total
    for line in table.rows:
        total = totals[(*line[:3], line[3])]
        yield from texts(" ".join(line[:4]), line[8:10], total, ratio(total, totals[(*line[:3], "manual_branch")]))


def whole_models(table: Table, run: Run) -> Iterator[str]:
    guard, rows = float(csv("003_models")["guard"].max()), run.rows[run.rows["bench"] == "model"]
    for line in table.rows:
        mine = rows[(rows["model"] == line[0]) & (rows["dtype"] == line[1])]
        own_rows = mine[(mine["weights"].fillna(mine["dtype"]) == line[2]) & (mine["implementation"] == line[4])]
        plain = mine[
            (mine["weights"].fillna(mine["dtype"]) == mine["dtype"])
            & mine["implementation"].str.startswith("transformers_")
        ]
        plain = plain[plain["status"] == "ok"]
        times = [ms(own_rows[own_rows["phase"] == phase], line[4]) for phase in ("prefill", "decode")]
        full = [plain.loc[plain["phase"] == phase, "median_us"].min() / 1000 for phase in ("prefill", "decode")]
        gains = [ratio(one, time) for one, time in zip(full, times, strict=True)]
        quantised = line[2] != line[1]
        within = None if gains[1] is None or not quantised else "yes" if gains[1] >= 1 / guard else "no"
        values = [*times, ratio(1000, times[1]), *gains, within]
        yield from texts(" ".join([*line[:3], line[4]]), [line[3], *line[5:11]], guard if quantised else None, *values)


def ten_shapes(table: Table, run: Run) -> Iterator[str]:
    dtype = table.title.partition(" in ")[2].partition(",")[0]
    layers = run.rows[(run.rows["bench"] == "layer") & (run.rows["dtype"] == dtype)]
    for line, (_, known) in zip(table.rows, csv("000").iterrows(), strict=True):
        names = ("tokens", "hidden", "intermediate", "experts", "top_k")
        rows = layers[np.logical_and.reduce([layers[name] == known[name] for name in names])]
        ok = rows[rows["status"] == "ok"]
        naive = ms(rows, "torch_loop")
        rest = ok[ok["implementation"] != "torch_loop"].sort_values("median_us")
        best, name = (rest["median_us"].iloc[0], rest["implementation"].iloc[0]) if len(rest) else (None, None)
        gain = ratio(None if naive is None else 1000 * naive, best)
        error = ok.loc[ok["implementation"].isin(["torch_loop", name]), "max_abs_error"].max()
        close = "yes" if error <= known["atol"] else "not told by the largest error"
        theirs = [
            known["naive_us"],
            known["custom_us"],
            known["speedup_percent"],
            known["naive_us"] / known["custom_us"],
        ]
        ours = [None if naive is None else 1000 * naive, name, best, None if gain is None else 100 * (gain - 1), gain]
        sizes = [known[one] for one in ("test", *names)]
        yield from texts(f"test {line[0]}", line, *sizes, *theirs, *ours, error, None if pd.isna(error) else close)


def commands(table: Table, run: Run) -> Iterator[str]:
    """Of each command the cells and the range of times of each implementation; published times as its file has them."""
    number = run.name.partition(".seed-")[2]
    known = load(ROOT / "config/seeds/published/predecessor.yaml")[number]["commands"]
    for line, one in zip(table.rows, known, strict=True):
        yield from texts(one["theirs"], [line[0], line[2]], one["theirs"], one["ours"])
        published = one.get("published", {})
        yield from holds(one["theirs"], "" if line[1] == "–" else line[1], *published.values())
        words = shlex.split(one["ours"])
        asked = {
            name[2:].replace("-", "_"): text.split(",") for name, text in zip(words[3::2], words[4::2], strict=True)
        }
        rows = run.rows[run.rows["bench"] == words[2]]
        if "capacity_factor" not in asked:
            rows = rows[rows["capacity_factor"].isna()]
        for name, values in asked.items():
            if name in AXES:
                kinds = [AXES[name].kind(value) for value in values if value != "none"]
                rows = rows[rows[name].isin(kinds) | (rows[name].isna() & ("none" in values))]
        yield from holds(one["theirs"], line[3], rows["cell"].nunique())
        ok = rows[rows["status"] == "ok"]
        spans = []
        for _, mine in ok.groupby("implementation", sort=False):
            spans += (
                [mine["median_us"].iloc[0]] if len(mine) == 1 else [mine["median_us"].min(), mine["median_us"].max()]
            )
        if line[4] != "–":
            times = ", ".join(re.findall(r"(?:^|, )(\w+ [\d.,]+(?: to [\d.,]+)? µs)", line[4]))
            yield from holds(one["theirs"], times, *spans)


def operators(table: Table, run: Run) -> Iterator[str]:
    """Operators by rank: theirs as in their file, ours as the profile of the same format has them."""
    m = re.fullmatch(r"Operators of the (\w+) block, (\w+)", table.title)
    assert m
    name = table.groups[2].title.partition(": ")[2].partition(",")[0]
    theirs = csv("004")
    theirs = theirs[theirs["block"] == m[1]].to_dict("records")
    (profile,) = [one for one in run.profiles if one["axes"]["dtype"] == m[2]]
    ours = profile["implementations"][name]["operators"][:10]
    for i, line in enumerate(table.rows):
        yield from texts(table.title, line[:1], i + 1)
        for cells, known, device in ((line[1:5], theirs, "self_cuda_us"), (line[5:], ours, "self_device_us")):
            one = known[i] if i < len(known) else None
            values = (
                (None,) * 4 if one is None else (one["operator"][:60], one["self_cpu_us"], one[device], one["calls"])
            )
            yield from texts(f"{table.title}, {i + 1}", cells, *values)


def totals(table: Table, run: Run) -> Iterator[str]:
    dtype = table.title.rpartition(" ")[2]
    (profile,) = [one for one in run.profiles if one["axes"]["dtype"] == dtype]
    source = load(ROOT / "config/seeds/published/sources.yaml")["004"]
    eager = next((line[4] for line in table.rows if line[0] == "eager"), None)
    for line in table.rows:
        known, own_profile = source["totals_us"][line[0]], profile["implementations"].get(line[4], {})
        apart = [one["max_diff"] for one in profile["differences"] if {one["first"], one["second"]} == {eager, line[4]}]
        rows = run.rows[(run.rows["cell"] == profile["cell"]) & (run.rows["implementation"] == line[4])]
        values = [known["cpu"], known["cuda"], source["max_diff"].get(line[0]), line[4]]
        values += [own_profile.get("self_cpu_us"), own_profile.get("self_device_us"), apart[0] if apart else None]
        yield from texts(
            f"{table.title}: {line[0]}", line[1:], *values, rows["median_us"].iloc[0] if len(rows) else None
        )


SEEDS: Sequence[tuple[str, Callable[[Table, Run], Iterator[str]]]] = (
    (r"Seven shapes by format of weights and activations", seven_shapes),
    (r"Geometric means of the speed-ups over these shapes", means_of_shapes),
    (r"Kernels against what the quantised weights stand for", exact_by_format),
    (r"Decoding by format of weights and activations", decoding),
    (r"Layers of its two models", guarded_layers),
    (r"A dispatcher between kernels", dispatched),
    (r"Whole models, quantised against full precision", whole_models),
    (r"Ten shapes in \w+, the published figures in fp32", ten_shapes),
    (r"Their commands, and ours", commands),
    (r"Their figures, metrics and rules, and ours", lambda table, run: iter(())),  # names alone
    (r"One call of each form, \w+", totals),
    (r"Operators of the \w+ block, \w+", operators),
)


def seed(found: Seed, run: Run) -> Iterator[str]:
    """Each of its tables; a table that nothing here knows is a fault."""
    for table in found.tables:
        check = next((check for title, check in SEEDS if re.fullmatch(title, table.title)), None)
        if check is None:
            yield f"nothing here computes the table {table.title}"
            continue
        yield from (f"{table.title}: {one}" for one in check(table, run))
        if m := re.search(r" (\d+) of their (\d+) rows were measured", table.note):
            yield from wrong(rows=(m[1], len(table.rows)), of=(m[2], len(csv("003"))))


# Quantised weights


def by_format(found: Any, run: Run) -> Iterator[str]:
    """Each line is of a row that is the fastest of ours or torch of its shape and format; shares and ratios are of it."""
    rows = run.ok[run.ok["bench"].isin(["layer", "experts"])]
    own_names = {
        name: {one.name for one in BENCHES[name].implementations if not one.peer} for name in ("layer", "experts")
    }
    free = [name in own_names[bench] for bench, name in zip(rows["bench"], rows["implementation"], strict=True)]
    there = set(zip(rows["bench"], rows["cell"], rows["card"], rows["implementation"], strict=True))
    ran = rows["configuration"].astype(str).str.partition(";")[0]
    keys = zip(rows["bench"], rows["cell"], rows["card"], ran, strict=True)
    twice = (rows["implementation"] == "auto") & pd.Series([key in there for key in keys], rows.index)
    other = rows["packed"].notna() & (rows["packed"] != rows["dtype"])
    form = rows["weights"].where(~other, rows["weights"] + " x " + rows["packed"].fillna(""))
    fixed = [name for name in AXES if name not in ("weights", "packed", "phase")]
    rows = rows.assign(form=form, free=free, group=rows.groupby(["bench", "card", *fixed], dropna=False).ngroup())
    rows = rows[~twice]
    for line in found.lines:
        where = f"{line.shape} T={line.tokens} {line.form}"
        mine = rows[(rows["bench"] == line.shape.partition(":")[0]) & (rows["tokens"] == line.tokens)]
        candidates = mine[(mine["form"] == line.form) & (mine["implementation"] == line.implementation)]
        results = [list(_format_line(where, line, row, rows, run)) for _, row in candidates.iterrows()]
        yield from min(results, key=len, default=[f"{where}: no such row"])
    yield from (fault for one in found.bars for fault in bar(one, run))


def _format_line(where: str, line: Any, row: pd.Series, rows: pd.DataFrame, run: Run) -> Iterator[str]:
    us, same = row["median_us"], rows[rows["group"] == row["group"]]
    alike = same[same["form"] == line.form]
    if alike.loc[alike["free"], "median_us"].min() < us:
        yield f"{where}: another is faster"
    plain = same[
        same["free"] & (same["weights"] == same["dtype"]) & (same["packed"].isna() | (same["packed"] == same["dtype"]))
    ]
    peers = alike[~alike["free"]]
    peer = peers.loc[peers["median_us"].idxmin()] if len(peers) else None
    moved = row["compulsory_bytes"] / 1e6
    ratio_of = None if len(plain) == 0 or row["weights"] == row["dtype"] else plain["median_us"].min() / us
    for text, value in (
        (line.time, us),
        (line.moved, moved if moved > 0 else None),
        (line.copy, 100 * row["share_of_copy"]),
        (line.ceiling, 100 * row["share_of_roofline"]),
        (line.error, 100 * row["rel_l2_error"] / row["tolerance"]),
        (line.speedup, row["speedup"] if row["speedup"] > 0 else None),
        (line.plain, ratio_of),
        (line.peer, None if peer is None else peer["median_us"] / us),
        (line.loses, None),
    ):
        if text is line.loses and run.matrix is not None:
            activations = row["dtype"] if row["weights"] == line.form else row["packed"]
            known = run.matrix[(run.matrix["weights"] == row["weights"]) & (run.matrix["activations"] == activations)]
            known = known.loc[known["drawn"] == "normal", "output_snr_db"].dropna()
            value = known.iloc[-1] if len(known) else None
        yield from holds(where, "" if text == "–" else text, *(() if value is None or pd.isna(value) else (value,)))
    named = line.peer.partition(" ")[2], "" if peer is None else peer["implementation"]
    yield from [f"{where}: the fastest peer is {named[1]}"] * (named[0] != named[1])


def accuracy(found: Any, run: Run) -> Iterator[str]:
    """What each format loses, how exact kernels are, and how many of them, of the accuracy matrix."""
    matrix = run.matrix
    assert matrix is not None
    sizes = dict(re.findall(r"(\w+)=(\d+)", found.sizes))
    yield from (f"{a}={b}" for a, b in sizes.items() if int(b) != matrix[a].iloc[0])
    pairs = list(dict.fromkeys(zip(matrix["weights"], matrix["activations"], strict=True)))
    if pairs != [(line.weights, line.activations) for line in found.lines]:
        yield f"lines of {pairs}"
    for line in found.lines:
        rows = matrix[(matrix["weights"] == line.weights) & (matrix["activations"] == line.activations)]
        where = f"{line.weights} {line.activations}"
        for drawn, said in zip(("normal", "outliers"), line.costs, strict=True):
            mine = rows[rows["drawn"] == drawn]
            names = ("weight_snr_db", "output_snr_db", "output_cosine")
            first = mine.iloc[0] if len(mine) else pd.Series(dict.fromkeys(names))
            exactly = ["exact" if len(mine) and pd.isna(first[name]) else first[name] for name in names]
            yield from texts(where, said, *exactly)
        tried = rows[rows["status"].notna()]
        right = tried[tried["status"] == "ok"]
        shares = (right["kernel_error"] / right["tolerance"]).dropna()
        yield from holds(
            where, "" if line.right == "–" else line.right, *((len(right), len(tried)) if len(tried) else ())
        )
        yield from texts(
            where, [line.bound, line.most], 100 * rows["of_bound"].max(), 100 * shares.max() if len(shares) else None
        )
        wrong_rows = {
            f"{a} is {b}: {c}"
            for a, b, c in tried.loc[tried["status"] != "ok", ["implementation", "status", "reason"]].to_numpy()
        }
        yield from [f"{where}: {line.wrong}"] * (set(line.wrong) != wrong_rows)


# Rows of others


def others(tables: Sequence[Table], run: Run) -> Iterator[str]:
    """Times as published and as measured here, warm, and their ratio; the sentence counts the lines of the table."""
    theirs = pd.read_csv(ROOT / "config/published/aisimulate-h200.csv", dtype={"version": str})
    warm = run.ok[run.ok["bench"] == "layer"].assign(key=lambda rows: rows["weights"].fillna(rows["dtype"]))
    for table in tables:
        for line in table.rows:
            model, _, ranks = line[0].partition(", one of ")
            rows = theirs[(theirs["tokens"] == int(line[1])) & (theirs["weights"] == line[2])]
            rows = rows[(rows["package"] == line[3]) & (rows["version"] == line[4]) & (rows["kernel"] == line[5])]
            rows = rows[rows["tensor_parallel"] == int(ranks.split()[0] if ranks else 1)]
            where = " ".join(line[:6])
            if all(list(holds(where, line[6], us)) for us in rows["median_us"]):
                yield f"{where}: {line[6]} is not published"
            mine = warm[(warm["model"] == model) & (warm["tokens"] == int(line[1])) & (warm["key"] == line[2])]
            mine = mine[mine["tp"].fillna(1) == int(ranks.split()[0] if ranks else 1)]
            for name, text in ((line[7], line[8]), (line[11], line[12])):
                ran = [
                    name == one or (one == "auto" and str(way).partition(";")[0] == name)
                    for one, way in zip(mine["implementation"], mine["configuration"], strict=True)
                ]
                us = mine.loc[ran, "warm_median_us"]
                if text != "–" and all(list(holds(where, text, one)) for one in us):
                    yield f"{where}: {name} takes {list(us)}, not {text}"
            if m := re.search(r"version (\S+) here", line[10]):
                here = mine.loc[mine["implementation"] == line[7], "implementation_version"]
                yield from [f"{where}: version {m[1]} of {list(here)}"] * (m[1] not in set(here))
            if line[9] != "–":
                pairs = [
                    (a, b)
                    for a in mine.loc[mine["implementation"] == line[7], "warm_median_us"]
                    for b in rows["median_us"]
                ]
                good = [(a, b) for a, b in pairs if not list(holds(where, line[9], a / b))]
                near = line[10].startswith("reproduced") == (bool(good) and abs(good[0][0] / good[0][1] - 1) <= 0.1)
                yield from [f"{where}: {line[9]}, {line[10]}"] * (not good or not near)
        status = [line[10].partition(":")[0] for line in table.rows]
        even = theirs[(theirs["expert_parallel"] == 1) & (theirs["loads"] == "balanced")]
        whole = theirs[theirs["model"].notna()]
        keys = {(h, e, k, i) for h, e, k, i in whole[["hidden", "experts", "top_k", "intermediate"]].to_numpy()}
        widths = even[["hidden", "experts", "top_k"]].assign(width=even["intermediate"] * even["tensor_parallel"])
        comparable = sum(
            even["model"].notna() | np.array([key in keys for key in widths.itertuples(index=False, name=None)])
        )
        same, good = sum("reproduced" in one for one in status), status.count("reproduced")
        first = table.note.partition(" Boundary of ")[0]
        numbers_ = [len(status), comparable, *((same, good, 100 * good / same, 10) if same else ())]
        named = re.findall(r"([^,.:]+(?::[^,.]+)?) \((\d+)\)", first.partition("within 10 %.")[2])
        yield from holds(table.title, first.partition(" No ")[0], *numbers_)
        yield from [f"{table.title}: {named}"] * (sum(int(n) for _, n in named) != len(status) - same)


# Training runs


def quality(found: Any, run: Run) -> Iterator[str]:
    """Contests, adaptations and alterations: means and half-widths over seeds; ranks and tests by page_quality.py."""
    trained = run.trained
    assert trained is not None
    for contest in found.contests:
        label = contest.title.partition(":")[0]
        runs = page_quality.runs_of(trained, label, contest.causal)
        yield from (f"{label}: {one}" for one in page_quality.ranked(contest.rows, runs))
        yield from (f"{label}: {one}" for one in page_quality.power(contest.power, runs))
        yield from described(contest.title, trained)
        for line in contest.rows:
            name = next(
                one
                for one in sorted(set(runs["contestant"]), key=len, reverse=True)
                if line["contestant"] == one or line["contestant"].startswith(f"{one} ")
            )
            mine = runs[runs["contestant"] == name]
            for (column, *_), text in zip(found.columns, line["values"], strict=True):
                if column in mine and not column.endswith("bits"):
                    known = mine[column].dropna()
                    known = 100 * known[mine["validation_batches"] == "mixed"] if column == "drop_rate" else known
                    yield from texts(f"{label}, {name}, {column}", [text], known.mean() if len(known) else None)
    adapted = run.adapted
    for line in found.adaptations:
        assert adapted is not None
        final = adapted[adapted["purpose"] == "final"].sort_values("step").groupby("run", sort=False)
        first, mine = final.head(1).set_index("run"), final.tail(1).set_index("run")
        mine = mine.assign(gain=first["bits_per_byte"] - mine["bits_per_byte"])
        mine = mine.assign(forgetting=mine["old_bits_per_byte"] - first["old_bits_per_byte"])
        mine = mine[
            (mine["label"] == line["label"])
            & (line["name"] == "PERFT-" + mine["variant"] + ", r = " + mine["rank"].astype(str))
        ]
        where = f"{line['label']}, {line['name']}"
        said = [line["params"], line["active_params"], str(line["seeds"]), line["lr"]]
        known = [
            *(mine[name].iloc[0] for name in ("params", "active_params")),
            mine["seed"].nunique(),
            mine["lr"].iloc[0],
        ]
        yield from texts(where, said, *known)
        for name in ("bits_per_byte", "gain", "forgetting"):
            yield from holds(f"{where}, {name}", line[name], mine[name].mean(), page_quality.half(mine[name]))
    for table in found.altered:
        yield from described(table.title, trained)
        column = "bits_by_format" if "another format" in table.title else "bits_by_capacity"
        label = table.title.partition(":")[0]
        for name, bits, added in table.lines:
            mine = page_quality.compare.finals(trained)
            mine = mine[(mine["label"] == label) & (mine["contestant"] == name.removesuffix(" †"))]
            yield from spread(f"{label}, {name}", bits, mine["bits_per_byte"])
            for what, text in zip(table.names, added, strict=True):
                more = mine[column].map(lambda one, what=what: dict(one).get(what)) - mine["bits_per_byte"]
                yield from spread(f"{label}, {name}, {what}", text.lstrip("+"), more.astype(float))


def spread(where: str, text: str, values: pd.Series) -> Iterator[str]:
    """A mean, and half of its interval where that is shown."""
    values = values.dropna()
    half = page_quality.half(values) if len(values) > 1 else 0.0
    yield from holds(where, text, *((values.mean(), half) if "±" in text else (values.mean(),) if len(values) else ()))
    yield from [f"{where}: the half-width {half} is not shown"] * ("±" not in text and half > 5e-5)


def described(title: str, trained: pd.DataFrame) -> Iterator[str]:
    """Experts, choices, parameters, steps, bytes and seeds of a config."""
    m = re.fullmatch(
        r"(?P<label>\w+): E=(?P<experts>\d+), k=(?P<k>\d+), (?P<least>[\d.]+)(?: to (?P<most>[\d.]+))? M parameters, (?P<steps>[\d,]+) steps, (?P<bytes>[\d.]+) MB \(n = (?P<seeds>\d+) seeds?\)(?:: .*)?",
        title,
    )
    if not m:
        yield f"no such title: {title}"
        return
    rows = page_quality.compare.finals(trained)
    rows = rows[rows["label"] == m["label"]]
    numbers_ = {"experts": rows["experts"].max(), "k": rows["top_k"].max(), "least": rows["params"].min() / 1e6}
    numbers_ |= {"most": rows["params"].max() / 1e6, "steps": rows["step"].max(), "seeds": rows["seed"].nunique()}
    numbers_ |= {"bytes": rows["tokens_seen"].max() / 1e6}
    for name, value in numbers_.items():
        printed = m[name] if "." in (m[name] or ".") or name != "bytes" else m[name] + ".0" * bool(value < 100)
        rounded = float(f"{value:.3g}") if name in ("bytes", "least", "most") else value
        yield from (f"{title}: {one}" for one in wrong(**{name: (printed, rounded)}))


# Sentences


STATED = re.compile(
    rf"(\S+) with and without the limit are (\w+) \(([^;]*); margin 0.01\): ({N}) \(({N}) to ({N})\) bits per byte, n = (\d+) seeds"
)


def answers(found: Sequence[Any], run: Run) -> Iterator[str]:
    for one in found:
        if one.text.startswith("Not measured: this run"):
            continue
        check = next((check for rule, check in ANSWERS.items() if one.rule == rule), None)
        yield from [f"nothing here computes this answer: {one.text}"] if check is None else check(one.text, run)


def lost_bits(text: str, run: Run) -> Iterator[str]:
    """By config and rule what a limit adds to the bits per byte, over seeds; a t test and TOST, corrected for the number of rules."""
    assert run.trained is not None
    finals = page_quality.compare.finals(run.trained)
    factor = re.search(r"Measured: ([\d.]+) ", text)
    for way, label, rules, rest in re.findall(
        r"(?:(Set after training|Trained with it|[A-Z][\w ]+): |\()(\w+), (\d+) rules?: (.*?)(?=\)\.|; (?:set|trained)|\.$)",
        text,
    ):
        del way
        mine = finals[(finals["label"] == label) & finals["causal"].astype(bool)]
        said = STATED.findall(rest)
        yield from [f"{label}: no statement in {rest}"] * (not said)
        for name, _, _, effect, low, high, n in said:
            runs = mine[mine["contestant"] == name]
            lost = limited(runs, float(factor[1]) if factor else 1.0)
            error = lost.std() / math.sqrt(len(lost))
            reach_ = stats.t.ppf(1 - 0.05 / (2 * int(rules)), len(lost) - 1) * error
            numbers_ = {
                "effect": (effect, lost.mean()),
                "low": (low, lost.mean() - reach_),
                "high": (high, lost.mean() + reach_),
            }
            yield from (f"{label}, {name}: {one}" for one in wrong(**numbers_, n=(n, len(lost))))


def limited(runs: pd.DataFrame, factor: float) -> pd.Series:
    """What a capacity factor adds to the loss of each run: of the evaluation that the run has with it, or of one after training."""
    known = runs["bits_by_capacity"].map(lambda one: {} if one is None or isinstance(one, float) else dict(one))
    after = known.map(lambda one: one.get(f"{factor:g}", math.nan)).astype(float) - runs["bits_per_byte"]
    trained = runs["bits_per_byte"] * (runs["val_loss_with_capacity"] / runs["val_loss"] - 1)
    return trained.where(runs["capacity_factor"] == factor, after).dropna()


def backward(text: str, run: Run) -> Iterator[str]:
    """The fastest step of each cell, with its interval."""
    steps = run.ok[run.ok["bench"] == "training"]
    parts = re.findall(rf"(\S+) T(\d+)[^:;]*: (\w+) takes ({N}) µs(?: \[({N}), ({N})\])? forward and backward", text)
    yield from wrong(cells=(str(len(parts)), steps["cell"].nunique()))
    for model, tokens, name, us, low, high in parts:
        mine = steps[(steps["model"] == model) & (steps["tokens"] == int(tokens))]
        first = mine.loc[mine["median_us"].idxmin()]
        yield from [f"{model}: {first['implementation']} is the fastest"] * (first["implementation"] != name)
        yield from wrong(us=(us, first["median_us"]), low=(low, first["ci_low_us"]), high=(high, first["ci_high_us"]))
    if "of which the backward pass" in text:
        yield f"nothing here computes what is apart: {text}"


ANSWERS = {"answers.lost_bits": lost_bits, "answers.backward_apart": backward}


def unfound(one: Any, run: Run) -> Iterator[str]:
    if m := re.search(r"(\d+) of which are faster", one.text):
        sound = firm(run.rows, "shown", ratios=True)
        yield from wrong(faster=(m[1], (sound["shown"] == "faster").sum()))
    elif m := re.match(r"(\d+) implementations? w(?:as|ere) entered twice, and 5 are needed", one.text):
        yield from wrong(twins=(m[1], run.ok["twin_speedup"].notna().sum()))
    elif m := re.search(r"of (\d+) rows? with a verdict", one.text):
        yield from wrong(judged=(m[1], run.ok["best_verdict"].notna().sum()))
    else:
        yield from [f"nothing here computes this sentence: {one.text}"] * (numbers(one.text) not in ([], ["11"]))


def sentence(one: Any, run: Run) -> Iterator[str]:
    """A headline or finding."""
    check = next((check for rule, check in TRAINED.items() if one.rule == rule), None)
    yield from faults(one.text, run.rows) if check is None else check(one.text, run.trained)


TRAINED = {"trained_rules.quality": page_quality.best, "trained_rules.left_over": page_quality.left_over}


def each(check: Callable[[Any, Run], Iterator[str]]) -> Callable[[Any, Run], Iterator[str]]:
    return lambda parts, run: (fault for one in parts for fault in check(one, run))


PARTS: dict[str, Callable[[Any, Run], Iterator[str]]] = {
    "scope": scope,
    "suspects": sentence,
    "headlines": each(sentence),
    "unfound": unfound,
    "findings": each(sentence),
    "answers": answers,
    "failed": failed,
    "machine": machine,
    "method": method,
    "bars": each(bar),
    "seed": seed,
    "choices": choices,
    "claims": claims,
    "unheld": claims,
    "own": claims,
    "published": others,
    "quality": quality,
    "quantised": by_format,
    "accuracy": accuracy,
    "evidence": evidence,
}


# Histories of a platform, of the rows that are stored today


def floors_of(rows: pd.DataFrame) -> pd.Series:
    """The noise floor of each row by the twins of its bench and size class, of its bench, or of all; 2 % where there are too few."""
    twins = rows[rows["twin_speedup"].notna()]
    apart = np.log(twins["twin_speedup"].astype(float)).abs()
    sizes = lambda of: np.digitize(of["median_us"], [10.0, 100.0])  # noqa: E731
    found = []
    for (_, row), size in zip(rows.iterrows(), sizes(rows), strict=True):
        alike = (twins["bench"] == row["bench"]).to_numpy()
        wider = (alike & (sizes(twins) == size), alike, np.ones(len(twins), bool))
        some = next((apart[mask].sort_values().to_numpy() for mask in wider if mask.sum() >= 5), None)
        if some is None:
            found.append(0.02)
            continue
        floor = max(0.005, some[math.ceil(0.975 * (len(some) - 1))])
        few = math.sqrt((some**2).mean()) * stats.t.ppf(0.975, len(some) / 2) if len(some) < 19 else 0.0
        found.append(max(floor, few))
    return pd.Series(found, rows.index)


@functools.cache
def changes(platform: str) -> tuple[int, int, list[dict[str, Any]]]:
    """Of the stored runs of a platform: rows that were measured more than once, how often, and the steps beyond noise."""
    runs = [path.parent.name for path in sorted((ROOT / "results").glob("*/measurements.parquet"))]
    tables = [timed(stored(run)) for run in runs if run.partition(".")[0] == platform]
    rows = pd.concat([one.assign(floor=floors_of(one)) for one in tables], ignore_index=True)
    rows = rows[rows["started_at"].notna()]
    axes = [axis for axis in AXES.values() if not (axis.follows or axis.default is not None)]
    keys = pd.DataFrame({axis.name: rows[axis.name] for axis in axes})
    for axis in AXES.values():
        if axis.name not in keys:
            usual_ = rows[axis.follows] if axis.follows else axis.default
            reads = rows.groupby("bench")[axis.name].transform(lambda one: one.notna().any())
            keys[axis.name] = rows[axis.name].where(rows[axis.name].notna() | ~reads, usual_)
    keys = keys.assign(bench=rows["bench"], implementation=rows["implementation"])
    names = pd.Series(["|".join(map(str, key)) for key in keys.itertuples(index=False)], rows.index, name="key")
    rows = pd.concat([rows, names], axis=1)
    rows = rows.drop_duplicates(["key", "started_at", "median_us"], keep="last")
    rows = rows[rows.duplicated("key", keep=False)].sort_values(["key", "started_at"], kind="stable")
    pairs = []
    for _, mine in rows.groupby("key"):
        records = mine.to_dict("records")
        pairs += [(a, b, over(a, b, paired=False)) for a, b in itertools.pairwise(records)]
    known = pd.Series([p for *_, (_, _, _, p) in pairs]).dropna().sort_values(ascending=False)
    adjusted = (known * len(known) / np.arange(len(known), 0, -1)).cummin()
    found = []
    for i, (a, b, (ratio_, low, high, _)) in enumerate(pairs):
        names = ["copy_gb_per_s"] + ["peak_tflops"] * bool((b["flops"] or 0) > 0)
        drift = max([abs(math.log(a[n] / b[n])) for n in names if not pd.isna(a[n]) and not pd.isna(b[n])], default=0.0)
        floor = max(a["floor"], b["floor"], drift)
        apart = abs(math.log(ratio_)) > floor and (low > 1 or high < 1) and adjusted.get(i, 1.0) <= 0.05
        found.append({"before": a, "after": b, "ratio": ratio_, "low": low, "high": high, "changed": bool(apart)})
    return rows["key"].nunique(), len(rows), found


def history(about: str, cards: str, steps: Sequence[Sequence[str]], platform: str) -> Iterator[str]:
    """What is false of the page of histories: counts, and of each step both times, the ratio with its ends, others, cards and commits."""
    lines, times, pairs = changes(platform)
    changed = [one for one in pairs if one["changed"]]
    faster = sum(one["ratio"] > 1 for one in changed)
    yield from holds(
        "history", about.partition("slower.")[0], lines, times, len(changed), faster, len(changed) - faster
    )
    moved = sum(one["before"]["card"] != one["after"]["card"] for one in changed)
    yield from holds("history", cards, *((moved,) if 0 < moved < len(changed) else ()))
    yield from [f"{len(steps)} steps"] * (len(steps) != min(len(changed), 200))
    for step in steps:
        day, bench, name, before, after, ratio_, others_, card, commits, cell = step
        mine = [
            one
            for one in changed
            if (one["after"]["bench"], one["after"]["implementation"], one["after"]["cell"]) == (bench, name, cell)
            and str(one["after"]["started_at"])[:10] == day
        ]
        results = [
            list(_step(f"{day} {bench} {name} {cell}", one, pairs, before, after, ratio_, others_, card, commits))
            for one in mine
        ]
        yield from min(results, key=len, default=[f"no such step: {step}"])


def _step(where: str, one: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]], *said: str) -> Iterator[str]:
    before, after, ratio_, others_, card, commits = said
    a, b = one["before"], one["after"]
    yield from holds(where, before, a["median_us"])
    yield from holds(where, after, b["median_us"])
    yield from holds(where, ratio_, one["ratio"], one["low"], one["high"])
    alike = [
        other["ratio"]
        for other in pairs
        if (other["after"]["bench"], other["after"]["cell"]) == (b["bench"], b["cell"])
        and (other["before"]["card"], other["after"]["card"]) == (a["card"], b["card"])
        and other["after"]["implementation"] not in {*ours(b["bench"]), b["implementation"]}
    ]
    yield from holds(where, "" if others_ == "–" else others_, *((np.median(alike), len(alike)) if alike else ()))
    yield from [f"{where}: {card}"] * ((card == "another") != (a["card"] != b["card"]))
    yield from [f"{where}: {commits}"] * (commits != f"{a['git_sha'][:7]} to {b['git_sha'][:7]}")
