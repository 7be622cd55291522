"""Expert ids of one layer from the files of other programs, by the file's suffix. Nothing in a file is executed: pickles are refused."""

import os
import re
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.traces import csv_files, dumps, layout, series, tables
from moe_routing_bench.traces.asked import Asked, Recorded, Values
from moe_routing_kernels.errors import UserError, bad, pick

MOST_BYTES = 2**31  # of what is read as a whole, packed or not: a .npy is mapped, and only the layer is read


def read(path: Path, asked: Asked | None = None) -> Recorded:
    """Checked ids (T, k) of one layer, with the evidence that they are such.

    Raises `UserError` for files that are missing, too large, damaged, of another kind, that hold objects, or whose values
    are no routing or leave open what they mean.
    """
    asked = asked or Asked()
    suffix = pick("suffix of the input", path.suffix.lower(), _READERS, f"the input is {path}")
    reader, options = _READERS[suffix]
    for name, what in _OPTIONS.items():
        if getattr(asked, name) is not None and name not in options:
            raise bad(f"--{name}", getattr(asked, name), f"none: a {suffix} has no {what}")
    if asked.top_k is not None and asked.top_k < 1:
        raise bad("--top-k", asked.top_k, "1 or more")
    _check_file(path, suffix)
    try:
        values = reader(path, asked)
    except UserError:
        raise
    except Exception as error:  # whatever damaged bytes make numpy, zip, JSON or pickle raise
        raise bad("input", str(path), f"a whole {suffix} file without pickled objects", _why(error)) from error
    return layout.settled(values, path)


def _why(error: Exception) -> str:
    """The text of an error; for objects that torch or numpy refuse what they are, in place of advice to run them."""
    refused = re.search(r"(?:GLOBAL |<class ')([\w.]+)", str(error))
    if "Weights only load failed" in str(error):
        return (
            f"it holds {refused[1]}: save tensors, or arrays of numbers" if refused else "it is no file of torch.save"
        )
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8: save it as UTF-8"
    if re.search(r"allow_pickle|pickled|Python objects", str(error)):
        return "it holds pickled objects, which could run code: save arrays of numbers"
    return str(error)[:120]


def _check_file(path: Path, suffix: str) -> None:
    """Raise `UserError`, before anything is read, for what is no regular file or too large."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # among them a name that is too long, or holds a null
        raise bad("input", str(path), ", ".join(_READERS), "no such file") from None
    if not stat.S_ISREG(state.st_mode):
        raise bad("input", str(path), "a regular file", "no such file: it is a folder, a pipe or a device")
    if suffix != ".npy":
        check_size(state.st_size, path)


def check_size(size: int, path: Path) -> None:
    """Raise `UserError` for more bytes than are read as a whole."""
    if size > MOST_BYTES:
        raise bad("input", f"{size} bytes in {path}", f"at most {MOST_BYTES}", "a .npy may be larger")


def _numpy(path: Path, asked: Asked) -> Values:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):  # an archive of arrays under this name
        raise bad("input", str(path), "a single array", "an archive of arrays ends with .npz")
    return Values(array, asked)


def _archive(path: Path, asked: Asked) -> Values:
    _check_members(path)
    with np.load(path, allow_pickle=False) as archive:
        name = series.name_of(archive.files, asked.key, path)
        return Values(archive[name], asked.without("key"))


def _csv(path: Path, asked: Asked) -> Values:
    table, named = csv_files.table_of(path, asked.header)
    asked = asked.without("header")
    if named or asked.columns:
        return tables.values_of(table, asked, path)
    return Values(tables.stacked(table, table.column_names, path), asked)


def _parquet(path: Path, asked: Asked) -> Values:
    with pq.ParquetFile(path) as file:
        groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
        check_size(sum(group.total_byte_size for group in groups), path)
    return tables.values_of(read_table(path), asked, path)


def _torch(path: Path, asked: Asked) -> Values:
    import torch

    if zipfile.is_zipfile(path):
        _check_members(path)
    with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(_ARRAYS):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if dumps.is_sglang(content) and asked.key is None:
        return dumps.sglang(content, asked, path)
    return series.values_of(content, asked, path)


_KINDS = (
    "Bool",
    *(f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)),
    "Float16",
    "Float32",
    "Float64",
)
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_ARRAYS: list[Any] = [  # what a pickled array of numbers is made of: nothing of it runs code of the file
    _RECONSTRUCT,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # as numpy 1 names it
    np.ndarray,
    np.dtype,
    *(getattr(np.dtypes, f"{kind}DType") for kind in _KINDS),
]


def _check_members(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        check_size(sum(member.file_size for member in archive.infolist()), path)


_Reader = Callable[[Path, Asked], Values]
_READERS: dict[str, tuple[_Reader, tuple[str, ...]]] = {  # and which options speak of such a file
    ".npy": (_numpy, ("layer", "first")),
    ".npz": (_archive, ("key", "layer", "first")),
    ".csv": (_csv, ("columns", "header", "layer", "first")),
    ".parquet": (_parquet, ("key", "columns", "layer", "first")),
    ".pt": (_torch, ("key", "layer", "first")),
    ".pth": (_torch, ("key", "layer", "first")),
    ".json": (dumps.vllm, ("layer", "first")),
}
_OPTIONS = {"key": "names", "columns": "columns", "header": "line of names"}
