"""Parquet files that appear whole or not at all."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from moe_routing_bench import files


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table under a temporary name in the same folder, then rename it."""
    with files.replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
