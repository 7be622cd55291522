"""The accuracy matrix in a Parquet file: what `moe-routing-bench accuracy --out` writes, for reports and for people.

What a row says is in `measure.accuracy`; its errors are of the sizes, machine and commit in its last columns.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.store.parquet import read_table, write_table
from moe_routing_kernels.errors import bad

_TEXTS = ("weights", "activations", "drawn", "implementation", "status", "reason")
_ERRORS = tuple(f"{what}_{kind}" for what in ("output", "kernel") for kind in ("error", "snr_db", "cosine"))
_SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k", "seed")
_PLACE = ("platform", "gpu_name", "host", "torch_version", "git_sha", "ended_at")
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in _TEXTS),
        *((name, pa.float64()) for name in ("weight_error", "weight_snr_db", "of_bound", *_ERRORS, "tolerance")),
        *((name, pa.int64()) for name in _SIZES),
        *((name, pa.string()) for name in _PLACE),
        ("git_dirty", pa.bool_()),
    ]
)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows; a column that a row lacks is null. ValueError for one that the schema lacks."""
    rows = list(rows)
    if unknown := {name for row in rows for name in row} - set(SCHEMA.names):
        raise ValueError(f"no columns: {sorted(unknown)}")
    write_table(path, pa.Table.from_pylist(rows, SCHEMA))


def read(path: Path, platform: str) -> pa.Table:
    """All rows of a file. Raises `UserError` for what is unreadable, edited, of other columns or of another platform."""
    wanted = "a file that `moe-routing-bench accuracy --out` wrote"
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise bad("accuracy rows", str(path), wanted, str(error)[:120]) from error
    if not table.schema.equals(SCHEMA):
        raise bad("accuracy rows", f"other columns in {path}", wanted, "write it again")
    if others := sorted(set(table["platform"].to_pylist()) - {platform}):
        raise bad("accuracy rows", f"those of {', '.join(map(str, others))} in {path}", f"those of {platform}")
    return table
