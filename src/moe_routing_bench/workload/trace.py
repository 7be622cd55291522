"""Recorded routing. Without torch: the grid checks a trace before anything is measured with it."""

from pathlib import Path
from typing import TYPE_CHECKING

from moe_routing_bench.errors import bad

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "a Parquet file with a column 'expert_ids' of lists of integers"
_HINT = "`moe-routing-bench trace` makes a trace of other files"


def read(path: Path, tokens: int, experts: int, top_k: int) -> "NDArray[np.int32]":
    """Expert ids (tokens, k) int32 of the first `tokens` rows of a trace.

    Raises `UserError` when it is unreadable, too short, of another k, has other columns, or holds ids out of range or twice in a row.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise bad("trace", str(path), FORMAT, "no such file, or no regular one")
    try:
        names = pq.read_schema(path).names
        if "expert_ids" not in names:
            raise bad("trace", f"no such column in {path}", FORMAT, _HINT)
        if len(names) > 1:  # of layers, for example, whose rows are not more tokens
            raise bad("trace", f"columns {', '.join(map(repr, names))} in {path}", f"{FORMAT} and no other", _HINT)
        column = pq.read_table(path, columns=["expert_ids"])["expert_ids"].combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise bad("trace", str(path), FORMAT, str(error)[:120]) from error
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or not pa.types.is_integer(
        column.type.value_type
    ):
        raise bad("trace", f"{column.type} in {path}", FORMAT)
    if len(column) < tokens:
        raise bad("trace", f"{len(column)} rows in {path}", f"at least tokens={tokens} rows")
    rows = column.slice(0, tokens)
    ids = rows.flatten()
    if rows.null_count or ids.null_count or set(rows.value_lengths().to_pylist()) != {top_k}:
        raise bad("trace", f"rows of other lengths in {path}", f"top_k={top_k} ids in every row")
    found = ids.to_numpy().reshape(tokens, top_k)
    if found.min() < 0 or found.max() >= experts:
        raise bad("trace", f"ids {found.min()} to {found.max()} in {path}", f"0 to {experts - 1}")
    if (np.diff(np.sort(found, axis=1), axis=1) == 0).any():
        raise bad("trace", f"a row that holds an expert twice in {path}", "distinct experts in every row")
    return found.astype(np.int32)
