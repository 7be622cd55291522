"""Compare the model with tables of other projects, which no parameter is fitted on (config/published/scale): relative errors by table.

A published bandwidth becomes a time by the bytes that its source counts: rows per (token, rank) over NLVink, or per (token, host) over RDMA, local ones included.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.scale import exchange, flows
from moe_routing_bench.scale.exchange import NORMAL, Links
from moe_routing_bench.store.project_files import shipped
from moe_routing_kernels import guarded

TABLES = Path("config/published/scale")
SOURCES = TABLES / "sources.yaml"
EXPERTS = Path("config/published/aisimulate-h200.csv")  # whole layers and ranks of EP=8 by the same kernels
MEMORY = 4.23e6  # bytes per µs: copy bandwidth of the stored H200 rows, whose median a test compares
FIXED = 14.2  # µs of a layer that more ranks do not shrink, as `experts` finds in stored rows
_NVLINK, _RDMA = "nvlink", "rdma"


def links(card: str) -> Links:
    """The fitted links of a card."""
    return exchange.load(MEMORY, card)


def sources() -> dict[str, Any]:
    """What each table is: source, version, licence, card, boundary and mode."""
    return dict(read_mapping(shipped(SOURCES)))


def _read(name: str) -> pd.DataFrame:
    return pd.read_csv(guarded.csv_of(shipped(TABLES / f"{name}.csv")))


def exchanges() -> Iterator[dict[str, Any]]:
    """A line per published dispatch or combine: table, mode, ranks, hidden, tokens, way, published and predicted time (µs)."""
    for name, about in sources().items():
        if about["what"] != "exchange":
            continue
        for row in _read(name).to_dict("records"):
            known = links(about["card"])
            groups = row["host_groups"] if row["host_groups"] > 0 else None
            group = flows.Group(row["ranks"], row["tokens"], row["experts"], row["top_k"], known.host, groups)
            flow = flows.even(group)
            times = exchange.times(flow, row["hidden"], row["mode"], "fp8", known)
            for way, predicted in (("dispatch", times.dispatch), ("combine", times.combine)):
                yield {
                    "table": name,
                    "mode": row["mode"],
                    "ranks": row["ranks"],
                    "hidden": row["hidden"],
                    "experts": row["experts"],
                    "tokens": row["tokens"],
                    "way": way,
                    "published_us": _time(row, way, flow),
                    "predicted_us": predicted,
                }


def _time(row: Mapping[Any, Any], way: str, flow: flows.Flow) -> float:
    """The published time of a row, or of its bandwidth in GB/s."""
    if row["counts"] not in (_NVLINK, _RDMA):
        return row[way]
    width = exchange.row_bytes(row["hidden"], "fp8" if way == "dispatch" else "bf16", NORMAL)
    rows = flow.once[:, 0].sum() if row["counts"] == _NVLINK else flow.hosts[0].sum()
    return rows * width / (row[way] * 1e3)


def layers() -> Iterator[dict[str, Any]]:
    """A line per published layer on 2 to 8 GPUs: its time from that of one GPU and the exchange of bf16 rows, in normal mode, nothing hidden."""
    for name, about in sources().items():
        if about["what"] != "layer":
            continue
        table = _read(name)
        for key, rows in table.groupby(["model", "implementation"], sort=False):
            alone = rows[rows["ranks"] == 1].iloc[0]
            for row in rows[rows["ranks"] > 1].to_dict("records"):
                group = flows.Group(row["ranks"], row["tokens"], row["experts"], row["top_k"])
                times = exchange.times(flows.even(group), row["hidden"], NORMAL, "bf16", links(about["card"]))
                flops = 6 * row["tokens"] * row["top_k"] * row["hidden"] * row["intermediate"]
                one, published = (flops / (rate * 1e6) for rate in (alone["tflops"], row["tflops"]))
                yield {
                    "table": name,
                    "mode": "layer",
                    "ranks": row["ranks"],
                    "hidden": row["hidden"],
                    "experts": row["experts"],
                    "tokens": row["tokens"],
                    "way": str(key[1]),
                    "published_us": published,
                    "predicted_us": one + times.both,
                }


def ranks_of_experts() -> Iterator[dict[str, Any]]:
    """A line per published rank of EP=8 whose package also has the whole layer."""
    rows = pd.read_csv(guarded.csv_of(shipped(EXPERTS)))
    rows = rows[(rows["loads"] == "balanced") & (rows["tensor_parallel"] == 1)]
    key = ["tokens", "hidden", "intermediate", "experts", "top_k", "weights", "package", "version", "kernel"]
    whole = rows[rows["expert_parallel"] == 1].set_index(key)["median_us"]
    for row in rows[rows["expert_parallel"] > 1].to_dict("records"):
        place = tuple(row[name] for name in key)
        if place in whole.index:
            yield {
                "table": "aisimulate-h200",
                "mode": "experts",
                "ranks": row["expert_parallel"],
                "hidden": row["hidden"],
                "experts": row["experts"],
                "tokens": row["tokens"],
                "way": row["package"],
                "published_us": row["median_us"],
                "predicted_us": FIXED + max(0.0, whole[place] - FIXED) / row["expert_parallel"],
            }


@cache
def lines() -> pd.DataFrame:
    """All lines, with the relative `error`: predicted over published, less 1."""
    table = pd.DataFrame([*exchanges(), *layers(), *ranks_of_experts()])
    return table.assign(error=table["predicted_us"] / table["published_us"] - 1)


def errors(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Number of lines, median and 90th percentile of the size of the error, and its median with its sign, by some columns."""
    sizes = table.assign(size=table["error"].abs())
    grouped = sizes.groupby(by, sort=False)
    return pd.DataFrame(
        {
            "lines": grouped.size(),
            "median": grouped["size"].median(),
            "p90": grouped["size"].quantile(0.9),
            "bias": grouped["error"].median(),
        }
    ).reset_index()


def bands() -> dict[tuple[str, bool], tuple[float, float]]:
    """Median and 90th percentile of the error of an exchange by mode and whether it leaves a host, and of experts as ("experts", False)."""
    table = lines()
    found = errors(table.assign(far=table["ranks"] > exchange.parameters()["host"]), ["mode", "far"])
    return {(row["mode"], row["far"]): (row["median"], row["p90"]) for row in found.to_dict("records")}
