"""Rows of experts in the columns of seed 003: products with plain weights, dequantising first, and the kernel, with its speed-ups and rate."""

from collections.abc import Iterable, Mapping
from typing import Any

from moe_routing_bench.report.seeds.models import milliseconds, why
from moe_routing_bench.report.seeds.tables import ABSENT, number, ratio

LOOP, DEQUANTISED_LOOP = "torch_loop", "dequant_loop"
DEQUANTISED = ("dequant", "dequant_cute")  # into a workspace of 16 bits that is kept, then products of 16 bits
KEPT = "kept workspace"  # the faster of those
_BASELINES = (LOOP, *DEQUANTISED, "dequant_uncached", DEQUANTISED_LOOP)
HEADINGS = (
    *(f"{LOOP} ms", f"{DEQUANTISED_LOOP} ms", f"{KEPT} ms", "kernel", "kernel ms"),
    *(f"over {DEQUANTISED_LOOP}", f"over {KEPT}", "TFLOP/s", "in doubt"),
)
Row = Mapping[str, Any]


def texts(found: Mapping[str, Row]) -> list[str]:
    """The cells below `HEADINGS` of the rows of one shape and formats, by implementation."""
    fastest, (loop, kept) = kernel(found.values()), ratios(found)
    doubts = [name for name, row in found.items() if isinstance(row["anomaly"], str)]
    return [
        *map(number, (median(found, LOOP), median(found, DEQUANTISED_LOOP), workspace(found))),
        without(found.values()) if fastest is None else fastest["implementation"],
        number(None if fastest is None else fastest["median_us"] / 1000), number(loop, "x"), number(kept, "x"),
        number(None if fastest is None else fastest["tflops"]), listed(doubts),
    ]  # fmt: skip


def median(found: Mapping[str, Row], name: str) -> float | None:
    """The median time of an implementation in ms, where it has one."""
    return milliseconds(found.get(name))


def workspace(found: Mapping[str, Row]) -> float | None:
    """The time in ms of the fastest that dequantises into a kept workspace, where one has a time."""
    return min((time for name in DEQUANTISED if (time := median(found, name)) is not None), default=None)


def kernel(found: Iterable[Row]) -> Row | None:
    """The fastest row of what is no baseline."""
    ran = [row for row in found if row["status"] == "ok" and row["implementation"] not in _BASELINES]
    return min(ran, key=lambda row: row["median_us"], default=None)


def without(found: Iterable[Row]) -> str:
    """Why there is no kernel's time: what each of them lacks."""
    missing = [row for row in found if row["implementation"] not in _BASELINES]
    return "; ".join(f"{row['implementation']}, {why([row])}" for row in missing) or ABSENT


def ratios(found: Mapping[str, Row]) -> tuple[float, float]:
    """Times of dequantising and looping over experts, and of dequantising into a kept workspace, over that of the kernel; of
    unquantised weights that of the loop, twice."""
    fastest = kernel(found.values())
    time = None if fastest is None else fastest["median_us"] / 1000
    if DEQUANTISED_LOOP in found:
        return ratio(median(found, DEQUANTISED_LOOP), time), ratio(workspace(found), time)
    plain = ratio(median(found, LOOP), time)
    return plain, plain


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or ABSENT
