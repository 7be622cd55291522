"""Sentences computed from the rows, and what to be careful of in them: nothing is claimed that the rows do not show. Pure functions; no torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd

from moe_routing_bench.comparison import verdicts
from moe_routing_bench.figures import row_groups
from moe_routing_bench.figures.imbalance import WITHOUT_EFFECT, routings
from moe_routing_bench.figures.row_groups import stages
from moe_routing_bench.quantities import count
from moe_routing_bench.report.costs import cost_of_capacity, cost_of_skew
from moe_routing_bench.report.document import Sentence, made
from moe_routing_bench.report.headlines import sound
from moe_routing_bench.statistics import gmean

_ABSENT, _DOUBTFUL = ": not measured.", "suspect, or did not converge and has no verdict"
_IN_DOUBT = "suspect for more than a drift of the ceilings, or did not converge and has no verdict"


def findings(table: pd.DataFrame) -> list[Sentence]:
    """All findings, in the order of the report; of the benches that were asked for."""
    ok = table[(table["status"] == "ok") & table["median_us"].notna()]
    asked = row_groups.benches(table)
    firm, compared = sound(table), sound(table, ratios=True)
    found = [one for bench in asked for one in (*_of_bench(ok, compared, bench), made(copy_share, firm, bench))]
    found += [_said(partial(stage_shares, bench=bench), ok, firm) for bench in row_groups.COMPOSITES if bench in asked]
    skew, capacity = (_said(cost, ok, firm) for cost in (cost_of_skew, cost_of_capacity))
    rest = [made(drops, ok), capacity, made(noise, ok), made(cautions, ok), made(not_ok, table)]
    return [one for one in (*found, skew, *rest) if one]


def _said(say: Callable[[pd.DataFrame], str], ok: pd.DataFrame, firm: pd.DataFrame) -> Sentence | None:
    """What sound rows say; where others alone would say something, that it was measured and is not said."""
    found = made(say, firm)
    if found is None or not found.text.endswith(_ABSENT) or say(ok).endswith(_ABSENT):
        return found
    text = f"{found.text.removesuffix(_ABSENT)}: nothing is said, because what was measured is {_DOUBTFUL}."
    return replace(found, text=text)


def _of_bench(ok: pd.DataFrame, firm: pd.DataFrame, bench: str) -> list[Sentence | None]:
    """Who is the fastest, from sound rows; where a bench has none but others, that nothing is said; and how many cells are left out."""
    if bench not in set(firm["bench"]) and bench in set(ok["bench"]):
        return [made(only_doubtful, ok, bench)]
    own = firm[firm["bench"] == bench]
    bases = own["baseline"].dropna().unique()  # cells with quantised weights have another
    said = [made(fastest, own[own["baseline"] == base], bench) for base in bases] or [made(fastest, own, bench)]
    return [*said, made(left_out, ok, own, bench)]


def only_doubtful(ok: pd.DataFrame, bench: str) -> str:
    """That a bench has no sound row."""
    rows = int((ok["bench"] == bench).sum())
    return f"{bench}: nothing is said of {count(rows, 'row')}: the quickest of each cell is {_IN_DOUBT}."


def left_out(ok: pd.DataFrame, own: pd.DataFrame, bench: str) -> str:
    """How many cells of a bench have no sound row among `own`; empty where all have one."""
    of, kept = _cells(ok[ok["bench"] == bench]), _cells(own)
    if kept >= of:
        return ""
    return f"{bench}: {of - kept} of {count(of, 'cell')} {'is' if of - kept == 1 else 'are'} left out here: the quickest of each is {_IN_DOUBT}."


def _cells(rows: pd.DataFrame) -> int:
    """How many cells there are, each on its card."""
    return rows.groupby(["cell", row_groups.card(rows)]).ngroups if len(rows) else 0


def fastest(ok: pd.DataFrame, bench: str) -> str:
    """The implementation with the largest geometric-mean speed-up, and in how many cells its interval excludes 1.

    Candidates ran in at least half of the cells of the one that ran in most; they are ranked on their common cells.
    """
    rows = ok[(ok["bench"] == bench) & (ok["speedup"] > 0)]
    others = rows[rows["implementation"] != rows["baseline"]]
    if rows.empty:
        return f"{bench}: not measured."
    base = str(rows["baseline"].iloc[0])  # of the rows: older ones may have another than the bench has now
    if others.empty:
        return (
            f"{bench}: only the baseline {base} ran ({count(rows['cell'].nunique(), 'cell')}); speed-ups: not measured."
        )
    counts = others.groupby("implementation")["cell"].nunique()
    wide = others[others["implementation"].isin(counts.index[counts >= counts.max() / 2])]
    speedups = wide.pivot_table(index="cell", columns="implementation", values="speedup")
    common = speedups.dropna()
    best = str((speedups if common.empty else common).apply(lambda column: gmean(column.dropna())).idxmax())
    mine = wide[wide["implementation"] == best]
    return f"{bench}: {_against_best(mine, rows)}{_verdict(mine, best, base)}.{_rest(others, mine, best)}"


def _verdict(mine: pd.DataFrame, best: str, base: str) -> str:
    """What the cells of the best implementation show against the baseline."""
    mean, spread = gmean(mine["speedup"]), f"{mine['speedup'].min():.2f}x to {mine['speedup'].max():.2f}x"
    low, counts = _judged(mine) if mine["verdict"].notna().any() else _intervals(mine)
    wide = int((mine["converged"] == False).sum())  # noqa: E712
    counts += f"; in {wide} the interval of the time stayed wider than asked" if wide else ""
    if mean <= 1:
        return f"no implementation has a geometric mean above the baseline {base}; the nearest is {best} with {mean:.2f}x ({spread}; {counts})"
    if not low:
        return f"no implementation is shown to be faster than {base}; {best} has the largest geometric mean, {mean:.2f}x ({spread}; {counts})"
    return f"{best} has the largest speed-up, {mean:.2f}x {base} in the geometric mean ({spread}; {counts})"


def _judged(mine: pd.DataFrame) -> tuple[int, str]:
    """In how many cells it is faster, and the verdicts in words."""
    found = mine["verdict"].value_counts()
    cells, floors = row_groups.differing(mine, count(len(mine), "cell")), mine["noise_floor"].dropna()
    said = ", ".join(f"{name} in {found.get(name, 0)}" for name in ("slower", "same", "undecided"))
    noise = f"{floors.min():.1%} to {floors.max():.1%}" if floors.min() < floors.max() else f"{floors.min():.1%}"
    faster = int(found.get("faster", 0))
    return faster, f"faster in {faster} of {cells}, {said}, beyond noise of {noise}"


def _intervals(mine: pd.DataFrame) -> tuple[int, str]:
    """In how many cells the interval lies above 1, and the counts in words, for rows without verdicts."""
    low, high = int((mine["speedup_ci_low"] > 1).sum()), int((mine["speedup_ci_high"] < 1).sum())
    cells, unknown = row_groups.differing(mine, count(len(mine), "cell")), int(mine["speedup_ci_low"].isna().sum())
    counts = f"the 95 % interval lies above 1 in {low} of {cells}, below 1 in {high}, and includes 1 in {len(mine) - low - high - unknown}"
    return low, counts + (f"; {unknown} have too few pairs for an interval" if unknown else "")


def _against_best(mine: pd.DataFrame, rows: pd.DataFrame) -> str:
    """How it compares with the fastest other implementation of each cell: a weak baseline says little.

    From the paired ratios that the rows hold; of rows from before they did, from medians.
    """
    others = rows[~rows.index.isin(mine.index)].groupby(["cell", "gpu_uuid"], dropna=False)["median_us"].min()
    pairs = mine.join(others.rename("rival_us"), on=["cell", "gpu_uuid"])
    ratios = pairs["best_speedup"].astype(float).fillna(pairs["rival_us"] / pairs["median_us"]).dropna()
    if ratios.empty:
        return ""
    return f"against the fastest other implementation of each cell, {mine['implementation'].iloc[0]} is {gmean(ratios):.2f}x as fast in the geometric mean ({ratios.min():.2f}x to {ratios.max():.2f}x); against the baseline, "


def _rest(others: pd.DataFrame, mine: pd.DataFrame, best: str) -> str:
    """How many times as fast as each other it is over the cells that both ran in on one card, with their number."""
    keys = ["cell", "gpu_uuid"]
    ours = mine[[*keys, "median_us"]].rename(columns={"median_us": "ours_us"})
    both = others[others["implementation"] != best].merge(ours, on=keys)
    ratios = (both["median_us"] / both["ours_us"]).groupby(both["implementation"])
    parts = [f"{name} {gmean(one):.2f}x ({count(len(one), 'cell')})" for name, one in ratios]
    return f" {best} over each of the others, where both ran: {', '.join(parts)}." if parts else ""


def copy_share(ok: pd.DataFrame, bench: str) -> str:
    """How near to the copy bandwidth the nearest implementation and the baseline come; empty for a bench with FLOPs."""
    rows = ok[(ok["bench"] == bench) & ok["share_of_copy"].notna() & (ok["flops"] == 0)]
    if rows.empty:
        return ""
    median = rows.groupby("implementation")["share_of_copy"].median().sort_values()
    best, base = str(median.index[-1]), str(rows["baseline"].iloc[0])
    top = rows.loc[rows["implementation"] == best, "share_of_copy"].max()
    against = "" if best == base or base not in median else f"; the baseline {base} reaches {median[base]:.1%}"
    over = row_groups.differing(rows, "cells", by=["implementation"])
    return f"{bench}: the highest median share of the measured copy bandwidth is {best}'s, {median.iloc[-1]:.1%} (at most {top:.1%}){against}; medians over {over}."


def stage_shares(ok: pd.DataFrame, bench: str) -> str:
    """Where a composite's time goes in the implementation that is fastest in most cells; fused stages are one part."""
    rows = ok[(ok["bench"] == bench) & ok["stage_us"].map(lambda v: sum(stages(v).values()) > 0).astype(bool)]
    if rows.empty:
        return f"Where the time of {bench} goes: not measured."
    winners = rows.loc[rows.groupby("cell")["median_us"].idxmin(), "implementation"]
    name = winners.value_counts().index[0]
    mine = rows[rows["implementation"] == name]
    times = pd.DataFrame([stages(v) for v in mine["stage_us"]]).fillna(0)
    shares = times.div(times.sum(axis=1), axis=0).median().sort_values(ascending=False)
    parts = ", ".join(f"{part}{' (fused)' * ('+' in str(part))} {share:.0%}" for part, share in shares.items())
    cells = row_groups.differing(mine, count(len(mine), "cell"))
    return f"Where the time of {bench} goes: {name} has the lowest median in {int((winners == name).sum())} of {len(winners)} cells; there, the median shares of its stages over {cells} are {parts}."


def drops(ok: pd.DataFrame) -> str:
    """What each capacity factor drops, by skew. Loads that the exact sampler balances do not occur in practice: a factor of 1 drops nothing of them."""
    rows = ok[ok["capacity_factor"].notna() & ok["skew"].notna() & ok["drop_rate"].notna()]
    rows = rows[(rows["sampler"] != "exact") | (rows["skew"] > 0)]
    rows = routings(rows)
    if rows.empty:
        return "What a capacity factor drops: not measured on loads that differ."
    median = rows.groupby(["capacity_factor", "skew"])["drop_rate"].median()
    parts = ", ".join(f"{factor:g} at skew {skew:g}: {drop:.1%}" for (factor, skew), drop in median.items())
    over = row_groups.differing(rows, count(len(rows), "routing"), ["capacity_factor", "skew"], WITHOUT_EFFECT)
    return f"What a capacity factor drops of drawn loads (median share of assignments over {over}; trained routers are under Quality): {parts}."


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
