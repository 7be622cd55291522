"""Speed-ups of cells with quantised weights, where the baseline of their bench cannot run: those against an implementation that dequantises.

A worker knows one baseline per bench. Where it has no row that is ok, the ratios are made here, from the medians of the blocks that rows keep.
The column `baseline` names what a row is held against. Pure functions; no torch.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from moe_routing_bench.comparison.ratios import between
from moe_routing_bench.comparison.verdicts import replaced
from moe_routing_kernels.formats.weights import WEIGHTS

INSTEAD = ("dequant", "dequant_loop")  # the first of these that is ok: the latter takes quantised rows, too
_TOLD = ("speedup", "speedup_ci_low", "speedup_ci_high", "speedup_p", "baseline")
_BLOCKS = ("block_medians_us", "block_turns", "turns")
_READ = ("cell_hash", "gpu_uuid", "implementation", "weights", "status", "set_aside", *_BLOCKS, *_TOLD)
_Row = Mapping[str, Any]


def against_dequantised(rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """The rows of one cell; where its weights are quantised and it has no baseline, with one of `INSTEAD` as theirs."""
    ran = {row["implementation"]: row for row in rows if row["status"] == "ok"}
    base = next((ran[name] for name in INSTEAD if name in ran), None)
    known = any(row.get("baseline") for row in rows)
    if base is None or known or base["weights"] not in WEIGHTS:
        return [dict(row) for row in rows]
    return [dict(row) | (_ratio(base, row) if row["status"] == "ok" else {}) for row in rows]


def _ratio(base: _Row, row: _Row) -> dict[str, Any]:
    """The time of `base` over that of `row`, its interval and p, and the name of `base`."""
    return dict(zip(_TOLD, (*between(base, row), base["implementation"]), strict=True))


def with_baselines(table: pa.Table) -> pa.Table:
    """The rows of a run, `against_dequantised` cell by cell; their order and other columns stay as they are."""
    rows = sorted(enumerate(table.select(list(_READ)).to_pylist()), key=lambda one: _cell(one[1]))
    told: dict[int, dict[str, Any]] = {}
    for _, cell in groupby(rows, key=lambda one: _cell(one[1])):
        numbers, found = zip(*cell, strict=True)
        told |= dict(zip(numbers, against_dequantised(found), strict=True))
    return replaced(table, {name: [told[i][name] for i in range(len(table))] for name in _TOLD})


def _cell(row: _Row) -> tuple[str, str]:
    return row["cell_hash"], row["gpu_uuid"] or ""
