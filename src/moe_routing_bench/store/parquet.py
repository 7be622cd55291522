"""Parquet files: read and written whole or not at all, and a warning for files of different versions of the code.

A written file is sealed: its metadata end with the SHA-256 of all its bytes, the digits themselves counted as zeros. A reader hashes the
bytes once, which takes a hundredth of the time that decoding them takes, and may then trust every part of the file. Files of older versions have a digest of their rows instead.
Files are read within limits: few bytes may be billions of values, or the same long text a million times.

Files that a newer version of this package wrote are named and kept, because this version can neither read nor replace them.
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from moe_routing_bench import parquet_sizes
from moe_routing_kernels import files, guarded
from moe_routing_kernels.errors import UserError, bad

SEAL = b"moe_routing_bench.file_sha256"
DIGEST = b"moe_routing_bench.rows_sha256"  # of files of older versions
_OTHER = "its rows are not those that were written"
_ZEROS = b"0" * 64
_TEXT = b"\x18"  # before the length of a binary field, in the compact protocol of Thrift
_SEALED = re.compile(re.escape(SEAL + _TEXT) + b"\x40(.{64})", re.DOTALL)
_SMALL = 2**20  # bytes of a cell's table, which compression makes slower to read, and hardly smaller
_LEVEL = 9  # of zstd: up to 22, the table of a run is 3 % smaller, and takes ten times as long to write


def digest(table: pa.Table) -> str:
    """SHA-256, in hex, of what the rows of a table say, whatever the order of its columns: what files of older versions hold."""
    sha256 = hashlib.sha256(b"[")
    for number, rows in enumerate(parts(table)):
        sha256.update((", " * (number > 0) + json.dumps(rows, sort_keys=True)[1:-1]).encode())
    sha256.update(b"]")
    return sha256.hexdigest()


def write_table(path: Path, table: pa.Table, schema: bool = True, dictionaries: bool = False) -> None:
    """Write a table, sealed, under a temporary name in the same folder, then rename it. `schema` also stores Arrow's, with metadata of fields;
    `dictionaries` are for whole numbers of few values: tables of runs are a third smaller without."""
    metadata = {name: value for name, value in (table.schema.metadata or {}).items() if name != DIGEST} | {SEAL: _ZEROS}
    table, packed, sink = table.replace_schema_metadata(None), schema or table.nbytes >= _SMALL, pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema.with_metadata(metadata if schema else None),
        compression="zstd" if packed else "none",
        compression_level=_LEVEL if packed else None,
        use_dictionary=dictionaries,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=schema,
    ) as writer:
        writer.write_table(table)
        if not schema:  # these are stored with it
            writer.add_key_value_metadata({name.decode(): value.decode() for name, value in metadata.items()})
    data = bytearray(sink.getvalue())
    place = _place_of_seal(data)
    assert place is not None, "the file has the metadata that it was given"
    data[place : place + len(_ZEROS)] = hashlib.sha256(data).hexdigest().encode()
    with files.replacing(path) as temporary:
        temporary.write_bytes(data)


def _place_of_seal(data: bytes | bytearray) -> int | None:
    """Where the digits of the seal begin; None in a file without one."""
    found = _SEALED.match(data, max(0, data.rfind(SEAL + _TEXT)))
    return found and found.start(1)


def _is_whole(data: bytes) -> bool | None:
    """Whether the bytes of a file fit its seal; None for a file without one."""
    if (place := _place_of_seal(data)) is None:
        return None
    end = place + len(_ZEROS)
    seen = hashlib.sha256(memoryview(data)[:place])
    seen.update(_ZEROS)
    seen.update(memoryview(data)[end:])
    return seen.hexdigest().encode() == data[place:end]


def read_table(source: Path | BinaryIO, foreign: bool = False, without: Collection[str] = ()) -> pa.Table:
    """A table, `without` some of its columns, though all are verified. Raises `OSError` or `pa.ArrowException` for what is unreadable, too large, damaged, or edited since it was
    written. A sealed file is believed to be as small as this code writes it, unless `foreign`."""
    data = guarded.content(source, guarded.MOST_TABLE) if isinstance(source, Path) else source.read()
    sealed = _is_whole(data)
    if sealed is False:
        raise pa.ArrowInvalid(_OTHER)
    try:
        if sealed and not foreign:
            with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as file:  # all is in memory
                every = file.schema_arrow.names if without else None
                names = every and [name for name in every if name not in without]
                table = file.read(names, use_threads=len(data) > _SMALL)
                guarded.check_names(every or table.schema.names)
        else:
            table = unpacked(data, DIGEST)
            guarded.check_names(table.column_names)
        metadata = {SEAL: None, DIGEST: None} | (table.schema.metadata or {})
        _, known = metadata.pop(SEAL), metadata.pop(DIGEST)
        if not sealed and known is not None and known != digest(table).encode():
            raise pa.ArrowInvalid(_OTHER)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid("a text in it is none") from error
    absent = [name for name in without if name in table.column_names]  # where they had to be read
    return table.drop_columns(absent).replace_schema_metadata(metadata or None)


def sealed_metadata(path: Path, *names: bytes) -> list[bytes | None]:
    """The values of these entries of the metadata of a sealed file, found without decoding it; all None for a file that is absent, damaged,
    edited or not sealed."""
    try:
        data = guarded.content(path, guarded.MOST_TABLE)
    except OSError:
        return [None] * len(names)
    return [_entry(data, name) for name in names] if _is_whole(data) else [None] * len(names)


def _entry(data: bytes, name: bytes) -> bytes | None:
    """A value of the metadata, which follow the rows: name, the mark of a text, its length in groups of seven bits, and the text."""
    place = data.rfind(name + _TEXT)
    if place < 0:
        return None
    place += len(name) + len(_TEXT)
    length = shift = 0
    while True:
        byte = data[place]
        length, shift, place = length | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return data[place : place + length]


def outvoted(
    found: Mapping[Path, set[str | None]], today: Callable[[], str | None] = lambda: None
) -> tuple[int, list[Path]]:
    """How many versions of the code the files name, and which files to make again; none where they agree.

    Kept are those of today's code, or, where none is of today's, of the most frequent version.
    """
    counts = Counter(code for codes in found.values() for code in codes)
    if len(counts) < 2:
        return len(counts), []
    kept = wanted if (wanted := today()) in counts else counts.most_common(1)[0][0]
    return len(counts), sorted(path for path, codes in found.items() if codes != {kept})


def some(paths: Sequence[Path], shown: int = 5) -> str:
    """The first files by name, and how many there are."""
    return f"{', '.join(map(str, paths[:shown]))}{', …' * (len(paths) > shown)} ({len(paths)} files)"


MOST_DIGESTED = 2**24  # values of a table whose digest is computed: about 1 µs each
_MOST_ROWS, _MOST_BYTES = 1024, 2**22  # that are Python objects at a time: a number takes ten times as much


def unpacked(data: bytes, digest: bytes) -> pa.Table:
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


KEEP = "keep what a newer version of this package wrote, and update the package"


class Newer(UserError):
    """A file that a newer version wrote."""


def versions(table: pa.Table) -> set[int | None]:
    """The schema versions of a table's rows; None where it has no such column. (`column_names` would make all names, of each cell's file.)"""
    return {None} if (at := table.schema.get_field_index("schema_version")) < 0 else set(table.column(at).to_pylist())


def check_versions(path: Path, table: pa.Table, ours: int) -> None:
    """Raise `Newer` where a row has a higher schema version than this code writes."""
    if higher := [version for version in versions(table) if isinstance(version, int) and version > ours]:
        raise Newer(str(bad("schema_version", max(higher), f"{ours} or lower in {path}", KEEP)))
