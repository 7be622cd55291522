"""Sentences computed from the rows: nothing is claimed that the rows do not show. Pure functions; no torch."""

import numpy as np
import pandas as pd

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.figures.style import stages

# Cells that agree in these differ only in skew and capacity.
_SHAPE = ["bench", "implementation", "model", "phase", "tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "layout", "router", "sampler", "trace", "seed"]  # fmt: skip
_SKEWED = ("layer", "routing", "pack", "combine", "permute")


def findings(table: pd.DataFrame) -> list[str]:
    """All findings, in the order of the report; of the benches that were asked for."""
    ok = table[(table["status"] == "ok") & table["median_us"].notna()]
    asked = [bench for bench in BENCHES if bench in set(table["bench"])]
    found = [text for bench in asked for text in (fastest(ok, bench), copy_share(ok, bench)) if text]
    return [*found, stage_shares(ok), cost_of_skew(ok), drops(ok), cost_of_capacity(ok), doubtful(ok), not_ok(table)]


def fastest(ok: pd.DataFrame, bench: str) -> str:
    """The implementation with the largest geometric-mean speed-up, and in how many cells its interval excludes 1.

    Candidates ran in at least half of the cells of the one that ran in most; they are ranked on their common cells.
    """
    rows = ok[(ok["bench"] == bench) & (ok["speedup"] > 0)]
    others = rows[rows["implementation"] != rows["baseline"]]
    if rows.empty:
        return f"{bench}: not measured."
    base = BENCHES[bench].baseline
    if others.empty:
        return f"{bench}: only the baseline {base} ran ({_count(rows['cell'].nunique(), 'cell')}); speed-ups: not measured."
    counts = others.groupby("implementation")["cell"].nunique()
    wide = others[others["implementation"].isin(counts.index[counts >= counts.max() / 2])]
    logs = wide.assign(log=np.log(wide["speedup"].astype(float))).pivot_table(index="cell", columns="implementation", values="log")  # fmt: skip
    common = logs.dropna()
    ranked = (logs if common.empty else common).mean().sort_values(ascending=False)
    best = str(ranked.index[0])
    return f"{bench}: {_verdict(wide[wide['implementation'] == best], best, base)}.{_rest(others, best)}"


def _verdict(mine: pd.DataFrame, best: str, base: str) -> str:
    """What the cells of the best implementation show against the baseline."""
    low, high, n = int((mine["speedup_ci_low"] > 1).sum()), int((mine["speedup_ci_high"] < 1).sum()), len(mine)
    mean, spread = geometric_mean(mine["speedup"]), f"{mine['speedup'].min():.2f}x to {mine['speedup'].max():.2f}x"
    counts = f"the 95 % interval lies above 1 in {low} of {_count(n, 'cell')}, below 1 in {high}, and includes 1 in {n - low - high}"  # fmt: skip
    if mean <= 1:
        return f"no implementation has a geometric mean above the baseline {base}; the nearest is {best} with {mean:.2f}x ({spread}; {counts})"
    if not low:
        return f"no implementation is shown to be faster than {base}; {best} has the largest geometric mean, {mean:.2f}x ({spread}; {counts})"
    return f"{best} has the largest speed-up, {mean:.2f}x {base} in the geometric mean ({spread}; {counts})"


def _rest(others: pd.DataFrame, best: str) -> str:
    """The other implementations with the number of cells that each ran in."""
    parts = [
        f"{name} {geometric_mean(group['speedup']):.2f}x ({_count(len(group), 'cell')})"
        for name, group in others[others["implementation"] != best].groupby("implementation")
    ]
    return f" Others, each over the cells that it ran in: {', '.join(parts)}." if parts else ""


def _count(n: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def geometric_mean(values: pd.Series) -> float:
    """Geometric mean of positive values."""
    return float(np.exp(np.log(values.astype(float)).mean()))


def copy_share(ok: pd.DataFrame, bench: str) -> str:
    """How near to the copy bandwidth the nearest implementation and the baseline come; empty for a bench with FLOPs."""
    rows = ok[(ok["bench"] == bench) & ok["share_of_copy"].notna() & (ok["flops"] == 0)]
    if rows.empty:
        return ""
    median = rows.groupby("implementation")["share_of_copy"].median().sort_values()
    best, base = str(median.index[-1]), BENCHES[bench].baseline
    top = rows.loc[rows["implementation"] == best, "share_of_copy"].max()
    against = "" if best == base or base not in median else f"; the baseline {base} reaches {median[base]:.1%}"
    return f"{bench}: the highest median share of the measured copy bandwidth is {best}'s, {median.iloc[-1]:.1%} (at most {top:.1%}){against}."


def stage_shares(ok: pd.DataFrame) -> str:
    """Where the layer's time goes in the implementation that is fastest in most cells."""
    layer = ok[(ok["bench"] == "layer") & ok["stage_us"].map(lambda v: sum(stages(v).values()) > 0).astype(bool)]
    if layer.empty:
        return "Where the layer's time goes: not measured."
    winners = layer.loc[layer.groupby("cell")["median_us"].idxmin(), "implementation"]
    name = winners.value_counts().index[0]
    mine = layer[layer["implementation"] == name]
    times = pd.DataFrame([stages(v) for v in mine["stage_us"]]).fillna(0)
    shares = times.div(times.sum(axis=1), axis=0)
    parts = ", ".join(f"{s} {shares[s].median():.0%}" for s in shares.median().sort_values(ascending=False).index)
    return f"Where the layer's time goes: {name} has the lowest median in {int((winners == name).sum())} of {len(winners)} cells; there, the median shares of its stages over {len(mine)} cells are {parts}."


def pairs(rows: pd.DataFrame, axis: str) -> list[tuple[pd.Series, pd.Series]]:
    """The rows of lowest and highest `axis` among those equal in all else."""
    other = "capacity_factor" if axis == "skew" else "skew"
    found = []
    for _, group in rows.groupby([*_SHAPE, other], dropna=False):
        rising = group.sort_values(axis)
        if rising[axis].nunique() > 1:
            found.append((rising.iloc[0], rising.iloc[-1]))
    return found


def _ratios(found: list[tuple[pd.Series, pd.Series]]) -> str:
    """Median and range of second over first, and how many are told apart."""
    ratios = [high["median_us"] / low["median_us"] for low, high in found]
    slower = sum(high["ci_low_us"] > low["ci_high_us"] for low, high in found)
    quicker = sum(high["ci_high_us"] < low["ci_low_us"] for low, high in found)
    doubt = sum(bool(low["suspect"] == True or high["suspect"] == True) for low, high in found)  # noqa: E712
    return f"{np.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x; {_count(len(found), 'pair')}: {slower} slower and {quicker} faster with disjoint intervals{f', {doubt} with a suspect row' if doubt else ''})"


def cost_of_skew(ok: pd.DataFrame) -> str:
    """Time at the highest skew over time at the lowest, on cells that are equal otherwise, without a capacity limit."""
    rows = ok[ok["skew"].notna() & ok["capacity_factor"].isna()]
    parts = []
    for bench in _SKEWED:
        found = pairs(rows[rows["bench"] == bench], "skew")
        if found:
            low, high = max(((a["skew"], b["skew"]) for a, b in found), key=lambda span: span[1] - span[0])
            widest = [(a, b) for a, b in found if (a["skew"], b["skew"]) == (low, high)]
            parts.append(f"{bench} at skew {high:g} over {low:g} {_ratios(widest)}")
    if not parts:
        return "Cost of skew without a capacity limit: not measured."
    return f"Cost of skew: median ratio of times at the highest over the lowest skew, on cells equal otherwise and without a capacity limit: {'; '.join(parts)}."


def drops(ok: pd.DataFrame) -> str:
    """What each capacity factor drops, by skew."""
    rows = ok[ok["capacity_factor"].notna() & ok["skew"].notna() & ok["drop_rate"].notna()]
    rows = rows.drop_duplicates(["tokens", "experts", "top_k", "capacity_factor", "skew", "sampler", "seed"])
    if rows.empty:
        return "What a capacity factor drops: not measured."
    median = rows.groupby(["capacity_factor", "skew"])["drop_rate"].median()
    parts = ", ".join(f"{factor:g} at skew {skew:g}: {drop:.1%}" for (factor, skew), drop in median.items())
    return f"What a capacity factor drops (median share of assignments over {len(rows)} routings): {parts}."


def cost_of_capacity(ok: pd.DataFrame) -> str:
    """Time with the lowest capacity factor over time without a limit, on cells that are equal otherwise."""
    rows = ok.assign(capacity_factor=ok["capacity_factor"].fillna(np.inf))
    parts = []
    for bench in _SKEWED:
        found = [pair for pair in pairs(rows[rows["bench"] == bench], "capacity_factor") if np.isinf(pair[1]["capacity_factor"])]  # fmt: skip
        if found:
            parts.append(f"{bench} {_ratios([(free, tight) for tight, free in found])}")
    if not parts:
        return "Time with a capacity factor against none: not measured."
    return f"Time with a capacity factor: median ratio of times at the lowest factor over no limit, on cells equal otherwise: {'; '.join(parts)}."


def doubtful(ok: pd.DataFrame) -> str:
    """How many measured rows carry a caution."""
    suspect, open_ended = int((ok["suspect"] == True).sum()), int((ok["converged"] == False).sum())  # noqa: E712
    return f"Cautions: of {len(ok)} measured rows, {suspect} are suspect (such as a drift of the ceilings) and {open_ended} reached a limit before their interval was as narrow as asked; the table marks both."


def not_ok(table: pd.DataFrame) -> str:
    """How many rows have no time, by status."""
    bad = table[table["status"] != "ok"]
    counts = ", ".join(f"{n} {status}" for status, n in bad["status"].value_counts().items())
    return f"{len(bad)} of {len(table)} rows are not ok" + (f" ({counts}); each is listed below with its reason." if counts else ".")  # fmt: skip
