"""Parquet files: read and written whole or not at all, and a warning for files of different versions of the code."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
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


def outvoted(
    found: Mapping[Path, set[str | None]], shown: int, today: Callable[[], str | None] = lambda: None
) -> tuple[int, str]:
    """How many versions of the code the files name, and in words which files to make again; nothing where they agree.

    Kept are those of today's code, or, where none is of today's, of the most frequent version. The first `shown` are named.
    """
    counts = Counter(code for codes in found.values() for code in codes)
    if len(counts) < 2:
        return len(counts), ""
    wanted = today()
    kept = wanted if wanted in counts else counts.most_common(1)[0][0]
    again = sorted(str(path) for path, codes in found.items() if codes != {kept})
    return len(counts), f"{', '.join(again[:shown])}{', …' * (len(again) > shown)} ({len(again)} files)"
