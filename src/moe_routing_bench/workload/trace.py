"""Recorded routing. Without torch: the grid checks a trace before anything is measured with it."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from moe_routing_bench import parquet_sizes
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "a Parquet file with a column 'expert_ids' of lists of integers"
_HINT = "`moe-routing-bench trace` makes a trace of other files"


def read(path: Path, tokens: int, experts: int, top_k: int) -> "NDArray[np.int32]":
    """Expert ids (tokens, k) int32 of the first `tokens` rows of a trace.

    Raises `UserError` when it is unreadable, too short, of another k, has other columns that vary, or holds ids out of range
    or twice in a row.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with guarded.opened(path, guarded.MOST_TABLE) as content:
            texts, _ = parquet_sizes.check(content, guarded.MOST_TABLE)
        with pq.ParquetFile(path) as file:
            if "expert_ids" not in file.schema_arrow.names:
                raise bad("trace", f"no such column in {path}", FORMAT, _HINT)
            if texts:
                raise bad("trace", f"long texts in {path}", FORMAT, _HINT)
            guarded.check_names(file.schema_arrow.names)
            table = file.read().slice(0, tokens)
        column = table["expert_ids"].combine_chunks()
        others = [name for name in table.column_names if name != "expert_ids" and len(table[name].unique()) > 1]
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise bad("trace", str(path), FORMAT, (getattr(error, "strerror", None) or str(error))[:120]) from error
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or not pa.types.is_integer(
        column.type.value_type
    ):
        raise bad("trace", f"{column.type} in {path}", FORMAT)
    if others:  # such as layers: their rows are not more tokens
        raise bad("trace", f"different values of {', '.join(map(repr, others))} in {path}", f"{FORMAT} alone", _HINT)
    if len(column) < tokens:
        raise bad("trace", f"{len(column)} rows in {path}", f"at least tokens={tokens} rows")
    ids = column.flatten()
    if column.null_count or ids.null_count or set(column.value_lengths().to_pylist()) != {top_k}:
        raise bad("trace", f"rows of other lengths in {path}", f"top_k={top_k} ids in every row")
    rows = ids.to_numpy().reshape(tokens, top_k)
    if rows.min() < 0 or rows.max() >= experts:
        raise bad("trace", f"ids {rows.min()} to {rows.max()} in {path}", f"0 to {experts - 1}")
    if (np.diff(np.sort(rows, axis=1), axis=1) == 0).any():
        raise bad("trace", f"a row that holds an expert twice in {path}", "distinct experts in every row")
    return rows.astype(np.int32)


def check(path: Path, tokens: int, experts: int, top_k: int) -> None:
    """Raise `UserError` where `read` would. A file is read once for all cells of these sizes, until it changes."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        read(path, tokens, experts, top_k)  # which says so
        return
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null
        raise bad("trace", str(path), FORMAT, getattr(error, "strerror", None) or str(error)) from error
    _read_once(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino), tokens, experts, top_k)


@functools.lru_cache(1000)
def _read_once(path: Path, state: tuple[int, ...], tokens: int, experts: int, top_k: int) -> None:
    """Read a file in one `state` once for all cells of these sizes. Raises `UserError`, which is not remembered."""
    read(path, tokens, experts, top_k)
