"""Parquet files that appear whole or not at all, and are read only as they were written."""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from moe_routing_kernels import files

DIGEST = b"moe_routing_bench.rows_sha256"


def digest(table: pa.Table) -> str:
    """SHA-256, in hex, of what the rows of a table say, whatever the order of its columns."""
    return hashlib.sha256(json.dumps(table.to_pylist(), sort_keys=True).encode()).hexdigest()


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table under a temporary name in the same folder, then rename it. Its metadata hold the digest of its rows."""
    table = table.replace_schema_metadata((table.schema.metadata or {}) | {DIGEST: digest(table).encode()})
    with files.replacing(path) as temporary:
        # absolute: pyarrow takes a folder that is called ~ for the home of the user
        pq.write_table(table, temporary.absolute(), compression="zstd", write_page_checksum=True)


def read_table(source: Path | BinaryIO) -> pa.Table:
    """All of a table. Raises `OSError` or `pa.ArrowException` for what is unreadable, damaged, or edited since it was written."""
    try:
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            table = file.read()
        metadata = dict(table.schema.metadata or {})
        known = metadata.pop(DIGEST, None)
        whole = known is None or known == digest(table).encode()
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid("a text in it is none") from error
    if not whole:
        raise pa.ArrowInvalid("its rows are not those that were written")
    return table.replace_schema_metadata(metadata or None)
