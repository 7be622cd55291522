"""What changed between runs: rows of the same cell and implementation in two of them, or in the last and all before it. No torch.

Rows of two runs share no rounds, so their ratio has a Welch interval over the block medians of both. Besides the noise floors of
both runs, a change has to exceed what the device itself did: how far the ceilings of the two rows are apart. Between two kinds of
device that is part of what is compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins, verdicts
from moe_routing_bench.config import axes
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.intervals import turns_of, unpaired_ratio
from moe_routing_kernels.errors import bad

UNKNOWN_FLOOR = 0.02  # of |ln ratio|: assumed for a run without twins
KEYS = ["bench", "implementation", *AXES]
_MARKED = ("gpu_uuid", "driver", "torch_version", "cuda_version", "triton_version", "cutlass_dsl_version")
COLUMNS = (
    *KEYS,
    *("cell", "status", "reason", "median_us", "block_medians_us", "block_turns", "turns", "flops", "copy_gb_per_s"),
    *("peak_tflops", "twin_speedup", "gpu_name", "cpu_model", *_MARKED),
)
LOST, GAINED, ONLY_BEFORE, ONLY_AFTER = "no longer ok", "ok now", "only before", "only after"


@dataclass(frozen=True)
class Comparison:
    """`rows`: one per cell and implementation of either run, with `before_us`, `after_us`, `ratio` (before over after: above 1 is
    faster now) and its interval, `floor`, `verdict` and `repeated`, whether both runs have the very same measurement. `marks`: what differs between the runs besides the code. `across`: what
    they timed are devices of different kinds."""

    rows: pd.DataFrame
    marks: list[str] = field(default_factory=list)
    across: bool = False

    def counts(self) -> dict[str, int]:
        """How many rows have each verdict, the most frequent first."""
        return {str(name): int(n) for name, n in self.rows["verdict"].value_counts().items()}

    def repeated(self) -> int:
        """How many rows were not measured again: both runs have the same block medians."""
        return int((self.rows["repeated"] == True).sum())  # noqa: E712

    def changed(self) -> pd.DataFrame:
        """All rows, those whose ratio is farthest from 1 first and those without one last."""
        return self.rows.sort_values("ratio", ascending=False, key=lambda ratio: abs(ratio.astype(float) - 1))

    def worse(self, share: float) -> pd.DataFrame:
        """The rows that are slower by more than `share` of the time before, or that have lost their time."""
        slower = (self.rows["verdict"] == verdicts.SLOWER) & (
            self.rows["after_us"] > self.rows["before_us"] * (1 + share)
        )
        return self.rows[slower | (self.rows["verdict"] == LOST)]


def compare(before: pd.DataFrame, after: pd.DataFrame, across: bool = False) -> Comparison:
    """Compare two runs, each with the columns of `COLUMNS`.

    Raises `UserError` where they have no cell in common, and where they were measured on different devices, unless `across`
    says that this is meant.
    """
    kinds = [text for name in (origins.GPU, origins.CPU) if (text := _difference(before, after, name))]
    if kinds and not across:
        raise bad("runs", "; ".join(kinds), "runs of one kind of device", "--across compares them all the same")
    marks = kinds + [text for name in _MARKED if (text := _difference(before, after, name))]
    sides = [keyed(one) for one in (before, after)]
    both = sides[0].add_suffix("_before").join(sides[1].add_suffix("_after"), how="outer")
    if not sides[0].index.intersection(sides[1].index).size:
        raise bad("runs", "no cell and implementation in common", "at least one")
    apart = bool(_difference(before, after, origins.column(before)))
    pairs = [_row(one, drifts=not apart) for one in both.to_dict("records")]
    return Comparison(_judged(pd.DataFrame(pairs, both.index)), marks, apart)


def _difference(before: pd.DataFrame, after: pd.DataFrame, column: str) -> str:
    """What a column says of the one run and not of the other, as a text; empty where they agree."""
    known = [sorted(map(str, one[column].dropna().unique())) for one in (before, after)]
    if known[0] == known[1] or not all(known):
        return ""
    return f"{column}: {', '.join(known[0])} before, {', '.join(known[1])} after"


def keyed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by bench, implementation and axes as texts, which a missing value is too, with their noise floors."""
    rows = _with_newer_axes(rows)
    floors = verdicts.floors(rows).fillna(UNKNOWN_FLOOR)
    texts = {name: _texts(rows[name], AXES[name].kind if name in AXES else str) for name in KEYS}
    index = pd.MultiIndex.from_frame(pd.DataFrame(texts, rows.index))
    if index.has_duplicates:
        raise bad("run", f"{index[index.duplicated()][0][:2]} twice", "one row per cell and implementation")
    return rows.assign(floor=floors).drop(columns=[name for name in KEYS if name in rows]).set_index(index)


def _texts(values: pd.Series, kind: type) -> pd.Series:
    """Each value as a text, which does not depend on whether others are missing: pandas then makes floats of integers."""
    return pd.Series(["" if pd.isna(one) else str(kind(one)) for one in values], values.index)


def _with_newer_axes(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a run from before an axis was there: with its default in the benches that read it now."""
    rows = rows.copy()
    for axis in AXES.values():
        if rows[axis.name].isna().all() and (axis.follows or axis.default is not None):
            reads = rows["bench"].isin([bench.name for bench in BENCHES.values() if axis in axes.of(bench.axes)])
            rows[axis.name] = pd.Series(rows[axis.follows] if axis.follows else axis.default, rows.index).where(reads)
    return rows


def _row(one: dict, drifts: bool) -> dict[str, object]:
    """The numbers of a pair, without a verdict on its ratio; what has no pair says why. `drifts`: other ceilings are no other device."""
    cell = one["cell_after"] if isinstance(one["cell_after"], str) else one["cell_before"]
    found: dict[str, object] = {"cell": cell, "before_us": one["median_us_before"], "after_us": one["median_us_after"]}
    ok = {side: one[f"status_{side}"] == "ok" for side in ("before", "after")}
    there = {side: isinstance(one[f"status_{side}"], str) for side in ("before", "after")}
    if not all(there.values()):
        return found | {"verdict": ONLY_BEFORE if there["before"] else ONLY_AFTER}
    if not all(ok.values()):
        reason = one["reason_after"] if isinstance(one["reason_after"], str) else one["status_after"]
        return found | (
            {"verdict": LOST, "reason": reason} if ok["before"] else {"verdict": GAINED} if ok["after"] else {}
        )
    return found | ratio(one, drifts)


def ratio(one: dict, drifts: bool) -> dict[str, object]:
    """Ratio, interval, p and floor of a pair of rows that both have a time."""
    blocks = {side: _blocks(one, side) for side in ("before", "after")}
    turns = {
        side: turns_of(
            {name: one.get(f"{name}_{side}") for name in ("turns", "block_turns")} | {"block_medians_us": found}
        )
        for side, found in blocks.items()
    }
    numbers = unpaired_ratio(blocks["before"], blocks["after"], (turns["before"], turns["after"]))
    floor = max(one["floor_before"], one["floor_after"], _drift(one) if drifts else 0.0)
    found = dict(zip(("ratio", "ratio_ci_low", "ratio_ci_high", "ratio_p", "floor"), (*numbers, floor), strict=True))
    if len(blocks["before"]) > 1 and np.array_equal(blocks["before"], blocks["after"]):  # a row is the same as itself
        found |= {"verdict": verdicts.SAME, "repeated": True}
    return found


def _blocks(one: dict, side: str) -> Sequence[float]:
    """The block medians of a side; of a row that has none, as of another benchmark, its median alone, which gives no interval."""
    found = one[f"block_medians_us_{side}"]
    return [one[f"median_us_{side}"]] if found is None or np.isscalar(found) else found


def _drift(one: dict) -> float:
    """How far apart the ceilings are that bound the pair: the copy, and the matrix product where there are FLOPs; 0 where none is known."""
    names = ("copy_gb_per_s", *(("peak_tflops",) if (one["flops_after"] or 0) > 0 else ()))
    pairs = [(one[f"{name}_before"], one[f"{name}_after"]) for name in names]
    return max((abs(float(np.log(a / b))) for a, b in pairs if not pd.isna(a) and not pd.isna(b)), default=0.0)


def _judged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a verdict each, and their keys as columns; without those that never had a time."""
    for name in ("ratio", "ratio_ci_low", "ratio_ci_high", "ratio_p", "floor", "verdict", "reason", "repeated"):
        rows[name] = rows.get(name, pd.Series(np.nan, rows.index, object))
    found = verdicts.of_pairs(rows, "ratio", rows["floor"].astype(float))
    return (
        rows.assign(verdict=rows["verdict"].where(rows["verdict"].notna(), found))
        .dropna(subset="verdict")
        .reset_index()
    )


@dataclass(frozen=True)
class Then:
    """A row in an earlier run: its time, that time over today's (above 1 is faster now) with its 95 % interval, and the verdict on the change."""

    run: str
    us: float
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class History:
    """A row of the last run, and what it was in those of the earlier ones that timed it, oldest first."""

    bench: str
    cell: str
    implementation: str
    us: float
    then: tuple[Then, ...]


def history(earlier: Mapping[str, pd.DataFrame], last: pd.DataFrame, across: bool = False) -> list[History]:
    """The rows of `last` that have a time there and in an earlier run, by its name, in the order of their benches and cells.

    Tables have the columns of `COLUMNS`; verdicts are those of `compare`, one pair of runs at a time. Raises `UserError` as it does.
    """
    found: dict[tuple, History] = {}
    for run, table in earlier.items():
        rows = compare(table, last, across).rows
        for row in rows[rows["ratio"].notna()].to_dict("records"):
            key = tuple(row[name] for name in KEYS)
            now = History(row["bench"], row["cell"], row["implementation"], row["after_us"], ())
            then = Then(
                run,
                row["before_us"],
                *(float(row[name]) for name in ("ratio", "ratio_ci_low", "ratio_ci_high")),
                row["verdict"],
            )
            before = found.get(key, now)
            found[key] = History(now.bench, now.cell, now.implementation, now.us, (*before.then, then))
    return sorted(found.values(), key=lambda one: (one.bench, one.cell, one.implementation))
