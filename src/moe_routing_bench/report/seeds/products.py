"""Seed 003: times of quantised experts, each of its tables beside the rows of this run.

Its shapes are one product per expert and ours are two: hidden is its K and intermediate N / 2, so that the first product is its own,
and the second adds half of the FLOPs. Ratios and rates compare as they are; times compare over 1.5.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from scipy import stats

from moe_routing_bench.report.seeds import dispatch
from moe_routing_bench.report.seeds.doubts import doubted
from moe_routing_bench.report.seeds.models import why
from moe_routing_bench.report.seeds.published import divisor, figures
from moe_routing_bench.report.seeds.quantised import FORMATS, exactness, layers
from moe_routing_bench.report.seeds.tables import ABSENT, Group, Table, number, ratio

LOOP, DEQUANTISED, DEQUANTISED_LOOP = "torch_loop", "dequant", "dequant_loop"
_NO_KERNELS = (LOOP, DEQUANTISED, "dequant_uncached", DEQUANTISED_LOOP)  # baselines
_COLUMNS = (
    *("implementation", "tokens", "hidden", "intermediate", "experts", "dtype", "weights"),
    *("status", "reason", "median_us", "tflops", "rel_l2_error", "tolerance", "anomaly"),
)
_Row = Mapping[str, Any]


def tables(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """Times, their geometric means per format, exactness, layers of its two models, and a dispatcher."""
    experts = rows.loc[rows["bench"] == "experts", list(_COLUMNS)]
    doubts = doubted()
    known = [
        one | {"ours": FORMATS.get(one["format"], one["format"]), "doubts": doubts.get(i, [])}
        for i, one in enumerate(figures("003").to_dict("records"))
    ]
    found = [(one, _shape(one, experts)) for one in known]
    measured = [(one, own, by) for one, (own, by) in found if own]
    by = {by for *_, by in measured} - {1}
    sizes = "".join(f" Hidden and intermediate sizes are divided by {one}." for one in sorted(by))
    left = f" {len(measured)} of their {len(known)} rows were measured." if len(measured) < len(known) else ""
    return [
        _times(measured, source, platform, f"{sizes}{left}"), _means(measured, source, platform), exactness(experts, source, platform),
        *layers(rows[rows["bench"] == "layer"], source, platform), *dispatch.tables(rows, source, platform),
    ]  # fmt: skip


def _shape(known: _Row, rows: pd.DataFrame) -> tuple[dict[str, _Row], int]:
    """The rows of a published one by implementation, with those of unquantised weights that it needs; and what sizes were divided by."""
    mine = (
        (rows["tokens"] == known["tokens"])
        & (rows["experts"] == known["experts"])
        & (rows["dtype"] == known["activations"])
    )
    plain = (rows["weights"] == known["activations"]) & (rows["implementation"] == LOOP)
    found, divided = {}, 1
    for row in rows[mine & ((rows["weights"] == known["ours"]) | plain)].to_dict("records"):
        by = divisor(
            {"hidden": known["k"], "intermediate": known["n"] // 2},
            {name: row[name] for name in ("hidden", "intermediate")},
        )
        if by:
            found[row["implementation"]], divided = row, by
    return (found if any(row["weights"] == known["ours"] for row in found.values()) else {}), divided


def _median(found: Mapping[str, _Row], name: str) -> float | None:
    """The median time of an implementation in ms, where it has one."""
    row = found.get(name)
    return row["median_us"] / 1000 if row is not None and row["status"] == "ok" else None


def _kernel(found: Iterable[_Row]) -> _Row | None:
    """The fastest row of what is no baseline."""
    ran = [row for row in found if row["status"] == "ok" and row["implementation"] not in _NO_KERNELS]
    return min(ran, key=lambda row: row["median_us"], default=None)


def _without(found: Iterable[_Row]) -> str:
    """Why there is no kernel's time: what each of them lacks."""
    missing = [row for row in found if row["implementation"] not in _NO_KERNELS]
    return "; ".join(f"{row['implementation']}, {why([row])}" for row in missing) or ABSENT


def _ratios(found: Mapping[str, _Row]) -> tuple[float, float]:
    """Times of dequantising and looping over experts, and of dequantising into a kept workspace, over that of the kernel; of
    unquantised weights that of the loop, twice."""
    kernel = _kernel(found.values())
    time = None if kernel is None else kernel["median_us"] / 1000
    bases = (DEQUANTISED_LOOP, DEQUANTISED) if DEQUANTISED_LOOP in found else (LOOP, LOOP)
    loop, kept = (ratio(_median(found, name), time) for name in bases)
    return loop, kept


def _times(
    measured: list[tuple[_Row, dict[str, _Row], int]], source: Mapping[str, Any], platform: str, sizes: str
) -> Table:
    lines = []
    for known, found, _ in measured:
        kernel, (loop, kept) = _kernel(found.values()), _ratios(found)
        unsure = [name for name, row in found.items() if isinstance(row["anomaly"], str)]
        lines.append([
            known["shape"], *(str(known[name]) for name in ("experts", "n", "k", "tokens", "format", "activations")),
            *(number(known[f"{name}_ms"]) for name in ("base_mm", "base_dequant", "kernel")), number(known["speedup"], "x"), number(known["tflops"]),
            known["machine"], _listed(known["doubts"]),
            *(number(_median(found, name)) for name in (LOOP, DEQUANTISED_LOOP, DEQUANTISED)),
            _without(found.values()) if kernel is None else kernel["implementation"], number(None if kernel is None else kernel["median_us"] / 1000),
            number(loop, "x"), number(kept, "x"), number(None if kernel is None else kernel["tflops"]),
            _listed(unsure),
        ])  # fmt: skip
    theirs = ("base mm ms", "base + dequant ms", "kernel ms", "speed-up", "TFLOPS", "machine", "in doubt")
    ours = (
        f"{LOOP} ms",
        f"{DEQUANTISED_LOOP} ms",
        f"{DEQUANTISED} ms",
        "kernel",
        "kernel ms",
        f"over {DEQUANTISED_LOOP}",
        f"over {DEQUANTISED}",
        "TFLOP/s",
        "in doubt",
    )
    return Table(
        "Seven shapes by format of weights and activations",
        (
            Group("shape", ("shape", "E", "N", "K", "rows", "weights", "activations")),
            Group(f"published ({source['short']}), one product", theirs),
            Group(f"measured ({platform}), both products of an expert", ours),
        ),
        lines,
        "Ours are H = K and I = N / 2: the first product is theirs, the second adds half of its FLOPs, so times compare over 1.5, ratios and rates as they "
        f"are. {LOOP} multiplies with unquantised weights; {DEQUANTISED} keeps its workspace; the kernel is the fastest that dequantises nothing "
        f"beforehand, or of unquantised weights the fastest but {LOOP}, and theirs is what the speed-up is of. In "
        f"doubt: the times that the rule for rows of this benchmark doubts, theirs beside one another and ours beside one another.{sizes}",
    )  # fmt: skip


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or ABSENT


def _means(measured: list[tuple[_Row, dict[str, _Row], int]], source: Mapping[str, Any], platform: str) -> Table:
    lines = []
    for form, dtype in dict.fromkeys((known["format"], known["activations"]) for known, *_ in measured):
        own = [one for one in measured if (one[0]["format"], one[0]["activations"]) == (form, dtype)]
        steady = [known["speedup"] for known, *_ in own if known["machine"] == "steady"]
        ours = list(zip(*(_ratios(found) for _, found, _ in own), strict=True))
        lines.append(
            [
                form,
                dtype,
                *map(_mean, ([known["speedup"] for known, *_ in own], steady)),
                *map(_mean, ours),
                str(len(own)),
            ]
        )
    return Table(
        "Geometric means of the speed-ups over these shapes",
        (
            Group("", ("weights", "activations")),
            Group(f"published ({source['short']})", ("all rows", "rows of a steady machine")),
            Group(f"measured ({platform})", (f"over {DEQUANTISED_LOOP}", f"over {DEQUANTISED}", "shapes")),
        ),
        lines,
    )


def _mean(ratios: Iterable[float]) -> str:
    """The geometric mean of the ratios that are there."""
    there = [one for one in ratios if one == one]
    return number(float(stats.gmean(there)), "x") if there else ABSENT
