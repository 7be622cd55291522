"""What is stored beside the rows of a platform: what a profiler saw of kernels, and the times of stages backwards. Pure functions; no torch."""

from collections.abc import Mapping

import pandas as pd

from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import provenance
from moe_routing_bench.report.sections import Evidence
from moe_routing_bench.report.seeds.tables import ABSENT

_SIZES = ("tokens", "hidden", "experts", "top_k")
# file, and of its table: title, what it is, the columns that say what a line is of, and column, heading and unit of each result
_TABLES = {
    "ncu": (
        "What the profiler saw",
        "Nsight Compute, caches flushed before each kernel, no launch in the time; shares are of the peak of the DRAM and of the L2 cache.",
        ("bench", "implementation", "form"),
        (("duration_us", "time", "us"), ("dram_read_mb", "DRAM read", "MB"), ("dram_write_mb", "DRAM written", "MB"), ("dram_percent_of_peak", "DRAM, share of peak", "%"), ("l2_percent_of_peak", "L2, share of peak", "%")),
    ),
    "backward": (
        "Backward passes of stages",
        "The differentiable operators pack and combine and their backward passes; shares are of the copy bandwidth of the same process.",
        ("direction", "implementation"),
        (("us", "time", "us"), ("share_of_copy", "share of a copy", "share")),
    ),
}  # fmt: skip
_DECIMALS = {"us": 2, "MB": 1, "%": 1}  # those of the files, so that the numbers of a column stand under each other
FILES = tuple(_TABLES)  # names of the files in a folder of results, without .csv


def evidence(files: Mapping[str, pd.DataFrame]) -> list[Evidence]:
    """A table for each of `FILES` that is stored and has lines, in their order."""
    return [_table(name, files[name]) for name in FILES if name in files and len(files[name])]


def _table(name: str, rows: pd.DataFrame) -> Evidence:
    title, about, what, results = _TABLES[name]
    machine = (
        f"{provenance.distinct(rows['gpu_name'])}, torch {provenance.distinct(rows['torch_version'])}, n = {len(rows)}"
    )
    lines = [[*(_text(one[column]) for column in what), _shape(one), *(_number(one[column], unit) for column, _, unit in results)] for _, one in rows.iterrows()]  # fmt: skip
    heads = [*what, "shape", *(head for _, head, _ in results)]
    return Evidence(name, title, f"{about} {machine}.", heads, len(results), lines)


def _text(value: object) -> str:
    return ABSENT if pd.isna(value) else str(value).replace("_", " ")  # type: ignore[call-overload]


def _shape(one: pd.Series) -> str:
    """Sizes as the keys of cells spell them, and what else of layout, capacity and format the file has."""
    sizes = [f"{AXES[name].prefix}={one[name]:.0f}" for name in _SIZES if pd.notna(one[name])]
    others = [f"{AXES[name].prefix}{one[name]:g}" if name == "capacity_factor" else str(one[name]) for name in ("dtype", "layout", "capacity_factor") if name in one and pd.notna(one[name])]  # fmt: skip
    return " ".join([*sizes, *others])


def _number(value: float, unit: str) -> str:
    if pd.isna(value):
        return ABSENT
    return f"{value:.0%}" if unit == "share" else f"{value:,.{_DECIMALS[unit]}f} {unit.replace('us', 'µs')}"
