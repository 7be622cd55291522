"""What commands print: tables, counts and durations."""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_routing_bench.quantities import count


class _Console(Console):
    """A console that raises BrokenPipeError, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Go on with the error that rich is handling."""
        raise


def show(*tables: Table) -> None:
    """Print tables, unwrapped where the output is no terminal so that a line stays a line."""
    console = _Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False)
    for table in tables:
        console.print(table)


def plain(path: Path) -> str:
    """A path as an argument of a command, which is no option even where it begins with a dash."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def quoted(path: Path) -> str:
    """A path as a word of a command line for a shell."""
    return shlex.quote(plain(path))


def counts(names: list[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common()) or "none"


def places(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where rows were measured: how many cards, nodes and SLURM jobs, each with some names; what no row says is left out."""
    cards = {row["gpu_uuid"]: row["gpu_name"] for row in rows if row.get("gpu_uuid")}
    found = [counts(list(cards.values()))] if cards else []
    for what, column in (("node", "host"), ("SLURM job", "slurm_job_id")):
        if names := sorted({row[column] for row in rows if row[column]}):
            shown = ", ".join(names[:4]) + ", …" * (len(names) > 4)
            found.append(f"{count(len(names), what)} ({shown})")
    return "; ".join(found) or "machines that no row names"


def duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.0f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )
