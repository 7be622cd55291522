"""Tables in text with commas: where the names end and the numbers begin."""

import csv
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
from pyarrow.csv import ReadOptions

from moe_routing_kernels.errors import bad


def table_of(path: Path, header: bool | None) -> tuple[pa.Table, bool]:
    """The columns of a file, and whether its first line names them; otherwise their names are 1, 2, ...

    Raises `UserError` where the first line may be names or numbers and `header` does not say which.
    """
    skipped, cells = _first_line(path)
    named = _names(cells, path) if header is None else header
    names = [cell.strip() for cell in cells] if named else [str(number + 1) for number in range(len(cells))]
    options = ReadOptions(skip_rows=skipped + named, column_names=names)
    return pyarrow.csv.read_csv(path, options), named


def _first_line(path: Path) -> tuple[int, list[str]]:
    """The number of empty lines at the beginning, and the cells of the first other line."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file):
            if line.strip():
                return number, next(csv.reader([line]))
    raise bad("input", str(path), "a line per token", "Empty CSV file")


def _names(cells: list[str], path: Path) -> bool:
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
