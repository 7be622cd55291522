"""Which times contradict those of neighbouring cells, or scatter too much in themselves. Pure functions; no torch.

A neighbour is a row of the same bench, implementation and card whose cell differs in one part only: in its shape (sizes of model and
batch), in its formats, or in what decides the loads. How the time follows the sizes is not known (a kernel waits for launches, bytes,
products, or a loop over the experts), but it lies between not at all and as much as whatever grew most: with a ratio r > 1 of
what both cells need, time t at the neighbour allows t to r t here. A time is implausible where it lies outside what most of at least
`LEAST_NEIGHBOURS` allow, each widened by `FACTOR` both ways. One outlier among the neighbours is outvoted.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from moe_routing_bench.children import forked
from moe_routing_bench.comparison.verdicts import replaced
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.quantities import us
from moe_routing_kernels.formats import QUANTISED

FACTOR = 3.0  # rows of one H200 stay within 2.1 of what their neighbours allow
LEAST_NEIGHBOURS, NEAREST = 3, 5  # neighbours that a verdict needs; those that allow least are taken
SCATTER = 1.5  # upper over lower quartile of the samples; that of rows of H200s is at most 1.15 but where a loop waits for the host: 1.93
NEEDS = ("compulsory_bytes", "flops", "experts", "tokens")  # what times grow with, at most in proportion to one of them
PARTS = {part: [axis.name for axis in AXES.values() if axis.part == part] for part in ("shape", "format", "workload")}
AGREE = 1.1  # what two measurements of one row may differ by
# Share of the cells: where more are in doubt, the machine is, and all are suspect.
REPEATED, LEAST_REPEATED = 0.05, 3
CONFIRMED = "confirmed"
_Rule = Callable[[pa.Table], pa.Table]
_MANY_ROWS = 2000  # which take longer than a child to start
_ROW = ["cell_hash", "implementation"]
_TOLD = ("anomaly", "again", "again_us", "again_ci_low_us", "again_ci_high_us", "suspect", "suspect_reason")
AGAIN = dict.fromkeys((*_ROW, "status", "gpu_uuid"), pa.string()) | dict.fromkeys(
    ("first_us", "median_us", "ci_low_us", "ci_high_us"), pa.float64()
)
SECONDS = pa.schema(list(AGAIN.items()))
_OPTIONAL = [axis.name for axis in AXES.values() if axis.optional and axis.part == "workload"]
_FIXED = ["bench", "implementation", "gpu_uuid", *(axis.name for axis in AXES.values() if axis.part == "way")]
_READ = list(
    dict.fromkeys((*_FIXED, "status", "median_us", "q1_us", "q3_us", *itertools.chain(NEEDS, *PARTS.values())))
)
FEW, MANY = 300, 1000  # cells: up to the first all neighbours are compared, and above the second a tree is sooner
_MARGIN = 1e-9  # of a distance: what rounding may change
_AT_ONCE = 2**18  # neighbours whose times are compared, which takes some tens of MB
_FIRST = 16  # of the nearest, asked for at once


def found(rows: pd.DataFrame) -> pd.Series:
    """What is wrong with each row's time, in words; None where nothing is, or where there is no time.

    `rows` has the columns of measurements; axes and needs that are absent count as equal in all rows.
    """
    words: dict[Any, str] = {}
    ok = rows[rows["status"] == "ok"]
    keys = _keys(ok)
    for _, group in ok.groupby(keys["fixed"]):
        words |= _implausible(group, keys.loc[group.index, list(PARTS)].to_numpy())
    scatter = ok["q3_us"] / ok["q1_us"]
    for index, factor in scatter[scatter > SCATTER].items():
        said = f"the middle half of its samples spans a factor of {factor:.2g} ({SCATTER:g} is allowed)"
        words[index] = f"{words[index]}; {said}" if index in words else said
    return pd.Series([words.get(index) for index in rows.index], rows.index, object)


def _keys(rows: pd.DataFrame) -> pd.DataFrame:
    """For each row one number per set of columns: equal numbers, equal values.

    Whether an optional axis has a value at all, such as a capacity, and whether a format is quantised, is of the way: other code runs.
    """
    way = {f"{axis} given": rows[axis].notna() for axis in _OPTIONAL if axis in rows}
    way |= {f"{axis} quantised": rows[axis].isin(QUANTISED) for axis in PARTS["format"] if axis in rows}
    sets = {"fixed": rows[[one for one in _FIXED if one in rows]].assign(**way)}
    sets |= {part: rows[[one for one in columns if one in rows]] for part, columns in PARTS.items()}
    return pd.DataFrame({name: _numbers(values) for name, values in sets.items()})


def _numbers(values: pd.DataFrame) -> pd.Series | int:
    """A number for each row, equal where all values are; 0 for no columns."""
    return values.groupby(list(values), dropna=False).ngroup() if len(values.columns) else 0


def _implausible(group: pd.DataFrame, parts: np.ndarray) -> dict[Any, str]:
    """For rows of a bench, implementation and card by their index what most neighbours say against the time, in words.

    `parts` (n, 3) has equal numbers where rows are equal in a part.
    """
    times = group["median_us"].to_numpy(float)
    needs = group[[name for name in NEEDS if name in group]].to_numpy(float)
    words = {}
    near = neighbours(parts, needs, NEAREST)
    counts = np.array([len(others) for others in near])
    for count in np.unique(counts[counts >= LEAST_NEIGHBOURS]):
        alike = np.flatnonzero(counts == count)
        for places in np.array_split(alike, math.ceil(len(alike) * int(count) / _AT_ONCE)):
            others = np.array([near[place] for place in places])
            low, high = _allowed(needs[places], needs[others], times[others])
            beyond = np.stack(_beyond(times[places, None], low, high)).sum(axis=-1)
            for i in np.flatnonzero((2 * beyond > low.shape[1]).any(axis=0)):
                if said := _against(times[places[i]], low[i], high[i]):
                    words[group.index[places[i]]] = said
    return words


def _allowed(need: np.ndarray, needs: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the longest time in µs that neighbours with these needs (..., n, m) and times (..., n) allow a row that needs (..., m):
    of those `NEAREST` that leave least room."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = need[..., None, :] / needs
    ratios[~np.isfinite(ratios) | (ratios <= 0)] = 1.0  # nothing to compare: of gates no products, say
    low, high = times * ratios.min(axis=-1, initial=1.0), times * ratios.max(axis=-1, initial=1.0)
    nearest = np.argsort(high / low, axis=-1, kind="stable")[..., :NEAREST]
    return np.take_along_axis(low, nearest, axis=-1), np.take_along_axis(high, nearest, axis=-1)


def _beyond(time: Any, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which neighbours (..., n) say that a time is too long, and which that it is too short."""
    return time > high * FACTOR, time < low / FACTOR


def _against(time: float, low: np.ndarray, high: np.ndarray) -> str | None:
    """What speaks against a time for which neighbours allow from `low` to `high`, in words; None where most allow it."""
    for beyond, bounds, word in zip(_beyond(time, low, high), (high, low), ("less", "more"), strict=True):
        if 2 * beyond.sum() > len(bounds):
            expected = float(np.median(bounds))
            factor = max(time / expected, expected / time)
            return (
                f"{us(time)}, where {int(beyond.sum())} of {len(bounds)} neighbouring cells allow {us(expected)} or {word}:"
                f" a factor of {factor:.2g} ({FACTOR:g} is allowed)"
            )
    return None


def repeated(rows: pd.DataFrame) -> list[str]:
    """The hashes of the cells to measure once more, those with the most rows in doubt first: at most `REPEATED` of all, or `LEAST_REPEATED`."""
    doubted = rows.loc[found(rows).notna(), "cell_hash"].value_counts()
    return list(doubted.index[: max(LEAST_REPEATED, math.ceil(REPEATED * rows["cell_hash"].nunique()))])


def seconds(first: pd.DataFrame, again: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows that were measured once more, as a file keeps them: the columns of `AGAIN`, with the first time of each."""
    times = first.set_index(_ROW)["median_us"].to_dict()
    found = [row | {"first_us": times[row["cell_hash"], row["implementation"]]} for row in again]
    return pa.Table.from_pylist(found, SECONDS)


def with_anomalies(table: pa.Table, again: pa.Table | None, others: Sequence[_Rule] = ()) -> pa.Table:
    """The rows with `anomaly`, and of those in doubt what the second measurement says in `again`, as `seconds` keeps it.

    A row in doubt that a second measurement does not confirm is suspect. Other columns stay as they are, but for what `others` make of
    them, in their order: rules that neither read these columns nor write those that are read for them. A child looks at many rows
    meanwhile.
    """
    if len(table) < _MANY_ROWS:
        return replaced(functools.reduce(lambda rows, rule: rule(rows), others, table), _doubts(table, again))
    with forked(functools.partial(_doubts, table), "the process that looks for times in doubt") as ask:
        doubts = ask([again])
        table = functools.reduce(lambda rows, rule: rule(rows), others, table)
        return replaced(table, *doubts.result())


def _doubts(table: pa.Table, again: pa.Table | None) -> dict[str, list[Any]]:
    """The columns `_TOLD` of the rows."""
    kept = [] if again is None else again.to_pylist()
    second = {(row["cell_hash"], row["implementation"], row["first_us"]): row for row in kept}
    words = found(table.select([name for name in _READ if name in table.column_names]).to_pandas())
    rows = table.select([*_ROW, "median_us", "gpu_uuid", *_TOLD]).to_pylist()
    for row, said in zip(rows, words, strict=True):
        if said is not None:
            row |= _told(row, said, second.get((row["cell_hash"], row["implementation"], row["median_us"])))
    return {name: [row[name] for row in rows] for name in _TOLD}


def _told(row: Mapping[str, Any], said: str, second: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a row in doubt says of itself, and of its second measurement."""
    outcome = _outcome(row, second)
    told = {"anomaly": said, "again": outcome}
    if second is not None:
        told |= {"again_us": second["median_us"]} | {
            f"again_{name}": second[name] for name in ("ci_low_us", "ci_high_us")
        }
    if outcome != CONFIRMED:
        reasons = (row["suspect_reason"], said, f"measured again: {outcome}")
        told |= {"suspect": True, "suspect_reason": "; ".join(one for one in reasons if one)}
    return told


def _outcome(row: Mapping[str, Any], second: Mapping[str, Any] | None) -> str:
    """What a second measurement says of the first."""
    if second is None:
        return "not measured again"
    if second["status"] != "ok":
        return f"the second time {second['status']}"
    factor = max(row["median_us"] / second["median_us"], second["median_us"] / row["median_us"])
    card = "" if row["gpu_uuid"] == second["gpu_uuid"] else ", on another card"
    return CONFIRMED if factor <= AGREE else f"{us(second['median_us'])}, a factor of {factor:.2g} apart{card}"


def neighbours(parts: np.ndarray, needs: np.ndarray, nearest: int) -> list[np.ndarray]:
    """For each of n cells the places of its neighbours, ascending: of many at least the `nearest`, with all that are as near.

    `parts` (n, p) has equal numbers where cells are equal in a part, `needs` (n, m) what they need. How far two cells are apart is the
    logarithm of the largest ratio of what they need over the smallest, 1 among them: with logarithms x and y max(0, x - y) - min(0, x - y), a norm, and
    the largest coordinate in a space of the needs and their differences. There a k-d tree is quick, where all pairs of 10,000 cells take minutes.
    """
    found: list[list[np.ndarray]] = [[] for _ in parts]
    for part in range(parts.shape[1]):
        for members in _groups(np.delete(parts, part, axis=1)):
            values = parts[members, part]
            for place, others in zip(members, _of_group(values, needs[members], nearest), strict=True):
                found[place].append(members[others])
    return [np.sort(np.concatenate(each)) for each in found]


def _groups(keys: np.ndarray) -> list[np.ndarray]:
    """The places of equal rows, ascending in each group."""
    _, numbers = np.unique(keys, axis=0, return_inverse=True)
    numbers = numbers.ravel()
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _of_group(values: np.ndarray, needs: np.ndarray, nearest: int) -> list[np.ndarray]:
    """For each cell of a group the places of those with another value: all, or the nearest."""
    points = None if len(values) <= FEW else _points(needs)
    if points is None:
        return [np.flatnonzero(values != value) for value in values]
    return _of_all_pairs(values, points, nearest) if len(values) <= MANY else _of_tree(values, points, nearest)


def _of_all_pairs(values: np.ndarray, points: np.ndarray, nearest: int) -> list[np.ndarray]:
    """The places of the nearest with another value, for each point."""
    found, by_coordinate, last = [], np.ascontiguousarray(points.T), min(nearest, len(points)) - 1
    for value, point in zip(values, points, strict=True):
        distances, other = np.abs(by_coordinate - point[:, None]).max(axis=0), values != value
        distances[~other] = np.inf
        limit = np.partition(distances, last)[last] * (1 + _MARGIN) + _MARGIN
        found.append(np.flatnonzero((distances <= limit) & other))
    return found


def _of_tree(values: np.ndarray, points: np.ndarray, nearest: int) -> list[np.ndarray]:
    """`_of_all_pairs`, of very many points in a fraction of the time."""
    from scipy.spatial import cKDTree  # takes a third of a second to import

    tree, found, left, count = cKDTree(points), [np.empty(0, int)] * len(values), np.arange(len(values)), _FIRST
    while len(left):
        count = min(count, len(values))
        distances, places = tree.query(points[left], k=count, p=np.inf)
        other = values[places] != values[left, None]
        enough = np.cumsum(other, axis=1) >= nearest
        limit = np.where(enough[:, -1], distances[np.arange(len(left)), enough.argmax(axis=1)], np.inf)
        limit = limit * (1 + _MARGIN) + _MARGIN
        done = (distances[:, -1] > limit) | (count == len(values))
        for i in np.flatnonzero(done):
            found[left[i]] = places[i][other[i] & (distances[i] <= limit[i])]
        left, count = left[~done], 4 * count
    return found


def _points(needs: np.ndarray) -> np.ndarray | None:
    """Coordinates in which the largest difference is the distance; None where some needs are not known, which leaves their ratios at 1."""
    with np.errstate(invalid="ignore"):
        known = np.isfinite(needs) & (needs > 0)
    if (known.any(axis=0) != known.all(axis=0)).any():
        return None
    logs = np.log(needs[:, known.all(axis=0)])
    pairs = [logs[:, i] - logs[:, j] for i, j in itertools.combinations(range(logs.shape[1]), 2)]
    return np.column_stack([logs, *pairs]) if logs.shape[1] else None
