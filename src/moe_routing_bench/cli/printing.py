"""What commands print: tables, counts and durations."""

import sys
from collections import Counter

from rich.console import Console
from rich.table import Table


def show(*tables: Table) -> None:
    """Print tables, unwrapped where the output is no terminal so that a line stays a line."""
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False)
    for table in tables:
        console.print(table)


def counts(names: list[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common()) or "none"


def duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.0f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )
