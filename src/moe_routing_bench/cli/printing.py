"""What commands print: tables, counts and durations, measured rows as a table, as JSON or as CSV, and how long a cell has taken so far."""

import contextlib
import csv
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table

from moe_routing_bench import streams
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.quantities import count, counts


class _Console(Console):
    """A console that writes no control characters but its own, and raises BrokenPipeError, where rich would end the process."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """What is drawn, as texts with their styles."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=streams.plain(segment.text))

    def on_broken_pipe(self) -> None:
        """Go on with the error that rich is handling."""
        raise


def show(*tables: Table) -> None:
    """Print tables, unwrapped where the output is no terminal so that a line stays a line."""
    width = None if sys.stdout.isatty() else 240
    console = _Console(file=_styled(sys.stdout), width=width, highlight=False, markup=False)
    for table in tables:
        console.print(table)


def progress_console() -> Console:
    """A console on stderr, for `rich.progress.track`."""
    return _Console(file=_styled(sys.stderr), markup=False)


def _styled(stream: Any) -> Any:
    return streams.Styled(stream)


def plain(path: Path) -> str:
    """A path as an argument of a command, which is no option even where it begins with a dash."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def quoted(path: Path) -> str:
    """A path as a word of a command line for a shell."""
    return shlex.quote(plain(path))


def places(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where rows were measured: how many cards, nodes and SLURM jobs, each with some names; what no row says is left out."""
    cards = {row["gpu_uuid"]: row["gpu_name"] for row in rows if row.get("gpu_uuid")}
    parts = [counts(list(cards.values()))] if cards else []
    for what, column in (("node", "host"), ("SLURM job", "slurm_job_id")):
        if names := sorted({row[column] for row in rows if row[column]}):
            shown = ", ".join(names[:4]) + ", …" * (len(names) > 4)
            parts.append(f"{count(len(names), what)} ({shown})")
    return "; ".join(parts) or "machines that no row names"


def duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.0f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )


Rows = Sequence[dict[str, Any]]


def results(cell: Cell, rows: Rows) -> Table:
    """The rows of a cell, with the columns that are read first, and its loads."""
    table = Table(
        "implementation",
        "status",
        "median us",
        "95 % CI us",
        "GB/s",
        "of limit",
        "speed-up",
        "remarks",
        title=f"{cell.bench} {cell.key}",
        title_justify="left",
        box=None,
        caption=_loads(rows),
        caption_justify="left",
    )
    for row in rows:
        interval = "" if row.get("ci_low_us") is None else f"{row['ci_low_us']:.2f} to {row['ci_high_us']:.2f}"
        median, bandwidth, speedup = (_number(row.get(name)) for name in ("median_us", "gb_per_s", "speedup"))
        limit = row.get("share_of_roofline")
        share = "" if limit is None else f"{limit:.0%}".replace("%", " %")
        table.add_row(row["implementation"], row["status"], median, interval, bandwidth, share, speedup, _remarks(row))
    return table


def _remarks(row: Mapping[str, Any]) -> str:
    """Why there is no time, or what speaks against it."""
    if row["status"] != "ok":
        return row.get("reason") or ""
    suspect = [f"suspect: {row['suspect_reason']}"] if row.get("suspect") else []
    warm = row.get("cold") is False and row.get("timer") != "wall"  # a CPU's caches are never emptied
    wide = ["interval still wide"] if row.get("converged") is False else []
    return "; ".join([*suspect, *wide, *(["L2 may be warm"] if warm else [])])


def _loads(rows: Rows) -> str | None:
    """How unevenly experts are chosen in a cell, and what is dropped, as the first of its rows that knows says."""
    row = next((row for row in rows if row.get("load_cv") is not None), None)
    if row is None:
        return None
    text = f"loads: CV {row['load_cv']:.2f}, busiest expert {row['load_max_over_mean']:.2f}x the mean, {row['dead_experts']} without a token"
    limited = row.get("capacity_factor") is not None
    return f"{text}; {100 * row['drop_rate']:.1f} % of the assignments dropped" if limited else text


def write_json(rows: Rows) -> None:
    """One JSON list of all rows, with all their columns, on stdout."""
    json.dump(rows, sys.stdout, indent=1)
    print()


def write_csv(rows: Rows) -> None:
    """All rows with all their columns as CSV on stdout, lists as JSON texts; a column that a row lacks is empty. Nothing for no rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()})


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


EVERY = 15.0  # seconds between two lines where stderr is no terminal
_STDERR = 2


@contextlib.contextmanager
def waited(expected: float | None) -> Iterator[None]:
    """Say on stderr how long this has taken: on a terminal in one line that changes, elsewhere in a line now and then.

    `expected` is how many seconds this and all that follows may take, where that is known.
    """
    terminal, began, over = os.isatty(_STDERR), time.monotonic(), threading.Event()
    form = "\r\033[K{}" if terminal else "{}\n"

    def tell() -> None:
        while not over.wait(1.0 if terminal else EVERY):
            taken = time.monotonic() - began
            rest = "" if expected is None else f", about {duration(max(0.0, expected - taken))} remain"
            _write(form.format(f"{taken:4.0f} s{rest}"))
        if terminal:
            _write(form.format(""))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _write(text: str) -> None:
    """Past the lock of `sys.stderr`, which a worker that is forked meanwhile would find taken."""
    with contextlib.suppress(OSError):  # nothing takes it
        os.write(_STDERR, text.encode())
