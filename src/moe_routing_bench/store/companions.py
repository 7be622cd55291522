"""Files that belong to collected rows: second measurements, the last config, profiles and small tables. Read whole, or refused in one line.

They have no digest: a CSV that is cut between two lines is not noticed.

The accuracy matrix, which `moe-routing-bench accuracy --out` writes, is a Parquet file. What a row says is in `measure.accuracy`; its errors are of the sizes, machine and commit in its last columns.
"""

import csv
import io
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moe_routing_bench.store.parquet import read_table, write_table
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import UserError, bad

if TYPE_CHECKING:
    import pandas as pd


def is_there(path: Path) -> bool:
    """Whether a name exists, be it a folder or a link to nothing: what is no file is refused, not passed over."""
    return os.path.lexists(path)


def rows(path: Path, schema: pa.Schema) -> pa.Table:
    """The table of a Parquet file with exactly these columns. Raises `UserError`."""
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise _refused(path, "a readable Parquet file", error) from error
    if not table.schema.equals(schema):
        raise _refused(path, f"the columns {', '.join(schema.names)}", "other columns, as another version writes")
    return table


def mapping(path: Path, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object of a JSON file that has these keys, none of them twice. Raises `UserError`."""
    try:
        content = guarded.json_of(path, pairs=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(path, "a JSON file", error) from error
    if not isinstance(content, dict):
        raise _refused(path, "a JSON object", type(content).__name__)
    if absent := [key for key in keys if key not in content]:
        raise _refused(path, f"the keys {', '.join(keys)}", f"no {absent[0]}")
    return content


def table(path: Path, columns: Collection[str] = ()) -> "pd.DataFrame":
    """The rows of a CSV file that has these columns, none of them twice, and a value or nothing for each in every line. Raises `UserError`."""
    import pandas as pd

    try:
        data = guarded.csv_of(path).read()
        header, *lines = csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True)
        guarded.check_names(header)
        if not data.endswith(b"\n") or any(len(line) != len(header) for line in lines):
            raise ValueError("a line of it is cut")
        if absent := [name for name in columns if name not in header]:
            raise ValueError(f"no column {absent[0]}")
        return pd.read_csv(io.BytesIO(data))
    except (OSError, ValueError, csv.Error) as error:
        raise _refused(path, "a CSV file with a header", error) from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    guarded.check_names([name for name, _ in pairs], "keys")
    return dict(pairs)


def _refused(path: Path, allowed: str, why: object) -> UserError:
    reason = (getattr(why, "strerror", None) or str(why))[:100]
    away = f"`mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}`"
    return bad("file", str(path), allowed, f"{reason}; restore it, or {away}")


_TEXTS = ("weights", "activations", "drawn", "implementation", "status", "reason")
_ERRORS = tuple(f"{what}_{kind}" for what in ("output", "kernel") for kind in ("error", "snr_db", "cosine"))
_SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k", "seed")
_PLACE = ("platform", "gpu_name", "host", "torch_version", "git_sha", "ended_at")
MATRIX = pa.schema(
    [
        *((name, pa.string()) for name in _TEXTS),
        *((name, pa.float64()) for name in ("weight_error", "weight_snr_db", "of_bound", *_ERRORS, "tolerance")),
        *((name, pa.int64()) for name in _SIZES),
        *((name, pa.string()) for name in _PLACE),
        ("git_dirty", pa.bool_()),
    ]
)


def write_matrix(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows; a column that a row lacks is null. ValueError for one that the schema lacks."""
    rows = list(rows)
    if unknown := {name for row in rows for name in row} - set(MATRIX.names):
        raise ValueError(f"no columns: {sorted(unknown)}")
    write_table(path, pa.Table.from_pylist(rows, MATRIX))


def read_matrix(path: Path, platform: str) -> pa.Table:
    """All rows of a file. Raises `UserError` for what is unreadable, edited, of other columns or of another platform."""
    wanted = "a file that `moe-routing-bench accuracy --out` wrote"
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise bad("accuracy rows", str(path), wanted, str(error)[:120]) from error
    if not table.schema.equals(MATRIX):
        raise bad("accuracy rows", f"other columns in {path}", wanted, "write it again")
    if others := sorted(set(table["platform"].to_pylist()) - {platform}):
        raise bad("accuracy rows", f"those of {', '.join(map(str, others))} in {path}", f"those of {platform}")
    return table
