"""The rows of all published runs of a platform as cells: only the columns that an answer needs are read.

They are read from Parquet, or, in a wheel and without Arrow, from one JSON file with what is needed of all runs (`packed`).
"""

import functools
import gzip
import importlib.util
import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.store import paths
from moe_routing_bench.store.project_files import ROWS, ROWS_FORM, fits_parquet, published_rows, shipped
from moe_routing_kernels.errors import bad

# Arrow takes longer to import than an answer, and a wheel's rows need none.
if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
NEEDED = (
    *("schema_version", "bench", "cell", "implementation", "platform", "status", "reason"),
    *("median_us", "ci_low_us", "ci_high_us"),
    *("suspect", "suspect_reason", "converged", "cold", "timer", "noise_floor", "graph_node_us", "roofline_us"),
    *("baseline", "verdict", "speedup", "speedup_ci_low", "speedup_ci_high"),
    *("best_other", "best_verdict", "best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"),
    *("peak_memory_bytes", "workspace_bytes", "energy_mj_per_token", "stage_us", "over_dense", "share_of_copy"),
    *("git_sha", "code_fingerprint", "ended_at", "gpu_name", "gpu_uuid", "host", "cpu_model", "driver"),
    *("torch_version", "cuda_version", "plugin", "cpu_threads", *AXES),
)
_NO_CARD = "host "
_PAIRS = ("stage_us",)  # columns of pairs, which JSON has as lists
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
    return own if any(own.glob("*/measurements.parquet")) or (own / ROWS).is_file() else shipped(own)


def runs() -> dict[str, list[str]]:
    """The names of published runs (those with a manifest), by platform."""
    kept = _kept(folder())
    names = [
        path.parent.name
        for path in sorted(folder().glob("*/manifest.yaml"))
        if (path.parent / "measurements.parquet").is_file()
    ]
    found: dict[str, list[str]] = {}
    for name in names if kept is None else kept:
        found.setdefault(name.partition(".")[0], []).append(name)
    return found


def packed(digests: Mapping[str, str]) -> bytes:
    """The content of a file of rows, of the runs with these digests of their Parquet files: all that answers read of them, by column."""
    found = {}
    for run, digest in digests.items():
        rows = _rows(run, tuple(BENCHES))
        commits = {row["git_sha"] for row in rows if row["git_sha"]}
        found[run] = {
            "parquet": digest,
            "rows": {name: [row[name] for row in rows] for name in NEEDED},
            "accuracy": accuracy((run,)),
            "versions": {commit: version(run, commit) for commit in sorted(commits)},
            "submitter": submitter(run),
        }
    text = json.dumps({"form": ROWS_FORM, "runs": found}, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), mtime=0)


def _kept(place: Path) -> Mapping[str, Any] | None:
    """What such a file in a folder has of each run; None where the folder has Parquet files to read, or neither."""
    path = (place / ROWS).absolute()  # what is read is kept, and the working directory may be another later
    instead = not importlib.util.find_spec("pyarrow") and path.is_file() and fits_parquet(path)
    return (
        published_rows(path) if path.is_file() and (instead or not any(place.glob("*/measurements.parquet"))) else None
    )


def cells(names: Iterable[str], benches: Collection[str]) -> list[Cell]:
    """The cells of some benches in runs of these names. Raises `UserError` for an unreadable file."""
    place = folder().absolute()
    return [cell for name in names for cell in _cells(place, name, tuple(benches))]


@functools.lru_cache(maxsize=256)  # all questions share cells, and the order of their times
def _cells(place: Path, run: str, benches: tuple[str, ...]) -> list[Cell]:
    found: dict[tuple[str, str, str], Cell] = {}
    for row in _rows(run, benches):
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


def _rows(run: str, benches: tuple[str, ...]) -> list[Row]:
    """The rows of some benches of a run. Raises `UserError` for a run that is not there."""
    if (kept := _kept(folder())) is None:
        return _from_parquet(folder() / run / "measurements.parquet", benches)
    if run not in kept:
        raise bad("run", run, ", ".join(kept))
    return [row for row in _from_columns((folder() / ROWS).absolute(), run) if row["bench"] in benches]


@functools.lru_cache(maxsize=64)
def _from_columns(path: Path, run: str) -> list[Row]:
    columns = published_rows(path)[run]["rows"]
    newer = {name: [None] * len(columns["bench"]) for name in AXES if name not in columns}  # axes that the file lacks
    pairs = {name: [one and [tuple(pair) for pair in one] for one in columns[name]] for name in _PAIRS}
    known = newer | columns | pairs
    return [dict(zip(NEEDED, row, strict=True)) for row in zip(*(known[name] for name in NEEDED), strict=True)]


@functools.lru_cache(maxsize=64)
def _from_parquet(path: Path, benches: tuple[str, ...]) -> list[Row]:
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
def _table(path: Path) -> "pa.Table":
    from moe_routing_bench.store import records

    return records.verified(path, without=set(records.COLUMNS) - set(NEEDED))


def _whole(row: Row) -> Row:
    """A row with all columns that an answer needs, without what is not true of it."""
    from moe_routing_bench.store import records

    withdrawn = {name: None for name, witness in records.WITHDRAWN.items() if row.get(witness) is None}
    return dict.fromkeys(NEEDED) | dict(row) | withdrawn


def accuracy(names: tuple[str, ...]) -> list[Row]:
    """What weight formats lose in the runs of these names: the rows of their accuracy tables that have a result."""
    if (kept := _kept(folder())) is not None:
        return [row for name in names for row in kept[name]["accuracy"]]
    return [row for name in names for row in _accuracy(folder() / name / "accuracy.parquet")]


@functools.lru_cache(maxsize=64)
def _accuracy(path: Path) -> list[Row]:
    from moe_routing_bench.store.parquet import read_table

    rows = read_table(path).select(_ACCURACY).to_pylist() if path.is_file() else []
    return [row for row in rows if row["status"] == "ok"]


def submitter(run: str) -> str | None:
    """The name under which the rows of a run were submitted; None for rows of this project."""
    if (kept := _kept(folder())) is not None:
        return kept[run]["submitter"]
    from moe_routing_bench.store import archive

    return archive.submitter(folder() / run)


def version(run: str, commit: str) -> str | None:
    """The version of the package at a commit, by the manifest of the run; None where it does not say."""
    if (kept := _kept(folder())) is not None:
        return kept[run]["versions"].get(commit)
    return _versions(folder() / run / "manifest.yaml").get(commit)


@functools.cache
def _versions(path: Path) -> Mapping[str, str | None]:
    import yaml

    about = yaml.safe_load(path.read_text(encoding="utf-8"))["tables"]["measurements"]
    return {group["commit"]: group["version"] for group in reversed(about["measured"])}
