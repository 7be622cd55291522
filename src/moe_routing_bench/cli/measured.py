"""How the rows of cells that were measured by hand are printed: as a table for people, as JSON or as CSV."""

import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from moe_routing_bench.grid.cell import Cell

Rows = Sequence[dict[str, Any]]


def results(cell: Cell, rows: Rows) -> Table:
    """The rows of a cell, with the columns that are read first."""
    table = Table(
        "implementation", "status", "median us", "95 % CI us", "GB/s", "speed-up", "reason",
        title=f"{cell.bench} {cell.key}", title_justify="left", box=None,
    )  # fmt: skip
    for row in rows:
        interval = "" if row.get("ci_low_us") is None else f"{row['ci_low_us']:.2f} to {row['ci_high_us']:.2f}"
        numbers = [_number(row.get(name)) for name in ("median_us", "gb_per_s", "speedup")]
        table.add_row(row["implementation"], row["status"], numbers[0], interval, *numbers[1:], row.get("reason") or "")
    return table


def write_json(rows: Rows) -> None:
    """One JSON list of all rows, with all their columns, on stdout."""
    json.dump(rows, sys.stdout, indent=1)
    print()


def write_csv(rows: Rows) -> None:
    """All rows with all their columns as CSV on stdout, lists as JSON texts; a column that a row lacks is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()})


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
