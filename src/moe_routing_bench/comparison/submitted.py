"""What speaks against the rows of others, by their numbers alone: arithmetic, what the hardware allows, and where they come from.

A test shows that all published runs of this project keep to every limit, except for the intervals of two runs of older code. Rows that pass may still be invented: a second
measurement of the same cells on the same card shows it. Pure functions; no torch.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from moe_routing_bench.comparison import anomalies, recomputed, verdicts
from moe_routing_bench.quantities import count

# The most GB/s and dense TFLOP/s (of the narrowest format that rows use) of data sheets, by a word of a card's name.
SHEETS: Mapping[str, tuple[float, float]] = {
    "A100": (2039, 624),
    "L40S": (864, 733),
    "H20": (4000, 296),
    "H100": (3938, 1979),
    "H200": (4800, 1979),
    "GH200": (4900, 1979),
    "B200": (8000, 9000),
    "GB200": (8000, 10000),
}
BANDWIDTH, PEAK = (
    1.15,
    1.05,
)  # of a measured ceiling: rows of H200s reach 1.10 of the copy, by reads alone, and 0.86 of the peak
PAIRED = 1.5  # of a ratio of medians: what ratios in pairs differ from it by is at most 1.35 in published runs
CEILINGS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s")
_VERDICTS = ("noise_floor", "verdict", "best_verdict")
_ENDS = ("ci_low_us", "ci_high_us", "speedup_ci_low", "speedup_ci_high", "best_speedup_ci_low", "best_speedup_ci_high")


def problems(table: pa.Table, now: datetime | None = None) -> Iterator[str]:
    """A line for each kind of contradiction in measurements, with how many rows have it and the first of them."""
    frame = table.to_pandas()
    ok = frame[(frame["status"] == "ok") & frame["median_us"].notna()]
    if ok.empty:
        yield "no row has a time"
        return
    for what, wrong in (*_arithmetic(table, frame), *_plausible(ok), *_provenance(frame, now or datetime.now(UTC))):
        if len(rows := frame.loc[wrong.index[wrong]]):
            first = rows.iloc[0]
            yield f"{what}: {count(len(rows), 'row')}, first {first['implementation']} of {first['bench']} {first['cell']}"


def unchecked(table: pa.Table) -> list[str]:
    """What no data sheet here limits: the cards that `SHEETS` does not know."""
    cards = {name for name in table["gpu_name"].to_pylist() if name}
    return [f"ceilings of {name}: no data sheet of it is known here" for name in sorted(cards) if _sheet(name) is None]


def _differ(one: pd.Series, other: pd.Series) -> pd.Series:
    if not pd.api.types.is_numeric_dtype(other):
        return one.fillna("").astype(str) != other.fillna("").astype(str)
    return pd.Series(~np.isclose(one.astype(float), other.astype(float), equal_nan=True), one.index)


def _arithmetic(table: pa.Table, frame: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Where verdicts, intervals and ratios are not those of the rows' own numbers."""
    again = verdicts.with_verdicts(table).to_pandas()
    for name in _VERDICTS:
        yield f"{name} is not that of the rows' ratios and twins", _differ(again[name], frame[name])
    again = recomputed.with_intervals(table).to_pandas()
    for name in _ENDS:
        yield f"{name} is not that of the row's block medians", _differ(again[name], frame[name])
    keys = ["bench", "cell", "gpu_uuid", "host"]
    ok = frame[frame["status"] == "ok"]
    medians = ok.drop_duplicates([*keys, "implementation"]).set_index([*keys, "implementation"])["median_us"]
    for ratio, name in (("speedup", "baseline"), ("best_speedup", "best_other")):
        there = ok[ok[ratio].notna()]
        of = medians.reindex(pd.MultiIndex.from_frame(there[[*keys, name]])).to_numpy(float)
        over = there[ratio].astype(float) * there["median_us"] / of
        yield f"{ratio} is far from the ratio of the medians", (over > PAIRED) | (over < 1 / PAIRED)


def _plausible(ok: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Where a row is faster than its ceilings, a ceiling above the data sheet, or a time far from those of neighbouring cells."""
    gpu = ok[ok["gpu_name"].notna()]
    copy = gpu[list(CEILINGS)].astype(float).max(axis=1)
    yield "gb_per_s exceeds the measured bandwidth", gpu["gb_per_s"].astype(float) > BANDWIDTH * copy
    yield "tflops exceeds the measured peak", gpu["tflops"].astype(float) > PEAK * gpu["peak_tflops"].astype(float)
    yield "the time is below the roofline", gpu["roofline_us"].astype(float) > BANDWIDTH * gpu["median_us"]
    sheets = pd.DataFrame([_sheet(name) or (np.inf, np.inf) for name in gpu["gpu_name"]], gpu.index, [0, 1])
    yield "a measured bandwidth exceeds that of the data sheet", copy > sheets[0]
    yield "peak_tflops exceeds that of the data sheet", gpu["peak_tflops"].astype(float) > sheets[1]
    yield "the row has no ceiling to hold it against", copy.isna()
    confirmed = (ok["suspect"] == True) | (ok["again"] == anomalies.CONFIRMED)  # noqa: E712
    yield "a time that neighbouring cells contradict is not marked", anomalies.found(ok).notna() & ~confirmed


def _sheet(name: str) -> tuple[float, float] | None:
    words = name.upper().replace("-", " ").split()
    return next((sheet for word, sheet in SHEETS.items() if word in words), None)


def _provenance(frame: pd.DataFrame, now: datetime) -> Iterator[tuple[str, pd.Series]]:
    """Where code, tree, card or time of a row are not named, or cannot be."""
    yield "the tree had changes that no commit has", frame["git_dirty"] == True  # noqa: E712
    ok = frame["status"] == "ok"
    yield "the row names no card", ok & (frame["platform"] != "cpu") & frame["gpu_uuid"].isna()
    codes = frame.groupby(["bench", "git_sha"])["code_fingerprint"].transform("nunique")
    yield "one commit has several fingerprints of a bench's code", codes > 1
    yield "the row names no code", ok & frame["code_fingerprint"].isna()
    late = (now + timedelta(days=1)).isoformat()
    yield "it ended in the future", frame["ended_at"].map(lambda end: _time(end) > late)


def _time(end: Any) -> str:
    """A time as a text in the order of times; of what is none, the last."""
    try:
        return datetime.fromisoformat(end).astimezone(UTC).isoformat() if end is not None else ""
    except (TypeError, ValueError):
        return "9999"
