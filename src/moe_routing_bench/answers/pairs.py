"""Which of the rows of a cell is the fastest, by how much, and what to be careful of in it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_routing_bench.answers.stored import Cell, Row
from moe_routing_bench.comparison import origins
from moe_routing_bench.quantities import FLOOR_SAID, beyond_any_floor, times

FASTER, SLOWER, UNDECIDED = "faster", "slower", "undecided"
_TURNED = {FASTER: SLOWER, SLOWER: FASTER}
AUTO = "auto"


@dataclass(frozen=True)
class Pair:
    """A row over another: the ratio is above 1 where the row is the faster one; `verdict` None where the run's noise is not known and the gap
    is not beyond any noise floor (`quantities.beyond_any_floor`); `assumed` where the verdict rests on that.

    `paired`: the ratio was measured in pairs and is stored; else it is of the two medians, as wide as both intervals make it.
    """

    name: str
    other: str
    ratio: float
    low: float | None
    high: float | None
    verdict: str | None
    paired: bool
    assumed: bool = False

    @property
    def text(self) -> str:
        """The ratio in words, with its interval and verdict."""
        judged = self.verdict or "no verdict, too few twins"
        judged += f" by more than {FLOOR_SAID}, no noise floor" if self.assumed else ""
        return f"{interval(self.ratio, self.low, self.high)} as fast as {self.other} ({judged}{'' if self.paired else ', from both medians'})"


def interval(ratio: float, low: float | None, high: float | None) -> str:
    """A ratio with its interval, if it has one."""
    return times(ratio, *(math.nan if end is None else end for end in (low, high)))


def pair(row: Row, other: Row) -> Pair:
    """How a row compares with another of its cell: by the stored ratio of either, or else by the intervals of both times."""
    found = _pair(row, other)
    told = found.verdict is None and row["gpu_uuid"] is not None and beyond_any_floor(found.low, found.high)
    return replace(found, verdict=FASTER if found.ratio > 1 else SLOWER, assumed=True) if told else found


def _pair(row: Row, other: Row) -> Pair:
    names = row["implementation"], other["implementation"]
    for stored, ratio, verdict in (("best_other", "best_speedup", "best_verdict"), ("baseline", "speedup", "verdict")):
        if row[stored] == names[1] and row[ratio] is not None:
            return Pair(*names, *_ends(row, ratio), row[verdict], paired=True)
        if other[stored] == names[0] and other[ratio] is not None:
            middle, low, high = (None if end is None else 1 / end for end in _ends(other, ratio))
            assert middle is not None
            return Pair(*names, middle, high, low, _TURNED.get(other[verdict], other[verdict]), paired=True)
    low, high = ends(other, row)
    ratio = other["median_us"] / row["median_us"]
    return Pair(*names, ratio, low, high, _judged(row, ratio, low, high), False)


def ends(row: Row, other: Row) -> tuple[float | None, float | None]:
    """The ends of the time of a row over that of another, as wide as both intervals make them; None where a row has no interval."""
    if None in (row["ci_low_us"], row["ci_high_us"], other["ci_low_us"], other["ci_high_us"]):
        return None, None
    return row["ci_low_us"] / other["ci_high_us"], row["ci_high_us"] / other["ci_low_us"]


def _ends(row: Row, ratio: str) -> tuple[float, float | None, float | None]:
    return row[ratio], row[f"{ratio}_ci_low"], row[f"{ratio}_ci_high"]


def _judged(row: Row, ratio: float, low: float | None, high: float | None) -> str | None:
    """The verdict of two medians: intervals that do not meet, and a gap beyond the noise floor; none without a floor or an interval."""
    if row["noise_floor"] is None or low is None or high is None:
        return None
    if (low > 1 or high < 1) and abs(math.log(ratio)) > row["noise_floor"]:
        return FASTER if ratio > 1 else SLOWER
    return UNDECIDED


def ours(cell: Cell) -> Collection[str]:
    """The implementations of a cell that are this project's throughout."""
    return origins.ours(cell.bench) & {row["implementation"] for row in cell.rows}


def own(cell: Cell) -> Row | None:
    """The row of this project that counts: that of `auto`, or else the fastest of its kernels; None without one."""
    names = ours(cell)
    mine = [row for row in cell.timed if row["implementation"] in names]
    return next((row for row in mine if row["implementation"] == AUTO), mine[0] if mine else None)


def rival(cell: Cell) -> Row | None:
    """The fastest row of another package."""
    names = ours(cell)
    return next((row for row in cell.timed if row["implementation"] not in names), None)


def winner(cell: Cell) -> tuple[str | None, str]:
    """The implementation that the stored verdict calls the fastest of a cell (None: no verdict names one), and a sentence on it."""
    first, *others = cell.timed
    name = first["implementation"]
    if not others:
        return None, f"{name} is the only implementation with a time"
    best = next((row for row in others if row["implementation"] == first["best_other"]), others[0])
    found, other = pair(first, best), best["implementation"]
    if found.verdict == FASTER:
        beyond = f" by more than {FLOOR_SAID} (no noise floor: too few twins in the run)" if found.assumed else ""
        return name, f"{name} is the fastest{beyond}"
    said = {
        "same": f"{name} and {other} are the same within the noise",
        UNDECIDED: f"{name} has the lowest median, but the measurement does not tell it from {other}",
        SLOWER: f"{name} has the lowest median, but {other} is faster in pairs",
    }
    return None, said.get(found.verdict or "", f"{name} has the lowest median (no verdict: too few twins in the run)")


def marks(row: Row) -> list[str]:
    """What to be careful of in a row."""
    warm = row["cold"] is False and row["timer"] != "wall"
    suspect = [f"suspect: {row['suspect_reason'] or 'no reason recorded'}"] if row["suspect"] else []
    return suspect + ["not converged"] * (row["converged"] is False) + ["L2 may be warm"] * warm


def limit(row: Row) -> tuple[float, str] | None:
    """The share of a row's time that the floor which binds takes, and that floor: the roofline, or an empty node of a graph. None on a CPU."""
    if not row["gpu_uuid"]:
        return None
    node = row["graph_node_us"] if row["timer"] == "cuda_graph" else None
    floors = [
        (us, name) for us, name in ((node, "empty graph node"), (row["roofline_us"], "roofline")) if us is not None
    ]
    if not floors:
        return None
    us, name = max(floors)
    return us / row["median_us"], name


def without_time(cell: Cell) -> dict[str, str]:
    """Why an implementation of a cell has no time, by name."""
    return {
        row["implementation"]: f"{row['status']}: {row['reason'] or 'no reason recorded'}"
        for row in cell.rows
        if row["status"] != "ok"
    }


def numbers(row: Row) -> Mapping[str, Any]:
    """The values of a row that an answer holds."""
    share = limit(row)
    return {
        "implementation": row["implementation"],
        "median_us": row["median_us"],
        "ci_low_us": row["ci_low_us"],
        "ci_high_us": row["ci_high_us"],
        "marks": marks(row),
        "memory_bytes": row["peak_memory_bytes"],
        "workspace_bytes": row["workspace_bytes"],
        "energy_mj_per_token": row["energy_mj_per_token"],
        "share_of_limit": None if share is None else share[0],
        "limit": None if share is None else share[1],
        "over_dense": row["over_dense"],
        "stage_us": row["stage_us"],
    }
