"""Checked expert ids as a Parquet file that the sampler `trace` replays, and a summary of their loads and drops."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moe_routing_bench.statistics import load_statistics
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.traces.checks import checked
from moe_routing_bench.workload.rows import row_map
from moe_routing_kernels.errors import writing
from moe_routing_kernels.permute.layout import RowLayout, capacity_of

COLUMN = "expert_ids"


def write(path: Path, ids: Any, experts: int | None = None) -> None:
    """Write expert ids (T, k), of anything that numpy takes for an array of whole numbers, as a trace, or nothing at all.

    `experts` is their number, for a check of the ids. Raises `UserError` for ids that are no routing, and where the file
    cannot be written.
    """
    rows = checked(np.asarray(ids), experts, "the array")
    starts = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    with writing(path):
        write_table(path, pa.table({COLUMN: pa.ListArray.from_arrays(pa.array(starts), pa.array(rows.ravel()))}))


CAPACITY_FACTORS = (1.0, 1.25, 1.5)


@dataclass(frozen=True)
class Summary:
    """Sizes, tokens per expert, and the share of assignments that is dropped at each of `CAPACITY_FACTORS`."""

    tokens: int
    top_k: int
    experts: int
    seen: int  # experts with at least one token
    dead: int
    load_cv: float
    load_max_over_mean: float
    drops: tuple[float, ...]


def summary(ids: NDArray[np.int32], experts: int) -> Summary:
    """The summary of ids (T, k), all T tokens in one batch."""
    (tokens, top_k), loads = ids.shape, np.bincount(ids.ravel(), minlength=experts)
    statistics = load_statistics(loads.tolist())
    layouts = (
        RowLayout(tokens, top_k, experts, capacity_of(factor, tokens, top_k, experts)) for factor in CAPACITY_FACTORS
    )
    drops = tuple(1 - int(row_map(layout, ids).counts.sum()) / ids.size for layout in layouts)
    names = ("active_experts", "dead_experts", "load_cv", "load_max_over_mean")
    seen, dead, cv, most = (statistics[name] for name in names)
    return Summary(tokens, top_k, experts, int(seen), int(dead), float(cv), float(most), drops)  # type: ignore
