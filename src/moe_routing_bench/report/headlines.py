"""What a report says first: at most five sentences, one number with its interval, a small picture and the rows of each. Pure functions; no torch.

A rule stays silent where nothing is told apart. Rules that name the fastest implementation take sound rows alone. A drift of the ceilings
makes absolute times suspect, but no ratio of two times of one cell, which took turns.
"""

from collections.abc import Callable

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins, verdicts
from moe_routing_bench.comparison.ratios import drifted_alone
from moe_routing_bench.comparison.verdicts import FASTER, LEAST_TWINS, SAME, UNDECIDED
from moe_routing_bench.figures import row_groups
from moe_routing_bench.quality import compare
from moe_routing_bench.quantities import FLOOR_SAID, count, times, told_apart
from moe_routing_bench.report.costs import formats, skew
from moe_routing_bench.report.document import Dot, Sentence, made, pictured
from moe_routing_bench.report.row_data import row_id
from moe_routing_bench.report.trained_rules import NOT_JUDGED, left_over, quality
from moe_routing_bench.report.words import shape

MOST, ENOUGH = 5, 3  # sentences; below the second, more benches have a sentence of their fastest


def headlines(table: pd.DataFrame, trained: pd.DataFrame | None = None) -> list[Sentence]:
    """What the rules have to say of measurements and training runs, in the order of the report."""
    rows = sound(table)
    finals = None if trained is None else compare.finals(trained)
    told = verdicts.assumed(table)
    firm = sound(told, ratios=True)
    leads = [made(fastest, firm[firm["bench"] == bench], told) for bench in reversed(row_groups.benches(firm))]
    first, *more = [one for one in leads if one] or [None]
    found = [first, made(near_the_limit, rows), made(formats, table), made(skew, rows)]
    if finals is not None and len(finals):
        found += [made(quality, finals), made(left_over, finals)]
    found = [one for one in found if one is not None]
    said = sum(NOT_JUDGED not in one.text for one in found)
    return [*found[:1], *more[: max(0, ENOUGH - said)], *found[1:]][:MOST]


def unfound(table: pd.DataFrame) -> str:
    """Why no rule says anything of the rows, in a sentence that is true of them: without twins only large differences are judged, and none on a CPU."""
    ok = table[(table["status"] == "ok") & table["median_us"].notna()]
    judged, twins = int(ok["best_verdict"].notna().sum()), int(ok["twin_speedup"].notna().sum())
    if not judged:
        if len(ok) and not ok["best_speedup"].notna().any():
            return "no cell has times of two implementations to compare."
        entered = (
            "no implementation was entered twice"
            if not twins
            else f"{count(twins, 'implementation')} {'was' if twins == 1 else 'were'} entered twice, and {LEAST_TWINS} are needed"
        )
        if not verdicts.assumed(ok)["best_verdict"].notna().any():
            return f"{entered}, so that differences are not judged; the rows have their intervals."
        return f"{entered}, so that differences up to {FLOOR_SAID} are not judged, and no sound row is faster by more."
    faster = int((sound(table, ratios=True)["best_verdict"] == FASTER).sum())
    if not faster:
        return f"of {count(judged, 'row')} with a verdict, none that is sound (converged or told apart, and not suspect for more than a drift of the ceilings) is faster than the best other implementation."
    return f"no rule has something to say of these rows, {faster} of which {'is' if faster == 1 else 'are'} faster than the best other implementation."


def doubted(rows: pd.DataFrame) -> pd.Series:
    """Whether each row is suspect for more than a drift of the ceilings, so that ratios within its cell are in doubt as well."""
    names = ("suspect", "suspect_reason")
    pairs = zip(*(rows[name].tolist() for name in names), strict=True)
    found = [one[0] is True and not drifted_alone(dict(zip(names, one, strict=True))) for one in pairs]
    return pd.Series(found, rows.index, bool)


def sound(table: pd.DataFrame, ratios: bool = False) -> pd.DataFrame:
    """The rows with a time that are not suspect, and converged or have a verdict that tells them from the best other.

    Only cells whose fastest row qualifies; otherwise the winner is unknown. For `ratios` within cells, rows that are suspect as the ceilings
    drifted, and for nothing else, are sound.
    """
    columns = [
        "bench",
        "cell",
        "gpu_uuid",
        "host",
        "median_us",
        "best_verdict",
        "suspect",
        "suspect_reason",
        "converged",
    ]
    ok = table.loc[(table["status"] == "ok") & table["median_us"].notna(), columns]
    told = ok["best_verdict"].notna() & (ok["best_verdict"] != UNDECIDED)
    doubts = doubted(ok) if ratios else ok["suspect"].fillna(False) == True  # noqa: E712
    firm = ~doubts & ((ok["converged"] != False) | told)  # noqa: E712
    cells = ok.groupby(["bench", "cell", row_groups.card(ok)], sort=False).ngroup()
    by_time = cells[ok.sort_values("median_us").index]
    quickest = by_time[~by_time.duplicated() & (by_time >= 0)]
    return table.loc[ok.index[firm & cells.isin(quickest[firm[quickest.index]])]]


def _widest(rows: pd.DataFrame, having: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """What `having` keeps of the last bench of the table of benches, of which it keeps anything: composites come last."""
    for bench in reversed(row_groups.benches(rows)):
        kept = having(rows[rows["bench"] == bench])
        if len(kept):
            return kept
    return rows.iloc[:0]


def _lead(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the implementation that is told faster than the best other in most cells."""
    names = rows.loc[rows["best_verdict"] == FASTER, "implementation"]
    return rows[rows["implementation"] == names.value_counts().index[0]] if len(names) else rows.iloc[:0]


def _middle(rows: pd.DataFrame, column: str) -> pd.Series:
    """The row in the middle by a column; of an even number the lower one."""
    return rows.sort_values(column).iloc[(len(rows) - 1) // 2]


def _of_middle(rows: pd.DataFrame) -> str:
    """What the row of `_middle` is: a median only among an odd number."""
    return "the median one" if len(rows) % 2 else "the lower of the two middle ones"


def fastest(rows: pd.DataFrame, table: pd.DataFrame) -> Sentence | None:
    """In how many cells of the widest bench one implementation is told faster than the best other, and by how much in the middle one.

    From sound rows, but counted over all cells of the table: a time that did not converge is sound only where a verdict tells it apart.
    """
    mine = _widest(rows, _lead)
    if mine.empty:
        return None
    wins = mine[mine["best_verdict"] == FASTER]
    one, bench, name = _middle(wins, "best_speedup"), wins["bench"].iloc[0], wins["implementation"].iloc[0]
    if one[["best_speedup_ci_low", "best_speedup_ci_high"]].isna().any():
        return None
    judged = table[(table["bench"] == bench) & (table["status"] == "ok") & table["best_verdict"].notna()]
    quickest = judged.sort_values("median_us").groupby(["cell", row_groups.card(judged)], sort=False).head(1)
    suspect = int(doubted(quickest).sum())
    known = not one.get("assumed", False)
    noise = "beyond noise" if known else f"by more than {FLOOR_SAID}"
    more = f" ({suspect} more {'is' if suspect == 1 else 'are'} suspect)" if suspect else ""
    ratio = times(one["best_speedup"], one["best_speedup_ci_low"], one["best_speedup_ci_high"])
    where = f"in {_of_middle(wins)} of these" if len(wins) > 1 else "there"
    text = f"{bench}: {name} is faster than the best other implementation, {noise}, in {len(wins)} of {count(len(quickest) - suspect, 'cell')}{more}; {where} it is {ratio} as fast as {one['best_other']}{_own(one, judged)}, at {shape(one)}."
    if not known:
        text += f" Too few implementations were entered twice, so that differences up to {FLOOR_SAID} are not judged."
    its = judged[(judged["implementation"] == name) & ~doubted(judged)]
    its = its.sort_values("best_speedup", ascending=False)
    edges = its[["best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"]].itertuples(index=False)
    dots = [
        Dot(label, *edge, place == one.name, told in (SAME, UNDECIDED))
        for place, told, edge, label in zip(its.index, its["best_verdict"], edges, row_groups.labels(its), strict=True)
    ]
    return Sentence(
        text,
        f"rows?filter=bench%3D{bench}+implementation%3D{name}{f'+best_verdict%3D{FASTER}' * known}&sort=best_speedup",
        pictured(dots, "times as fast as the best other", "x", 1.0),
    )


def _own(row: pd.Series, rows: pd.DataFrame) -> str:
    """Where the best other of a row is one of our kernels: that it is, and how long the fastest rival of the cell takes."""
    bench, ours = row["bench"], origins.ours(row["bench"]) if row["bench"] in BENCHES else frozenset()
    if row["best_other"] not in ours or row["implementation"] not in ours:
        return ""
    cards = row_groups.card(rows)
    cell = rows[(rows["bench"] == bench) & (rows["cell"] == row["cell"]) & (cards == cards[row.name])]
    rivals = cell[~cell["implementation"].isin(ours)]
    if rivals.empty:
        return " (ours, too)"
    rival = rivals.loc[rivals["median_us"].idxmin()]
    return f" (ours, too; {rival['implementation']}, the fastest rival there, takes {rival['median_us'] / row['median_us']:.2f}x as long)"


def near_the_limit(rows: pd.DataFrame) -> Sentence | None:
    """How near the implementation of `fastest` comes to the roofline, in the middle one of its cells; on a GPU, where a share above 1 is
    no share."""
    mine = _widest(rows, _lead)
    mine = mine[mine["gpu_uuid"].notna() & (mine["converged"] != False) & (mine["share_of_roofline"] <= 1)]  # noqa: E712
    if mine.empty:
        return None
    one, bench, name = _middle(mine, "share_of_roofline"), mine["bench"].iloc[0], mine["implementation"].iloc[0]
    share, low, high = _of_roofline(one)
    where = f"{_of_middle(mine)} of {len(mine)} converged cells" if len(mine) > 1 else "its one converged cell"
    text = f"{bench}: {name} reaches {_apart(share, low, high)} of the roofline in {where}, at {shape(one)}."
    rows = mine.sort_values("share_of_roofline", ascending=False)
    dots = [
        Dot(label, *_of_roofline(row), chosen=row.name == one.name)
        for (_, row), label in zip(rows.iterrows(), row_groups.labels(rows), strict=True)
    ]
    return Sentence(text, f"row-{row_id(one.to_dict())}", pictured(dots, "share of the roofline", "%", 1.0))


def _of_roofline(row: pd.Series) -> tuple[float, float, float]:
    """The share that a row reaches, with the interval of its time."""
    share = row["share_of_roofline"]
    return share, share * row["median_us"] / row["ci_high_us"], share * row["median_us"] / row["ci_low_us"]


def _apart(share: float, low: float, high: float) -> str:
    """A share with its interval, in percent."""
    one, least, most = told_apart(100 * share, 100 * low, 100 * high)
    return f"{one}% [{least}%, {most}%]"
