"""The rows of all published runs of a platform as cells: only the columns that an answer needs are read."""

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.store import archive, paths, records
from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.store.project_files import shipped

Row = Mapping[str, Any]
NEEDED = (
    *(
        "schema_version",
        "bench",
        "cell",
        "implementation",
        "platform",
        "status",
        "reason",
        "median_us",
        "ci_low_us",
        "ci_high_us",
    ),
    *("suspect", "suspect_reason", "converged", "cold", "timer", "noise_floor", "graph_node_us", "roofline_us"),
    *("baseline", "verdict", "speedup", "speedup_ci_low", "speedup_ci_high"),
    *("best_other", "best_verdict", "best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"),
    *("peak_memory_bytes", "workspace_bytes", "energy_mj_per_token", "stage_us", "over_dense", "share_of_copy"),
    *("git_sha", "code_fingerprint", "ended_at", "gpu_name", "gpu_uuid", "host", "cpu_model", "driver"),
    *("torch_version", "cuda_version", "plugin", "cpu_threads", *AXES),
)
_NO_CARD = "host "
_ACCURACY = ("weights", "activations", "drawn", "implementation", "status", "weight_snr_db", "output_snr_db")


@dataclass(frozen=True, eq=False)
class Cell:
    """The rows of one cell of one run on one card; `axes` are those that its bench reads."""

    run: str
    bench: str
    key: str
    card: str
    axes: Row
    rows: list[Row] = field(default_factory=list)

    @functools.cached_property
    def timed(self) -> list[Row]:
        """The rows with a time, the lowest median first."""
        rows = [row for row in self.rows if row["status"] == "ok" and row["median_us"] is not None]
        return sorted(rows, key=lambda row: row["median_us"])

    @functools.cached_property
    def day(self) -> str:
        """When the last of its rows was measured."""
        return max(str(row["ended_at"] or "") for row in self.rows)[:10]


def folder() -> Path:
    """The folder of published rows: that of the working directory, or else the one that comes with the package."""
    own = paths.results("")
    return own if any(own.glob("*/measurements.parquet")) else shipped(own)


def runs() -> dict[str, list[str]]:
    """The names of published runs (those with a manifest), by platform."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder().glob("*/manifest.yaml")):
        if (path.parent / "measurements.parquet").is_file():
            found.setdefault(path.parent.name.partition(".")[0], []).append(path.parent.name)
    return found


def cells(names: Iterable[str], benches: Collection[str]) -> list[Cell]:
    """The cells of some benches in runs of these names. Raises `UserError` for an unreadable file."""
    return [cell for name in names for cell in _cells(name, tuple(benches))]


def _cells(run: str, benches: tuple[str, ...]) -> list[Cell]:
    found: dict[tuple[str, str, str], Cell] = {}
    for row in _rows(folder() / run / "measurements.parquet", benches):
        card = row["gpu_uuid"] or f"{_NO_CARD}{row['host']}"
        key = (row["bench"], row["cell"], card)
        if key not in found:
            read = {one.name: _value(row, one.name) for one in axes.of(BENCHES[row["bench"]].axes)}
            found[key] = Cell(run, row["bench"], row["cell"], card, read)
        found[key].rows.append(row)
    _joined(found)
    return list(found.values())


def _joined(cells: Mapping[tuple[str, str, str], Cell]) -> None:
    """Add rows that name no card, as those of what crashed, to the cell of the card that the others of it were measured on."""
    for (bench, name, card), cell in cells.items():
        if card.startswith(_NO_CARD):
            for (*other, _), its in cells.items():
                if its is not cell and other == [bench, name]:
                    its.rows.extend(cell.rows)


def _value(row: Row, name: str) -> Any:
    """What a row has of an axis: one that follows another and is absent is as that one."""
    follows = AXES[name].follows
    return row[follows] if row[name] is None and follows else row[name]


@functools.lru_cache(maxsize=64)
def _rows(path: Path, benches: tuple[str, ...]) -> list[Row]:
    # No filter of Arrow: `pyarrow.array` imports pandas, which takes longer than all the rest.
    table = _table(path)
    found: list[Row] = []
    start = 0
    for bench, same in itertools.groupby(table["bench"].to_pylist()):
        length = len(list(same))
        if bench in benches:
            found += map(_whole, table.slice(start, length).to_pylist())
        start += length
    return found


@functools.lru_cache(maxsize=64)
def _table(path: Path) -> pa.Table:
    return records.verified(path, without=set(records.COLUMNS) - set(NEEDED))


def _whole(row: Row) -> Row:
    """A row with all columns that an answer needs, without what is not true of it."""
    withdrawn = {name: None for name, witness in records.WITHDRAWN.items() if row.get(witness) is None}
    return dict.fromkeys(NEEDED) | dict(row) | withdrawn


@functools.lru_cache(maxsize=64)
def accuracy(names: tuple[str, ...]) -> list[Row]:
    """What weight formats lose in the runs of these names: the rows of their accuracy tables that have a result."""
    files = [folder() / name / "accuracy.parquet" for name in names]
    tables = [read_table(path).select(_ACCURACY) for path in files if path.is_file()]
    return [row for table in tables for row in table.to_pylist() if row["status"] == "ok"]


def submitter(run: str) -> str | None:
    """The name under which the rows of a run were submitted; None for rows of this project."""
    return archive.submitter(folder() / run)


@functools.cache
def version(run: str, commit: str) -> str | None:
    """The version of the package at a commit, by the manifest of the run; None where it does not say."""
    path = folder() / run / "manifest.yaml"
    about = yaml.safe_load(path.read_text(encoding="utf-8"))["tables"]["measurements"]
    return next((group["version"] for group in about["measured"] if group["commit"] == commit), None)
