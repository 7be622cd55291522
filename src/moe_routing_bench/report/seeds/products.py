"""Seed 003: times of quantised experts, each of its tables with the rows of this run.

Its shapes are one product per expert and ours are two: hidden is its K and intermediate N / 2, so that the first product is its own,
and the second adds half of the FLOPs. Ratios and rates compare as they are; times compare over 1.5.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.seeds import dispatch, divisor, figures, kernels, number
from moe_routing_bench.report.seeds.kernels import FORMATS, Row, doubted, exactness, layers
from moe_routing_bench.statistics import gmean

_COLUMNS = (
    *("implementation", "phase", "tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "weights"),
    *("status", "reason", "median_us", "tflops", "rel_l2_error", "tolerance", "anomaly"),
)


def tables(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """Of what was measured: times, their geometric means per format, exactness, decoding, layers of its two models, and a dispatcher."""
    experts = rows.loc[rows["bench"] == "experts", list(_COLUMNS)]
    doubts = doubted()
    known = [
        one | {"ours": FORMATS.get(one["format"], one["format"]), "doubts": doubts.get(i, [])}
        for i, one in enumerate(figures("003").to_dict("records"))
    ]
    placed: dict[tuple[Any, ...], list[Row]] = {}  # by sizes, as each of the published rows asks for those of its own
    for row in experts.to_dict("records"):
        placed.setdefault((row["tokens"], row["experts"], row["dtype"]), []).append(row)
    found = [(one, _shape(one, placed.get((one["tokens"], one["experts"], one["activations"]), ()))) for one in known]
    measured = [(one, own, by) for one, (own, by) in found if own]
    by = {by for *_, by in measured} - {1}
    sizes = "".join(f" Hidden and intermediate sizes are divided by {one}." for one in sorted(by))
    left = f" {len(measured)} of their {len(known)} rows were measured." if len(measured) < len(known) else ""
    shapes = (
        [_times(measured, source, platform, f"{sizes}{left}"), _means(measured, source, platform)] if measured else []
    )
    return [
        *shapes,
        exactness(experts, source, platform),
        *kernels.decode_tables(experts, platform),
        *layers(rows[rows["bench"] == "layer"], source, platform),
        *dispatch.tables(rows, source, platform),
    ]


def _shape(known: Row, rows: Iterable[Row]) -> tuple[dict[str, Row], int]:
    """Of `rows`, which have its tokens and experts, those of a published one by implementation, with those of unquantised weights that it
    needs; and what sizes were divided by."""
    found, divided = {}, 1
    for row in rows:
        plain = row["weights"] == known["activations"] and row["implementation"] == kernels.LOOP
        if row["weights"] != known["ours"] and not plain:
            continue
        by = divisor(
            {"hidden": known["k"], "intermediate": known["n"] // 2},
            {name: row[name] for name in ("hidden", "intermediate")},
        )
        if by:
            found[row["implementation"]], divided = row, by
    return (found if any(row["weights"] == known["ours"] for row in found.values()) else {}), divided


def _times(
    measured: list[tuple[Row, dict[str, Row], int]], source: Mapping[str, Any], platform: str, sizes: str
) -> Table:
    lines = []
    for known, found, _ in measured:
        lines.append(
            [
                known["shape"],
                *(str(known[name]) for name in ("experts", "n", "k", "tokens", "format", "activations")),
                *(number(known[f"{name}_ms"]) for name in ("base_mm", "base_dequant", "kernel")),
                number(known["speedup"], "x"),
                number(known["tflops"]),
                known["machine"],
                kernels.listed(known["doubts"]),
                *kernels.texts(found),
            ]
        )
    theirs = ("base mm ms", "base + dequant ms", "kernel ms", "speed-up", "TFLOPS", "machine", "in doubt")
    return Table(
        "Seven shapes by format of weights and activations",
        (
            Group("shape", ("shape", "E", "N", "K", "rows", "weights", "activations")),
            Group(f"published ({source['short']}), one product", theirs),
            Group(f"measured ({platform}), both products of an expert", kernels.HEADINGS),
        ),
        lines,
        "Ours are H = K and I = N / 2: the first product is theirs, the second adds half of its FLOPs, so times compare over 1.5, ratios and rates as they "
        f"are. {kernels.LOOP} multiplies with unquantised weights; the {kernels.KEPT} is that of the faster of {' and '.join(kernels.DEQUANTISED)}; the kernel is the fastest that dequantises nothing "
        f"beforehand, or of unquantised weights the fastest but {kernels.LOOP}, and theirs is what the speed-up is of. In "
        f"doubt: the times that the rule for rows of this benchmark doubts, theirs beside one another and ours beside one another.{sizes}",
    )


def _means(measured: list[tuple[Row, dict[str, Row], int]], source: Mapping[str, Any], platform: str) -> Table:
    lines = []
    for form, dtype in dict.fromkeys((known["format"], known["activations"]) for known, *_ in measured):
        own = [one for one in measured if (one[0]["format"], one[0]["activations"]) == (form, dtype)]
        steady = [known["speedup"] for known, *_ in own if known["machine"] == "steady"]
        ours = list(zip(*(kernels.ratios(found) for _, found, _ in own), strict=True))
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
            Group(f"measured ({platform})", (f"over {kernels.DEQUANTISED_LOOP}", f"over {kernels.KEPT}", "shapes")),
        ),
        lines,
    )


def _mean(ratios: Iterable[float]) -> str:
    """The geometric mean of the ratios that are there."""
    there = [one for one in ratios if one == one]
    return number(gmean(there), "x") if there else ABSENT
