"""Seed 003 beside its times: which kernels are right, and what quantised experts make of the layers of its two models."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.comparison.choices import as_chosen
from moe_routing_bench.report.seeds.models import guard, label, reduced
from moe_routing_bench.report.seeds.published import figures
from moe_routing_bench.report.seeds.tables import ABSENT, Group, Table, number, ratio

FORMATS = {  # of weights, by their names: ours, with a scale per 128 elements
    "int8": "int8_g128", "int8_asym": "int8z_g128", "int4": "int4_g128", "int4_asym": "int4z_g128",
    "int2": "int2_g128", "int2_asym": "int2z_g128", "e4m3": "e4m3_g128", "e5m2": "e5m2_g128",
}  # fmt: skip
_LAYER = ["hidden", "intermediate", "experts", "phase", "tokens", "dtype"]


def exactness(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> Table:
    lines = []
    for known in figures("003_accuracy").to_dict("records"):
        own = rows[
            (rows["weights"] == FORMATS.get(known["format"], known["format"])) & (rows["dtype"] == known["activations"])
        ]
        judged = own[own["status"].isin(["ok", "incorrect"])]
        if len(judged):
            right = judged[judged["status"] == "ok"]
            counts = f"{len(right)} of {len(judged)}"
            errors = [number(right[name].max()) if len(right) else ABSENT for name in ("rel_l2_error", "tolerance")]
            lines.append(
                [
                    known["format"],
                    known["activations"],
                    "passed" if known["passed"] else "failed",
                    number(known["tolerance"]),
                    counts,
                    *errors,
                ]
            )
    return Table(
        "Kernels against what the quantised weights stand for",
        (
            Group("", ("weights", "activations")),
            Group(f"published ({source['short']})", ("test", "absolute and relative tolerance")),
            Group(f"measured ({platform})", ("rows that are right", "largest relative L2 error", "its limit")),
        ),
        lines,
        "`moe-routing-bench accuracy` also shows what each format loses against the weights before.",
    )  # fmt: skip


def layers(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """The layers of its two models: quantised against full precision."""
    ok = as_chosen(rows[rows["status"] == "ok"])
    whole, lines = ok[ok["weights"] == ok["dtype"]], []
    for _, own in ok.drop(whole.index).groupby([*_LAYER, "weights"]):
        best = own.loc[own["median_us"].idxmin()]
        plain = whole[(whole[_LAYER] == best[_LAYER]).all(axis=1)]
        if plain.empty:
            continue
        full, decoding = plain.loc[plain["median_us"].idxmin()], best["phase"] == "decode"
        gain = ratio(full["median_us"], best["median_us"])
        lines.append([
            label(best), *(str(best[name]) for name in ("phase", "tokens", "dtype", "weights")), f"{guard():g}x" if decoding else ABSENT,
            full["implementation"], number(full["median_us"]), best["implementation"], number(best["median_us"]), number(gain, "x"),
            ABSENT if not decoding else "yes" if gain >= 1 / guard() else "no",
            ", ".join(one["implementation"] for one in (full, best) if isinstance(one["anomaly"], str)) or ABSENT,
        ])  # fmt: skip
    ours = ("full precision", "µs", "quantised", "µs", "speed-up", "within the guard", "in doubt")
    groups = (
        Group("layer", ("model", "phase", "T", "activations", "weights")),
        Group(f"published ({source['short']})", ("guard: at most",)),
        Group(f"measured ({platform}), one layer", ours),
    )
    note = (
        "Their test of whole models has a guard, and published no times; config/seeds/003-models.yaml is its table. Ours are single MoE layers, of which "
        f"each model has 24 or 26.{reduced(rows, 'One layer')}"
    )
    return [Table("Layers of its two models", groups, lines, note)] if lines else []
