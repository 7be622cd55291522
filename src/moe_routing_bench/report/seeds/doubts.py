"""What the rule that doubts rows of this benchmark says of the published times of seed 003, held against one another."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from moe_routing_bench.comparison import anomalies
from moe_routing_bench.report.seeds.published import figures

TIMES: Mapping[str, str] = {"base_mm_ms": "base mm", "base_dequant_ms": "base + dequant", "kernel_ms": "kernel"}


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
