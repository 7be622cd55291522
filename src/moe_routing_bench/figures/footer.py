"""Where the numbers of a figure come from, in a line: hardware, versions, days and counts."""

import pandas as pd

from moe_routing_bench.comparison import origins
from moe_routing_bench.figures.training_rows import NOT_CAUSAL
from moe_routing_bench.quantities import count
from moe_routing_bench.store.platforms import CPU

FOREIGN = "foreign"  # platform of rows of other benchmarks
RUNS = {"quality": "training runs", "perft": "adaptations"}  # what the rows of a table are, but for measurements


def line(source: str, rows: pd.DataFrame) -> str:
    """The line of a figure that is drawn from rows of a table: "measurements", "quality" or "perft"."""
    return runs(rows, RUNS[source]) if source in RUNS else measured(rows)


def is_foreign(rows: pd.DataFrame) -> bool:
    """Whether the rows are of another benchmark (`foreign.rows`), of which little is known."""
    return len(rows) > 0 and bool((rows["platform"] == FOREIGN).all())


def on_cpu(source: str, rows: pd.DataFrame) -> bool:
    """Whether the rows were measured on a CPU, whose times say little by themselves."""
    if rows.empty or (source not in RUNS and is_foreign(rows)):
        return False
    return bool((rows["platform"] == CPU).all()) if source in RUNS else origins.column(rows) == origins.CPU


def measured(rows: pd.DataFrame) -> str:
    """Hardware, torch, days and counts of the rows shown."""
    if rows.empty:
        return "no measured rows"
    column = origins.column(rows)
    if is_foreign(rows):
        return (
            f"{distinct(rows[column])} | rows of another benchmark | n = {count(len(rows), 'row')} | medians as given"
        )
    cells = len(rows[["bench", "cell"]].drop_duplicates())
    counts = f"n = {count(len(rows), 'row')} of {count(cells, 'cell')}, {rows['samples'].sum():,.0f} samples"
    clock = f"device time, {caches(rows)}" if column == origins.GPU else "wall time"
    return f"{distinct(rows[column])} | torch {distinct(rows['torch_version'])} | {days(rows['started_at'])} | {counts} | medians, {clock}"


def runs(rows: pd.DataFrame, what: str) -> str:
    """Hardware, torch, days and counts of the runs shown."""
    if rows.empty:
        return f"no {what}"
    machine, torch = distinct(rows["device"]), distinct(rows["torch_version"])
    seen = "" if rows["causal"].all() else f" | {NOT_CAUSAL} sees later tokens: not ranked with the others"
    drawn = "means over seeds, 95 % CI by Student's t"
    if rows["seed"].nunique() == 1:
        drawn = "one seed: no intervals over seeds, differences may be chance"
    return f"{machine} | torch {torch} | {days(rows['ended_at'])} | n = {rows['run'].nunique()} {what.split()[-1]} | {drawn}{seen}"


def caches(rows: pd.DataFrame) -> str:
    """The share of the rows of a GPU for which the L2 cache may have been warm: small inputs may stay in it, however many sets there are."""
    warm = float((rows["cold"] != True).mean())  # noqa: E712
    if warm in (0.0, 1.0):
        return "L2 may be warm" if warm else "cold L2"
    return f"cold L2 but for {min(0.99, max(0.01, warm)):.0%} of rows"


def days(times: pd.Series) -> str:
    """The first and last day of ISO times."""
    found = sorted({str(time)[:10] for time in times.dropna()}) or ["date unknown"]
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def distinct(values: pd.Series) -> str:
    """The different values, comma separated."""
    return ", ".join(dict.fromkeys(str(v) for v in values.dropna())) or "unknown"
