"""Expert ids of one layer from the files of other programs, by the file's suffix."""

import csv
import io
import re
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pyarrow.csv import ReadOptions

from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.traces import Options, Recorded, Values, dumps, layout, series, tables
from moe_routing_bench.traces.writing import MOST_IDS
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import UserError, bad, pick


def table_of(path: Path, header: bool | None) -> tuple[pa.Table, bool]:
    """The columns of a file, and whether its first line names them; otherwise their names are 1, 2, ...

    Raises `UserError` where the first line may be names or numbers and `header` does not say which.
    """
    content = guarded.csv_of(path, MOST_CSV, MOST_IDS)
    skipped, cells = _first_line(content, path)
    named = _has_names(cells, path) if header is None else header
    names = [cell.strip() for cell in cells] if named else [str(number + 1) for number in range(len(cells))]
    options = ReadOptions(skip_rows=skipped + named, column_names=names)
    return pyarrow.csv.read_csv(content, options), named


def _first_line(content: BinaryIO, path: Path) -> tuple[int, list[str]]:
    """The number of empty lines at the beginning, and the cells of the first other line."""
    lines = io.TextIOWrapper(content, encoding="utf-8-sig")
    for number, line in enumerate(lines):
        if line.strip():
            lines.detach().seek(0)
            return number, next(csv.reader([line]))
    raise bad("input", str(path), "a line per token", "Empty CSV file")


def _has_names(cells: list[str], path: Path) -> bool:
    """Whether the first line holds names. Numbers that count from 0 or 1 are names in some files and ids in others."""
    if len(cells) == 1 and len(parts := re.split(r"[;\t ]+", cells[0].strip())) > 1:
        raise bad(
            "first line", f"{','.join(parts[:8])}, parted by other signs, in {path}", "values with commas between them"
        )
    numbers = [_number(cell) for cell in cells]
    if numbers[0] is None and not cells[0].strip() and len(cells) > 1:
        return True  # the nameless column of row numbers that pandas writes
    if None in numbers:
        return all(number is None for number in numbers) or _mixed(cells, path)
    if numbers in (list(range(len(cells))), list(range(1, len(cells) + 1))):
        allowed = "--header where it names columns, --no-header where it holds ids"
        raise bad(
            "first line", f"{','.join(cells[:8])} in {path}", allowed, "pandas numbers columns without names like this"
        )
    return False


def _mixed(cells: list[str], path: Path) -> bool:
    allowed = "names or numbers throughout, or --header, or --no-header"
    raise bad("first line", f"{','.join(cells[:8])} in {path}", allowed)


def _number(cell: str) -> float | None:
    text = cell.strip()
    try:
        return float(int(text, 16)) if text[:2].lower() == "0x" else float(text)
    except ValueError:
        return None


MOST_BYTES = (
    guarded.MOST_TABLE
)  # of what is read as a whole, packed or not: a .npy is mapped, and only the layer is read
MOST_CSV = 2**27  # of short numbers alone


def read(path: Path, options: Options | None = None) -> Recorded:
    """Checked ids (T, k) of one layer, with the evidence that they are such.

    Raises `UserError` for files that are missing, too large, damaged, of another kind, that hold objects, or whose values
    are no routing or leave open what they mean.
    """
    options = options or Options()
    suffix = pick("suffix of the input", path.suffix.lower(), _READERS, f"the input is {path}")
    reader, known = _READERS[suffix]
    for name, what in _OPTIONS.items():
        if getattr(options, name) is not None and name not in known:
            raise bad(f"--{name}", getattr(options, name), f"none: a {suffix} has no {what}")
    if options.top_k is not None and options.top_k < 1:
        raise bad("--top-k", options.top_k, "1 or more")
    _check_file(path, suffix)
    try:
        values = reader(path, options)
    except UserError:
        raise
    except guarded.Refused as error:
        raise _refused(path, error) from None
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
    most = {".npy": sys.maxsize, ".csv": min(MOST_CSV, MOST_BYTES)}.get(suffix, MOST_BYTES)
    try:
        guarded.check(path, most)
    except guarded.Refused as error:
        raise _refused(path, error) from None
    except OSError:  # among them a name that is too long
        raise bad("input", str(path), ", ".join(_READERS), "no such file") from None


def _refused(path: Path, error: OSError) -> UserError:
    larger = "; a .npy may be larger" * (" bytes" in str(error) and " at most " in str(error))
    return bad("input", str(path), "a regular file within the limits", f"{error.strerror}{larger}")


def _numpy(path: Path, options: Options) -> Values:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):  # an archive of arrays under this name
        raise bad("input", str(path), "a single array", "an archive of arrays ends with .npz")
    return Values(array, options)


def _archive(path: Path, options: Options) -> Values:
    with np.load(path, allow_pickle=False) as archive:
        name = series.name_of(archive.files, options.key, path)
        guarded.check_archive(path, MOST_BYTES, name if name in archive.zip.namelist() else f"{name}.npy")
        return Values(archive[name], options.without("key"))


def _csv(path: Path, options: Options) -> Values:
    table, named = table_of(path, options.header)
    options = options.without("header")
    if named or options.columns:
        return tables.values_of(table, options, path)
    return Values(tables.stacked(table, table.column_names, path), options)


def _parquet(path: Path, options: Options) -> Values:
    return tables.values_of(read_table(path, foreign=True), options, path)


def _torch(path: Path, options: Options) -> Values:
    import torch

    if zipfile.is_zipfile(path):
        guarded.check_archive(path, MOST_BYTES)
    with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(_ARRAYS):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if dumps.is_sglang(content) and options.key is None:
        return dumps.sglang(content, options, path)
    return series.values_of(content, options, path)


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


_Reader = Callable[[Path, Options], Values]
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
