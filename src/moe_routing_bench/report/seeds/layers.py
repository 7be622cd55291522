"""Seed 000: ten shapes of a layer, the naive implementation against the fastest other one."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.report.seeds.published import divisor, figures
from moe_routing_bench.report.seeds.tables import ABSENT, Group, Table, gain, number, ratio

NAIVE = "torch_loop"
_SHAPE = ("tokens", "hidden", "intermediate", "experts", "top_k")
_DIVIDED = ("hidden", "intermediate")  # on a CPU


def tables(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """A table for each format of the activations that was measured, float32 first, which is the published one."""
    measured = rows[rows["bench"] == "layer"]
    formats = sorted(measured["dtype"].unique(), key=lambda name: name != "fp32")
    return [_table(measured[measured["dtype"] == name], name, source, platform) for name in formats]


def _table(rows: pd.DataFrame, dtype: str, source: Mapping[str, Any], platform: str) -> Table:
    known = figures("000")
    divisors: set[int] = set()
    lines = [_line(one, rows, divisors) for one in known.to_dict("records")]
    sizes = "".join(f" Hidden and intermediate sizes are divided by {one}." for one in sorted(divisors - {1}))
    atol, rtol = known["atol"].iloc[0], known["rtol"].iloc[0]
    return Table(
        f"Ten shapes in {dtype}, the published figures in fp32",
        (
            Group("shape", ("test", "T", "H", "I", "E", "k")),
            Group(f"published ({source['short']})", ("naive µs", "custom µs", "their speed-up", "naive / custom")),
            Group(
                f"measured ({platform}, {dtype})",
                (f"{NAIVE} µs", "fastest other", "µs", "by their formula", "naive / other", "largest |error|", "allclose"),
            ),
        ),
        lines,
        f"Their speed-up is {source['speed_up']}. allclose: every |error| is within {atol:g} + {rtol:g} |reference|, which is certain "
        f"where the largest one is at most {atol:g}; the reference is in float64 for fp32, float32 otherwise.{sizes}",
    )  # fmt: skip


def _line(known: Mapping[str, Any], rows: pd.DataFrame, divisors: set[int]) -> list[str]:
    """One shape; what its sizes were divided by is added to `divisors`."""
    found = {one["implementation"]: one for one in rows.to_dict("records") if _divisor(known, one)}
    divisors |= {_divisor(known, one) or 1 for one in found.values()}
    ok = {name: one for name, one in found.items() if one["status"] == "ok"}
    others = sorted((one["median_us"], name) for name, one in ok.items() if name != NAIVE)
    naive, (best, name) = ok.get(NAIVE, {}).get("median_us"), others[0] if others else (None, ABSENT)
    ours, theirs = ratio(naive, best), ratio(known["naive_us"], known["custom_us"])
    error = max((ok[one]["max_abs_error"] for one in (NAIVE, name) if one in ok), default=None)
    close = ABSENT if error is None else "yes" if error <= known["atol"] else "not told by the largest error"
    return [
        str(known["test"]), *(str(known[axis]) for axis in _SHAPE),
        *(number(known[f"{one}_us"]) for one in ("naive", "custom")), f"{known['speedup_percent']:.2f} %", number(theirs, "x"),
        number(naive), name, number(best), number(gain(ours), " %"), number(ours, "x"), number(error), close,
    ]  # fmt: skip


def _divisor(known: Mapping[str, Any], row: Mapping[str, Any]) -> int | None:
    """What a row's sizes were divided by, if it is of this shape at all."""
    if any(known[axis] != row[axis] for axis in _SHAPE if axis not in _DIVIDED):
        return None
    return divisor({axis: known[axis] for axis in _DIVIDED}, {axis: row[axis] for axis in _DIVIDED})
