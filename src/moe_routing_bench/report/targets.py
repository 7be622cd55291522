"""What our own kernels set out to reach on one H200, and what the rows say. Pure functions; no torch.

A bar is a number that was fixed before the kernels were written; it stays in the table when it is missed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from scipy import stats

from moe_routing_bench.figures import grouping
from moe_routing_bench.report.bars import PLATFORM, of_cell

APART = "not comparable: measured on different cards"
_PLAIN = {"experts": 128, "top_k": 8}
_LARGE = {"tokens": 16384, "hidden": 2048, **_PLAIN}
_ROWS = {"tokens": 16384, "hidden": 2048, "top_k": 8}  # of any number of experts
_GATE = {"tokens": 16384, "dtype": "fp32", **_PLAIN}
_PERMUTE = {"tokens": 16384, **_PLAIN}
_DRAWN = dict.fromkeys(("sampler", "trace"))  # whatever these are: assignments that were recorded count, too


@dataclass(frozen=True)
class Target:
    """One line: what, the bar in words, what was measured in words, over how many cells, and whether the bar is met.

    `met` is None where the rows cannot say.
    """

    what: str
    bar: str
    measured: str
    cells: int
    met: bool | None


def targets(table: pd.DataFrame) -> list[Target]:
    """All lines for which there are rows; none on another platform."""
    ok = table[(table["status"] == "ok") & (table["platform"] == PLATFORM)]
    return [line for line in (make(ok) for make in _LINES) if line is not None]


def _cute(ok: pd.DataFrame, bench: str, values: Mapping[str, object]) -> pd.DataFrame:
    """The cute rows of a bench with these values, and the default of every other axis that has one; None: any value."""
    return of_cell(ok[(ok["bench"] == bench) & (ok["implementation"] == "cute")], values)


def _one_card(*parts: pd.DataFrame) -> bool:
    return grouping.card(pd.concat(parts)).nunique() == 1


def _stream(bench: str, bar: float) -> Callable[[pd.DataFrame], Target | None]:
    """Share of the streaming ceiling of the stage's own mix, large shapes, by k."""

    def line(ok: pd.DataFrame) -> Target | None:
        rows = _cute(ok, bench, _DRAWN)
        rows = rows[(rows["tokens"] >= 16384) & (rows["hidden"] >= 2048) & rows["share_of_stream"].notna()]
        if rows.empty:
            return None
        parts = [
            f"k={k:g}: {_span(one['share_of_stream'])}{_short(one['share_of_short_stream'])}"
            for k, one in rows.groupby("top_k")
        ]
        met = bool((rows["share_of_stream"] >= bar).all())
        return Target(
            f"{bench}, T ≥ 16384, H ≥ 2048", f"≥ {bar:.0%} of the stream of its mix", "; ".join(parts), len(rows), met
        )

    return line


def _span(shares: pd.Series) -> str:
    least, most = f"{shares.min():.1%}", f"{shares.max():.1%}"
    return least if least == most else f"{least} to {most}"


def _short(shares: pd.Series) -> str:
    """The share of a stream that is as short as the stage, where that was measured: it says what no kernel could gain."""
    return "" if shares.isna().any() else f" (of a stream as short: {_span(shares)})"


def _small(ok: pd.DataFrame) -> Target | None:
    """Share of a copy at 16 to 64 MB of traffic."""
    rows = pd.concat([_cute(ok, bench, _DRAWN) for bench in ("pack", "combine")])
    rows = rows[rows["compulsory_bytes"].between(16e6, 64e6)]
    if rows.empty:
        return None
    parts = [
        f"{bench} {_span(one['share_of_copy'])}{_short(one['share_of_short_stream'])}"
        for bench, one in rows.groupby("bench")
    ]
    met = bool((rows["share_of_copy"] >= 0.8).all())
    return Target("pack and combine, 16 to 64 MB", "≥ 80 % of a copy", "; ".join(parts), len(rows), met)


def _against(ok: pd.DataFrame, bench: str, rival: str) -> pd.Series:
    """Time of a rival over that of cute in the cells that both ran, each on one card."""
    rows = ok[(ok["bench"] == bench) & ok["implementation"].isin(["cute", rival])]
    wide = rows.pivot_table(index=["cell", grouping.card(rows)], columns="implementation", values="median_us")
    return (wide[rival] / wide["cute"]).dropna() if {rival, "cute"} <= set(wide.columns) else pd.Series(dtype=float)


def _cells(ok: pd.DataFrame, bench: str, rival: str) -> str:
    """The cells that a rival ran in words."""
    return grouping.differing(ok[(ok["bench"] == bench) & (ok["implementation"] == rival)], "cells")


def _triton(bench: str) -> Callable[[pd.DataFrame], Target | None]:
    """cute against triton over the whole grid."""

    def line(ok: pd.DataFrame) -> Target | None:
        ratio = _against(ok, bench, "triton")
        if ratio.empty:
            return None
        mean = float(stats.gmean(ratio))
        seen = f"{mean:.3f}x in the geometric mean of {_cells(ok, bench, 'triton')}, {ratio.min():.2f}x to {ratio.max():.2f}x"
        return Target(f"{bench}: speed of cute over triton", "≥ 1x, geometric mean", seen, len(ratio), mean >= 1)

    return line


def _time(
    what: str, most_us: float, bench: str, values: Mapping[str, object]
) -> Callable[[pd.DataFrame], Target | None]:
    """The time of one cell."""

    def line(ok: pd.DataFrame) -> Target | None:
        rows = _cute(ok, bench, values)
        if rows.empty:
            return None
        time = rows["median_us"].iloc[0]
        return Target(what, f"≤ {most_us:g} µs", f"{time:.2f} µs", 1, bool(time <= most_us))

    return line


def _quack(ok: pd.DataFrame) -> Target | None:
    ratio = _against(ok, "gate", "quack")
    if ratio.empty:
        return None
    slower = int((ratio < 1).sum())
    seen = f"{stats.gmean(ratio):.2f}x in the geometric mean of {_cells(ok, 'gate', 'quack')}, slower in {slower}, {ratio.min():.2f}x to {ratio.max():.2f}x"
    return Target("gate: speed of cute over QuACK", "≥ 1x wherever QuACK runs", seen, len(ratio), slower == 0)


def _both(ok: pd.DataFrame) -> Target | None:
    """gate and permute one after the other, as stages of routing."""
    rows = _cute(ok, "routing", _PLAIN)
    rows = rows[(rows["tokens"] <= 512) & rows["stage_us"].notna()]
    if rows.empty:
        return None
    stages = [dict(stages) for stages in rows["stage_us"]]
    times = [one["router"] + one["permute"] for one in stages]
    parts = [f"T={tokens:g}: {time:.2f} µs" for tokens, time in zip(rows["tokens"], times, strict=True)]
    return Target(
        "gate and permute, E=128, k=8, T ≤ 512", "≤ 8 µs together", "; ".join(parts), len(rows), max(times) <= 8
    )


def _routing(tokens: int, most_us: float | None) -> Callable[[pd.DataFrame], Target | None]:
    """Routing end to end; at the large size against torch, at the small ones in microseconds."""

    def line(ok: pd.DataFrame) -> Target | None:
        rows = _cute(ok, "routing", _LARGE | {"tokens": tokens})
        if rows.empty:
            return None
        time, speedup = rows["median_us"].iloc[0], rows["speedup"].iloc[0]
        seen, what = f"{time:.1f} µs, {speedup:.2f}x torch", f"routing, T={tokens}, H=2048, E=128, k=8"
        if most_us is None:
            return Target(what, "≥ 4x torch", seen, 1, bool(speedup >= 4))
        return Target(what, f"≤ {most_us:g} µs", seen, 1, bool(time <= most_us))

    return line


def _floors(ok: pd.DataFrame) -> Target | None:
    """Routing over the sum of its floors: pack and combine at the rate of their stream, gate and permute at a copy's."""
    what, bar = "routing, T=16384, over the sum of its floors", "≤ 1.12x"
    rows = _cute(ok, "routing", _LARGE)
    parts = [_cute(ok, bench, _ROWS) for bench in ("pack", "combine")]
    small = [_cute(ok, "gate", _GATE), _cute(ok, "permute", _PERMUTE)]
    if rows.empty or any(part.empty for part in (*parts, *small)):
        return None
    if not _one_card(rows, *parts, *small):
        return Target(what, bar, APART, 1, None)
    floor = sum(float((p["median_us"] * p["share_of_stream"]).iloc[0]) for p in parts)
    floor += sum(float((p["median_us"] * p["share_of_copy"]).iloc[0]) for p in small)
    ratio = float(rows["median_us"].iloc[0]) / floor
    return Target(what, bar, f"{ratio:.3f}x of {floor:.0f} µs", 1, ratio <= 1.12)


def _skew(ok: pd.DataFrame) -> Target | None:
    """Skewed and with hot experts, against balanced."""
    what, bar = "routing, T=16384, skewed over balanced", "within 10 %"
    even = _cute(ok, "routing", _LARGE)
    rows = pd.concat([_cute(ok, "routing", _LARGE | {"skew": skew}) for skew in (1.7, 3.7)])
    if rows.empty or even.empty:
        return None
    if not _one_card(rows, even):
        return Target(what, bar, APART, len(rows), None)
    ratios = rows["median_us"] / even["median_us"].iloc[0]
    parts = [f"skew {skew:g}: {ratio:.3f}x" for skew, ratio in zip(rows["skew"], ratios, strict=True)]
    return Target(what, bar, "; ".join(parts), len(rows), bool(((ratios - 1).abs() <= 0.1).all()))


_LINES = (
    _stream("pack", 0.95), _stream("combine", 0.96), _small,
    *(_triton(bench) for bench in ("gate", "permute", "pack", "combine")),
    _time("gate, T=16384, E=128, k=8, fp32", 8, "gate", _GATE), _quack,
    _time("permute, 131,072 assignments, E=128", 12, "permute", _PERMUTE), _both, _routing(16384, None), _floors, _routing(64, 20), _routing(512, 28), _skew,
)  # fmt: skip
