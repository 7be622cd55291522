"""Where rows come from: what timed them, and which implementations are this project's kernels throughout. Pure functions; no torch.

A name says nothing of it: `cute_quack` is our routing around QuACK's GEMMs, and counts as a rival that is named.
"""

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING

from moe_routing_bench.benches.bench import Bench, Implementation, find
from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.benches.registry import BENCHES

if TYPE_CHECKING:
    import pandas as pd

GPU, CPU = "gpu_name", "cpu_model"
# What a card is, by a word of its name: rows name the card, a choice is made for its architecture.
ARCHITECTURES = {
    "A100": "sm_80",
    "L40S": "sm_89",
    "H100": "sm_90",
    "H200": "sm_90",
    "H20": "sm_90",
    "GH200": "sm_90",
    "B200": "sm_100",
}


def column(rows: "pd.DataFrame") -> str:
    """The column with the names of what timed these rows: next to a GPU the CPU times nothing and sets no ceiling."""
    return GPU if rows[GPU].notna().any() else CPU


def names(rows: "pd.DataFrame") -> list[str]:
    """What timed these rows, each once; none where it is not known."""
    return [str(name) for name in rows[column(rows)].dropna().unique()]


def architecture(card: str | None) -> str:
    """The architecture of a card, ``cpu`` where there is none; of an unknown one its name, which fits no other."""
    if not card:
        return "cpu"
    words = card.replace("-", " ").split()
    return next((found for name, found in ARCHITECTURES.items() if name in words), card)


_KERNELS = {"triton", "cutlass"}  # what our kernels are written in
_CALLING = ("ops", AUTO)  # they run our kernels where these can run
_AROUND_TORCH = ("matmul_cute",)  # our gate behind a product of torch
TORCH = "torch"


@functools.cache
def ours(bench: str) -> frozenset[str]:
    """The implementations of a bench whose kernels are all of this project, and what chooses among them."""
    known = BENCHES[bench]
    return frozenset(one.name for one in known.implementations if one.name in _CALLING or _own(one, known))


def _own(one: Implementation, bench: Bench) -> bool:
    """Whether no other package does a part of it, torch included."""
    if one.peer or one.name in _AROUND_TORCH or not _KERNELS & set(one.requires):
        return False
    covered = {stage for part in one.parts for stage in part.split("+")}
    if bench.stages and covered != {stage.name for stage in bench.stages}:
        return False  # torch does the rest
    stages = {stage.name: find(stage.bench) for stage in bench.stages}
    return all(_own(stages[part][name], stages[part]) for part, name in one.parts.items() if "+" not in part)


def maker(bench: str, name: str) -> str:
    """The package whose kernels an implementation has that is not ours: a distribution, or torch."""
    known = {one.name: one for one in BENCHES[bench].implementations}
    peer = known[name].peer if name in known else None
    return peer.distribution if peer else TORCH


def besides_torch(bench: str, names: Collection[str]) -> set[str]:
    """Those of `names` that are not ours and have kernels of another package than torch."""
    return {name for name in set(names) - ours(bench) if maker(bench, name) != TORCH}
