"""What to be careful of in the rows of a run: noise, cautions, and rows without a time. Pure functions; no torch."""

import pandas as pd

from moe_routing_bench.comparison import verdicts
from moe_routing_bench.quantities import count


def noise(ok: pd.DataFrame) -> str:
    """How far apart equals came out, and how many of them the rule for verdicts would tell apart."""
    known = verdicts.twins(ok)
    if known.empty:
        return "Noise: not measured, so this run has no verdicts: no implementation was entered twice (`twins`)."
    parts = [
        f"{group['gap'].median():.2%} for {bench} (at most {group['gap'].max():.1%}, {count(len(group), 'twin')})"
        for bench, group in known.groupby("bench", sort=False)
    ]
    wrong, judged = verdicts.false_verdicts(ok)
    told = f"; of {judged}, each held against the floor of the others, the verdict would tell {wrong} apart"
    return f"Noise: an implementation that was entered twice in a cell differs from itself by a median of {', '.join(parts)}{told * bool(judged)}."


def cautions(ok: pd.DataFrame) -> str:
    """How many measured rows carry a caution."""
    suspect, open_ended = int((ok["suspect"] == True).sum()), int((ok["converged"] == False).sum())  # noqa: E712
    return f"Cautions: of {len(ok)} measured rows, {suspect} are suspect (such as a drift of the ceilings) and {open_ended} reached a limit before their interval was as narrow as asked; the table marks both."


def not_ok(table: pd.DataFrame) -> str:
    """How many rows have no time, by status."""
    bad = table[table["status"] != "ok"]
    counts = ", ".join(f"{n} {status}" for status, n in bad["status"].value_counts().items())
    return f"{len(bad)} of {len(table)} rows are not ok" + (
        f" ({counts}); each is listed below with its reason." if counts else "."
    )
