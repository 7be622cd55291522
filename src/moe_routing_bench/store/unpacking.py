"""A Parquet file as a table, within limits: few bytes of a file may be billions of values, or the same long text a million times."""

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moe_routing_bench import parquet_sizes
from moe_routing_kernels import guarded

MOST_DIGESTED = 2**24  # values of a table whose digest is computed: about 1 µs each
_MOST_ROWS, _MOST_BYTES = 1024, 2**22  # that are Python objects at a time: a number takes ten times as much


def read(data: bytes, digest: bytes) -> pa.Table:
    """The table of a file with this content.

    Of a table whose metadata have `digest`, at most `MOST_DIGESTED` values are read, as each will be looked at in Python. Raises
    `guarded.Refused` for a larger table and for what is no Parquet file, and `pa.ArrowException`.
    """
    texts, values = parquet_sizes.check(io.BytesIO(data), guarded.MOST_TABLE)
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        if digest in (file.schema_arrow.metadata or {}):
            guarded.check_amount(values, MOST_DIGESTED, "values")
        if not texts:
            return file.read()
        schema = file.schema_arrow
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True, read_dictionary=texts) as file:
        return _written_out(file.read(), schema)


def _written_out(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table of which some columns repeat texts: how much these take is known before they are written out."""
    sizes = (_bytes_of_texts(chunk) for column in table.columns for chunk in column.chunks)
    guarded.check_amount(sum(sizes), guarded.MOST_TABLE, "bytes of texts")
    return table.cast(schema)


def _bytes_of_texts(array: pa.Array) -> int:
    """What the texts of an array take where each stands for itself; 0 for other values."""
    if isinstance(array, pa.DictionaryArray):
        import pyarrow.compute as pc  # takes a twentieth of a second

        lengths = pc.call_function("binary_length", [array.dictionary])
        return pc.call_function("sum", [lengths.take(array.indices)]).as_py() or 0
    if isinstance(array, pa.StructArray):
        return sum(map(_bytes_of_texts, array.flatten()))
    return _bytes_of_texts(array.flatten()) if isinstance(array, pa.ListArray | pa.LargeListArray) else 0


def parts(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    """All rows, few at a time. Raises `guarded.Refused` for a row of more bytes than Python objects may be made of."""
    for batch in table.to_batches(_MOST_ROWS):
        for part in _halves(batch):
            yield part.to_pylist()


def _halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes > _MOST_BYTES and len(batch) > 1:
        half = len(batch) // 2
        yield from _halves(batch.slice(0, half))
        yield from _halves(batch.slice(half))
    elif len(batch):
        guarded.check_amount(batch.nbytes, 8 * _MOST_BYTES, "bytes in a row")
        yield batch
