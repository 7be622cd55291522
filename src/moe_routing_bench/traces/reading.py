"""Expert ids of one layer from the files of other programs, by the file's suffix. Nothing in a file is executed: pickles are refused."""

import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from moe_routing_bench.errors import UserError, bad, pick
from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.traces import dumps
from moe_routing_bench.traces.checks import one_layer
from moe_routing_bench.traces.writing import COLUMN

MOST_BYTES = 2**31  # of what is read as a whole: a .npy is mapped, and only the layer is read


def read(path: Path, key: str | None = None, layer: int | None = None, first: str | None = None) -> NDArray[Any]:
    """Unchecked ids (T, k) of one layer. `key` names an array of the file, `layer` and `first` are those of `one_layer`.

    Raises `UserError` for files that are missing, too large, damaged, of another kind, or that hold objects.
    """
    suffix = pick("suffix of the input", path.suffix.lower(), _READERS, f"the input is {path}")
    reader, named = _READERS[suffix]
    if key is not None and not named:
        raise bad("--key", key, f"none: a {suffix} has no names")
    if not os.path.isfile(path):  # false as well for a name that is too long
        raise bad("input", str(path), ", ".join(_READERS), "no such file")
    if suffix != ".npy":
        _check_size(path.stat().st_size, path)
    try:
        found = reader(path, key, layer, first)
    except UserError:
        raise
    except Exception as error:  # whatever damaged bytes make numpy, zip, JSON or pickle raise
        raise bad("input", str(path), f"a whole {suffix} file without pickled objects", str(error)[:120]) from error
    return found


def _check_size(size: int, path: Path) -> None:
    if size > MOST_BYTES:
        raise bad("input", f"{size} bytes in {path}", f"at most {MOST_BYTES}", "a .npy may be larger")


def _numpy(path: Path, key: str | None, layer: int | None, first: str | None) -> NDArray[Any]:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(found, np.lib.npyio.NpzFile):
        with found as archive:
            name = dumps.name_of(archive.files, key, path)
            members = {member.removesuffix(".npy"): member for member in archive.zip.namelist()}  # type: ignore
            _check_size(archive.zip.getinfo(members[name]).file_size, path)  # type: ignore
            return np.asarray(one_layer(archive[name], layer, first, path))
    return one_layer(found, layer, first, path)


def _csv(path: Path, key: str | None, layer: int | None, first: str | None) -> NDArray[Any]:
    """One token per line, k ids each, after at most one line of names."""
    with path.open(encoding="utf-8") as file:
        names = not any(_is_number(one) for one in file.readline().split(","))
    table = pyarrow.csv.read_csv(path, pyarrow.csv.ReadOptions(autogenerate_column_names=not names))
    for number, column in enumerate(table.columns, 1):
        if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            allowed = "k whole numbers per line, with commas between them"
            raise bad("ids", f"{column.type} with {column.null_count} empty in column {number} of {path}", allowed)
    columns = [column.to_numpy() for column in table.columns]
    return np.asarray(one_layer(np.stack(columns, axis=1), layer, first, path))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path, key: str | None, layer: int | None, first: str | None) -> NDArray[Any]:
    table = read_table(path)
    rows = table[pick("--key", key or COLUMN, table.column_names, f"the columns of {path}")].combine_chunks()
    kind = rows.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise bad("column", f"{kind} in {path}", "lists of integers")
    lengths, ids = set(rows.value_lengths().to_pylist()), rows.flatten()
    if len(lengths) > 1 or rows.null_count or ids.null_count:
        raise bad("ids", f"rows of other lengths or without a value in {path}", "k whole numbers in every row")
    shape = len(rows), next(iter(lengths), 0)
    return one_layer(ids.to_numpy(zero_copy_only=False).reshape(shape), layer, first, path)


def _torch(path: Path, key: str | None, layer: int | None, first: str | None) -> NDArray[Any]:
    import torch

    with warnings.catch_warnings(action="ignore"):  # of what is refused anyway
        found = torch.load(path, map_location="cpu", weights_only=True)
    if dumps.is_sglang(found) and key is None:
        return dumps.sglang(found, layer, first, path)
    if isinstance(found, Mapping):
        by_name = {str(name): value for name, value in found.items()}
        found = by_name[dumps.name_of(list(by_name), key, path)]
    elif key is not None:
        raise bad("--key", key, f"none: {path} has no names")
    if isinstance(found, (list, tuple)):
        found = dumps.of_layers(found, layer, first, path)
        layer = None
    return dumps.array(one_layer(dumps.tensor(found, path), layer, first, path))


def _json(path: Path, key: str | None, layer: int | None, first: str | None) -> NDArray[Any]:
    arrays = [np.load(io.BytesIO(one), allow_pickle=False) for one in dumps.vllm(path.read_bytes(), first, path)]
    return np.concatenate([one_layer(one, layer, "tokens", path) for one in arrays])


_Reader = Callable[[Path, str | None, int | None, str | None], NDArray[Any]]
_READERS: dict[str, tuple[_Reader, bool]] = {  # and whether the arrays in such a file have names
    ".npy": (_numpy, False),
    ".npz": (_numpy, True),
    ".csv": (_csv, False),
    ".parquet": (_parquet, True),
    ".pt": (_torch, True),
    ".pth": (_torch, True),
    ".json": (_json, False),
}
