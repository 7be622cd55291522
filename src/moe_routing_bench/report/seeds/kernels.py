"""Seed 003: rows of experts in the columns of its tables, by format, decoding too, and which of its published times are doubtful."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.comparison import anomalies
from moe_routing_bench.comparison.regret import as_chosen
from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.seeds import figures, number, ratio
from moe_routing_bench.report.seeds.models import guard, label, milliseconds, reduced, why

LOOP, DEQUANTISED_LOOP = "torch_loop", "dequant_loop"
DEQUANTISED = ("dequant", "dequant_cute")  # into a workspace of 16 bits that is kept, then products of 16 bits
KEPT = "kept workspace"  # the faster of those
_BASELINES = (LOOP, *DEQUANTISED, "dequant_uncached", DEQUANTISED_LOOP)
HEADINGS = (
    *(f"{LOOP} ms", f"{DEQUANTISED_LOOP} ms", f"{KEPT} ms", "kernel", "kernel ms"),
    *(f"over {DEQUANTISED_LOOP}", f"over {KEPT}", "TFLOP/s", "in doubt"),
)
Row = Mapping[str, Any]
FORMATS = {  # of weights, by their names: ours, with a scale per 128 elements
    "int8": "int8_g128",
    "int8_asym": "int8z_g128",
    "int4": "int4_g128",
    "int4_asym": "int4z_g128",
    "int2": "int2_g128",
    "int2_asym": "int2z_g128",
    "e4m3": "e4m3_g128",
    "e5m2": "e5m2_g128",
}
_LAYER = ["hidden", "intermediate", "experts", "phase", "tokens", "dtype"]
TIMES: Mapping[str, str] = {"base_mm_ms": "base mm", "base_dequant_ms": "base + dequant", "kernel_ms": "kernel"}


def texts(found: Mapping[str, Row]) -> list[str]:
    """The cells below `HEADINGS` of the rows of one shape and formats, by implementation."""
    fastest, (loop, kept) = kernel(found.values()), ratios(found)
    doubts = [name for name, row in found.items() if isinstance(row["anomaly"], str)]
    return [
        *map(number, (median(found, LOOP), median(found, DEQUANTISED_LOOP), workspace(found))),
        without(found.values()) if fastest is None else fastest["implementation"],
        number(None if fastest is None else fastest["median_us"] / 1000),
        number(loop, "x"),
        number(kept, "x"),
        number(None if fastest is None else fastest["tflops"]),
        listed(doubts),
    ]


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
    )


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
        lines.append(
            [
                label(best),
                *(str(best[name]) for name in ("phase", "tokens", "dtype", "weights")),
                f"{guard():g}x" if decoding else ABSENT,
                full["implementation"],
                number(full["median_us"]),
                best["implementation"],
                number(best["median_us"]),
                number(gain, "x"),
                ABSENT if not decoding else "yes" if gain >= 1 / guard() else "no",
                ", ".join(one["implementation"] for one in (full, best) if isinstance(one["anomaly"], str)) or ABSENT,
            ]
        )
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


def decode_tables(rows: pd.DataFrame, platform: str) -> list[Table]:
    """The table, of rows of `experts`; none where nothing decodes."""
    own = rows[rows["phase"] == "decode"]
    lines = [line for one in figures("003_accuracy").to_dict("records") if (line := _decode_line(one, own))]
    note = (
        "One token, so one row for each of its experts. Their pull request tests a kernel for this in all of these formats, and publishes no times of it. Columns "
        "are those of the table of shapes."
    )
    groups = (
        Group("", ("H", "I", "E", "k", "weights", "activations")),
        Group(f"measured ({platform}), both products of an expert", HEADINGS),
    )
    return [Table("Decoding by format of weights and activations", groups, lines, note)] if lines else []


def _decode_line(known: dict[str, Any], rows: pd.DataFrame) -> list[str]:
    """One format of weights with one of activations; empty where it was not measured."""
    alike = rows[rows["dtype"] == known["activations"]]
    own = alike[alike["weights"] == FORMATS.get(known["format"], known["format"])]
    if own.empty:
        return []
    plain = alike[(alike["weights"] == alike["dtype"]) & (alike["implementation"] == LOOP)]
    found = {row["implementation"]: row for row in pd.concat([plain, own]).to_dict("records")}
    first = own.iloc[0]
    sizes = (str(first[name]) for name in ("hidden", "intermediate", "experts", "top_k"))
    return [*sizes, known["format"], known["activations"], *texts(found)]


def as_rows() -> pd.DataFrame:
    """Its table as rows of one card, each column of times as an implementation; `published` is the number of the row there, `extreme`
    what it marks as implausible. Its kernel is another one without quantisation."""
    return pd.concat(_columns(figures("003")), ignore_index=True)


def _columns(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    bits = table["format"].str.extract(r"(\d)")[0].astype(int).where(table["format"].str.startswith("int"), 8)
    plain = table["format"] == table["activations"]
    sizes = table[["tokens", "experts", "machine"]].assign(hidden=table["k"], intermediate=table["n"])
    alike = {"bench": "experts", "status": "ok", "gpu_uuid": "XPU", "q1_us": 1.0, "q3_us": 1.0}
    for name, read in (("base_mm_ms", 16), ("base_dequant_ms", bits), ("kernel_ms", bits.where(~plain, 16))):
        way = np.where(plain, f"{name} unquantised", name) if name == "kernel_ms" else name
        extreme = table["implausible"].fillna("").str.split().map(lambda names, name=name: name in names)
        one = sizes.assign(**alike, implementation=way, dtype=table["activations"], weights=table["format"])
        one = one.assign(median_us=table[name] * 1e3, extreme=extreme, column=name, published=table.index)
        one = one.assign(compulsory_bytes=table["experts"] * table["n"] * table["k"] * read // 8)
        yield one.dropna(subset=["median_us"])


def doubted() -> dict[int, list[str]]:
    """For the numbers of rows with a time in doubt, the headings of these times."""
    rows = as_rows()
    doubts = rows[anomalies.found(rows).notna()]
    return {number: [TIMES[name] for name in own["column"]] for number, own in doubts.groupby("published")}
