"""What `auto` chooses for the layers among the rows of a report, by the table that ships, and what that costs there."""

import pandas as pd

from moe_routing_bench.comparison import regret
from moe_routing_bench.comparison.choices import AUTO, BENCH, entries
from moe_routing_bench.figures import grouping
from moe_routing_bench.quantities import count, us
from moe_routing_bench.report.sections import Choice, Choices, Regret
from moe_routing_kernels.choices import table


def choices(rows: pd.DataFrame) -> Choices | None:
    """What the section on choices shows: a line per cell, and mean and worst of both kinds; None without a layer to choose for.

    Raises `UserError` for a table that cannot be read.
    """
    shipped = table.load()
    lines = regret.lines(entries(rows, ""), shipped)
    if not lines:
        return None
    ran = rows[(rows["bench"] == BENCH) & (rows["implementation"] == AUTO) & (rows["status"] == "ok")]
    measured = ran.groupby("cell")["median_us"].first()
    layers = rows[rows["bench"] == BENCH]
    names = dict(
        zip(layers["cell"], grouping.labels(layers), strict=True)
    )  # an entry has no skew, which its cell may have
    return Choices(
        cells=len(shipped),
        lines=[_shown(line, names[line.entry.cell], measured) for line in lines],
        summaries=[_summary(one) for one in regret.summaries(lines)],
        always=[_summary(one) for one in regret.always(lines)[:1]],
        bar=f"mean {regret.MEAN_BAR:.0%}, worst {regret.WORST_BAR:.0%}",
    )


def _shown(line: regret.Line, name: str, measured: pd.Series) -> Choice:
    """A line of the table; `auto` is the regret of its own row, where it was measured."""
    times, entry = line.entry.times, line.entry
    doubts = dict.fromkeys(entry.suspect.values())
    return Choice(
        cell=name,
        key=entry.cell,
        best_own=f"{line.best_own}, {us(times[line.best_own])}",
        best=f"{line.best}, {us(times[line.best])}",
        choices=[(one.name, f"{one.own:.1%}", f"{one.all:.1%}") for one in line.choices],
        auto=f"{measured[entry.cell] / times[line.best_own] - 1:.1%}" if entry.cell in measured else "–",
        notes="; ".join([*line.unmeasured, *(f"suspect: {why}" for why in doubts)]),
    )


def _summary(one: regret.Summary) -> Regret:
    return Regret(what=one.what, cells=count(one.cells, "cell"), mean=f"{one.mean:.1%}", worst=f"{one.worst:.1%}", met=one.met)  # fmt: skip
