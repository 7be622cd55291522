"""A recorded routing in numbers: what the rows of a cell that replays all of it say of its loads and drops."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.measure.statistics import load_statistics
from moe_routing_bench.workload.rows import row_map
from moe_routing_kernels.permute.layout import RowLayout, capacity_of

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
    found = load_statistics(loads.tolist())
    layouts = (
        RowLayout(tokens, top_k, experts, capacity_of(factor, tokens, top_k, experts)) for factor in CAPACITY_FACTORS
    )
    drops = tuple(1 - int(row_map(layout, ids).counts.sum()) / ids.size for layout in layouts)
    names = ("active_experts", "dead_experts", "load_cv", "load_max_over_mean")
    seen, dead, cv, most = (found[name] for name in names)
    return Summary(tokens, top_k, experts, int(seen), int(dead), float(cv), float(most), drops)  # type: ignore
