"""What a report says first: at most five sentences, one number with its interval, a small picture and the rows of each. Pure functions; no torch.

A rule takes sound rows alone, compares cells that are equal but for one axis on one card, and stays silent where nothing is told apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.verdicts import FASTER, SAME, UNDECIDED
from moe_routing_bench.config import axes
from moe_routing_bench.figures import format_rows, grouping
from moe_routing_bench.quality.comparison import compare
from moe_routing_bench.quality.spec import run_rows
from moe_routing_bench.quality.statistics import half_width
from moe_routing_bench.quantities import count, times, told_apart
from moe_routing_bench.report.costs import pairs
from moe_routing_bench.report.pictures import Dot, picture
from moe_routing_bench.report.rows import row_id

MOST = 5
DRIFT = 0.02  # what the ceilings of two processes may differ by without making their rows suspect
_SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k")


@dataclass(frozen=True)
class Headline:
    """A sentence, the part of the page's address that shows its rows, and a picture of what it chose from; empty where that is one value."""

    text: str
    link: str
    picture: str = ""  # markup


def headlines(table: pd.DataFrame, trained: pd.DataFrame | None = None) -> list[Headline]:
    """What the rules have to say of measurements and training runs, in the order of the report."""
    rows = sound(table)
    finals = None if trained is None else compare.finals(trained)
    found = [fastest(rows, table), near_the_limit(rows), formats(table), skew(rows)]
    if finals is not None and len(finals):
        found += [quality(finals), left_over(finals)]
    return [one for one in found if one is not None][:MOST]


def sound(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with a time that are not suspect, and converged or have a verdict that tells them from the best other.

    Of cells whose quickest row is one of these: of others nobody knows who is the fastest.
    """
    ok = table[(table["status"] == "ok") & table["median_us"].notna()]
    told = ok["best_verdict"].notna() & (ok["best_verdict"] != UNDECIDED)
    firm = (ok["suspect"].fillna(False) != True) & ((ok["converged"] != False) | told)  # noqa: E712
    quickest = ok.sort_values("median_us").groupby(["bench", "cell", grouping.card(ok)], sort=False).head(1).index
    keys = pd.Series(list(zip(ok["bench"], ok["cell"], grouping.card(ok), strict=True)), index=ok.index, dtype=object)
    return ok[firm & keys.isin(set(keys[quickest][firm[quickest]]))]


def _widest(rows: pd.DataFrame, having: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """What `having` keeps of the last bench of the table of benches, of which it keeps anything: composites come last."""
    for bench in reversed(BENCHES):
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


def fastest(rows: pd.DataFrame, table: pd.DataFrame) -> Headline | None:
    """In how many cells of the widest bench one implementation is told faster than the best other, and by how much in the middle one.

    From sound rows, but counted over all cells of the table: a time that did not converge is sound only where somebody wins.
    """
    mine = _widest(rows, _lead)
    if mine.empty:
        return None
    wins = mine[mine["best_verdict"] == FASTER]
    one, bench, name = _middle(wins, "best_speedup"), wins["bench"].iloc[0], wins["implementation"].iloc[0]
    if one[["best_speedup_ci_low", "best_speedup_ci_high"]].isna().any():
        return None
    judged = table[(table["bench"] == bench) & (table["status"] == "ok") & table["best_verdict"].notna()]
    quickest = judged.sort_values("median_us").groupby(["cell", grouping.card(judged)], sort=False).head(1)
    suspect = int((quickest["suspect"] == True).sum())  # noqa: E712
    more = f" ({suspect} more {'is' if suspect == 1 else 'are'} suspect)" if suspect else ""
    ratio = times(one["best_speedup"], one["best_speedup_ci_low"], one["best_speedup_ci_high"])
    where = "in the median one of these" if len(wins) > 1 else "there"
    text = f"{bench}: {name} is faster than the best other implementation, beyond noise, in {len(wins)} of {count(len(quickest) - suspect, 'cell')}{more}; {where} it is {ratio} as fast as {one['best_other']}, at {_shape(one)}."
    its = judged[(judged["implementation"] == name) & (judged["suspect"] != True)]  # noqa: E712
    its = its.sort_values("best_speedup", ascending=False)
    edges = its[["best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"]].itertuples(index=False)
    dots = [
        Dot(label, *edge, row.name == one.name, row["best_verdict"] in (SAME, UNDECIDED))
        for (_, row), edge, label in zip(its.iterrows(), edges, grouping.labels(its), strict=True)
    ]
    return Headline(
        text,
        f"rows?filter=bench%3D{bench}+implementation%3D{name}+best_verdict%3D{FASTER}&sort=best_speedup",
        picture(dots, "times as fast as the best other", "x", 1.0),
    )


def near_the_limit(rows: pd.DataFrame) -> Headline | None:
    """How near that implementation comes to the roofline, in the middle one of its cells; on a GPU, where a share above 1 is no share."""
    known = rows[rows["gpu_uuid"].notna() & (rows["converged"] != False) & (rows["share_of_roofline"] <= 1)]  # noqa: E712
    mine = _widest(known, _lead)
    if mine.empty:
        return None
    one, bench, name = _middle(mine, "share_of_roofline"), mine["bench"].iloc[0], mine["implementation"].iloc[0]
    share, low, high = _of_roofline(one)
    where = f"the median one of {len(mine)} converged cells" if len(mine) > 1 else "its one converged cell"
    text = f"{bench}: {name} reaches {_apart(share, low, high)} of the roofline in {where}, at {_shape(one)}."
    rows = mine.sort_values("share_of_roofline", ascending=False)
    dots = [Dot(label, *_of_roofline(row), chosen=row.name == one.name) for (_, row), label in zip(rows.iterrows(), grouping.labels(rows), strict=True)]  # fmt: skip
    return Headline(text, f"row-{row_id(one.to_dict())}", picture(dots, "share of the roofline", "%", 1.0))


def _of_roofline(row: pd.Series) -> tuple[float, float, float]:
    """The share that a row reaches, with the interval of its time."""
    share = row["share_of_roofline"]
    return share, share * row["median_us"] / row["ci_high_us"], share * row["median_us"] / row["ci_low_us"]


def formats(table: pd.DataFrame) -> Headline | None:
    """How much of the time ours take with quantised weights, of all formats that one card measured beside unquantised ones the middle one.

    No row is compared within its cell here, so one that did not converge takes part, with the interval that it has.
    """
    known = table[(table["suspect"].fillna(False) != True) & table["ci_low_us"].notna() & table["ci_high_us"].notna()]  # noqa: E712
    ours = format_rows.fastest(format_rows.beside_quantised(known))
    found = []
    for _, group in ours.groupby(["shape", "tokens", "card"], sort=False):
        plain = group[group["format"] == group["dtype"]]
        others = group[group["weights"] != group["dtype"]] if len(plain) == 1 else group.iloc[:0]
        found += [(one, plain.iloc[0]) for _, one in others.iterrows()]
    if not found:
        return None
    found.sort(key=lambda pair: _over(*pair))
    one, plain = found[(len(found) - 1) // 2]
    ratio, least, most = _over(one, plain)
    if most >= 1 / (1 + DRIFT) and least <= 1 + DRIFT:
        return None
    where = f", the median of {len(found)} formats and sizes" if len(found) > 1 else ""
    text = f"{one['bench']}: with weights of {one['format']}, {one['implementation']} takes {times(ratio, least, most)} the time of {plain['implementation']} with {plain['dtype']} (the fastest of ours in each){where}, at {_shape(one)}."
    labels = grouping.labels(pd.DataFrame([one for one, _ in found]))
    dots = [Dot(label, *_over(*pair), chosen=pair[0] is one) for pair, label in zip(found, labels, strict=True)]
    return Headline(text, f"row-{row_id(one.to_dict())}", picture(dots, "time over that with unquantised weights", "x", 1.0))  # fmt: skip


def skew(rows: pd.DataFrame) -> Headline | None:
    """What the widest range of skew costs the implementation that is fastest without it, in the largest batch of the widest bench."""
    free = rows[rows["skew"].notna() & rows["capacity_factor"].isna() & (rows["converged"] != False)]  # noqa: E712
    found = []
    for bench in reversed(grouping.reading("skew")):
        found = pairs(free[free["bench"] == bench], "skew")[0]
        if found:
            break
    if not found:
        return None
    low, high = min(found, key=lambda pair: (pair[0]["skew"] - pair[1]["skew"], -pair[0]["tokens"], pair[0]["median_us"]))  # fmt: skip
    cost, least, most = _over(high, low)
    if most >= 1 / (1 + DRIFT) and least <= 1 + DRIFT:
        return None
    ratio = times(cost, least, most)
    text = f"{low['bench']}: at skew {high['skew']:g} {low['implementation']} takes {ratio} its time at skew {low['skew']:g}, in cells equal otherwise on one card, at {_shape(low)}."
    same = "+".join(f"{name}%3D{int(low[name])}" for name in _SIZES if pd.notna(low[name]))
    return Headline(text, f"rows?filter=bench%3D{low['bench']}+implementation%3D{low['implementation']}+{same}+capacity_factor%3Anone&sort=skew", _between(free, low, high))  # fmt: skip


def _over(row: pd.Series, base: pd.Series) -> tuple[float, float, float]:
    """The ratio of two times, as wide as both intervals make it."""
    return row["median_us"] / base["median_us"], row["ci_low_us"] / base["ci_high_us"], row["ci_high_us"] / base["ci_low_us"]  # fmt: skip


def _between(rows: pd.DataFrame, low: pd.Series, high: pd.Series) -> Markup:
    """The times at every skew that the card of `low` measured in cells equal to it otherwise, over its own."""
    fixed = ["bench", "implementation", *axes.names(without=["skew"])]
    alike = rows[grouping.card(rows) == grouping.card(pd.DataFrame([low])).iloc[0]]
    for name in fixed:
        alike = alike[alike[name].isna() if pd.isna(low[name]) else alike[name] == low[name]]
    steps = alike[alike["skew"] > low["skew"]].drop_duplicates("skew").sort_values("skew")
    dots = [Dot(f"skew {row['skew']:g}", *_over(row, low), chosen=row["skew"] == high["skew"]) for _, row in steps.iterrows()]  # fmt: skip
    return picture(dots, f"time over that at skew {low['skew']:g}", "x", 1.0)


def quality(finals: pd.DataFrame) -> Headline | None:
    """The causal rule of the least loss, in the config with most of them; only where the seeds tell it from some other."""
    causal = finals[finals["causal"].astype(bool)]
    if causal.empty:
        return None
    label = causal.groupby("label", sort=False)["contestant"].nunique().idxmax()
    ranks = compare.summary(causal[causal["label"] == label].assign(config_hash=label))
    best = ranks.iloc[0]
    others = len(ranks) - 1
    below = others - len(best["ties"])
    if best["rank"] != 1 or below < 1:  # of one seed nothing is told apart
        return None
    text = f"Quality ({label}): {best['contestant']} has the least loss of {len(ranks)} causal rules, {best['mean']:.4f} ± {best['half_width']:.4f} bits per byte over {best['seeds']} seeds; significantly less than {below} of the {count(others, 'other')}."
    dots = [
        Dot(str(rank["contestant"]), rank["mean"], rank["mean"] - rank["half_width"], rank["mean"] + rank["half_width"], i == 0, rank["contestant"] in best["ties"])
        for i, rank in enumerate(ranks.dropna(subset=["half_width"]).to_dict("records"))
    ]  # fmt: skip
    return Headline(text, "quality", picture(dots, "bits per byte"))


def left_over(finals: pd.DataFrame, factor: float = 1.0) -> Headline | None:
    """What trained rules leave over a capacity: the middle one of the causal rules that learn, in the config with most of them."""
    kept = finals[finals["causal"].astype(bool) & finals["learns"].astype(bool) & finals["drop_rate_by_factor"].notna()]
    kept = kept.assign(left=[_at(factor, *one) for one in kept[["capacity_factors", "drop_rate_by_factor"]].to_numpy()])
    kept = kept[kept["left"].notna()]
    if kept.empty:
        return None
    mine = kept[kept["label"] == kept.groupby("label", sort=False)["contestant"].nunique().idxmax()]
    means = mine.groupby("contestant")["left"].mean().sort_values()
    name = means.index[(len(means) - 1) // 2]
    values = mine.loc[mine["contestant"] == name, "left"].to_numpy(float)
    if len(values) < 2:
        return None
    batches = ", on validation batches of one domain each" * bool((mine["validation_batches"] != run_rows.MIXED).any())
    text = f"Capacity ({mine['label'].iloc[0]}): with a factor of {factor:g}, {np.mean(values):.1%} ± {half_width(values):.1%} of the choices of trained {name} go over the capacity, the median of {count(len(means), 'rule')} ({means.iloc[0]:.1%} to {means.iloc[-1]:.1%}){batches}."
    kept = {other: mine.loc[mine["contestant"] == other, "left"].to_numpy(float) for other in means.index}
    dots = [
        Dot(str(other), one.mean(), one.mean() - half_width(one), one.mean() + half_width(one), other == name)
        for other, one in kept.items()
        if len(one) > 1
    ]
    return Headline(text, "quality", picture(dots, "choices over the capacity", "%"))


def _at(factor: float, factors: np.ndarray, shares: np.ndarray) -> float:
    """The share at one of the factors; nan where it is none of them."""
    return dict(zip(factors, shares, strict=True)).get(factor, float("nan"))


def _apart(share: float, low: float, high: float) -> str:
    """A share with its interval, in percent."""
    one, least, most = told_apart(100 * share, 100 * low, 100 * high)
    return f"{one}% [{least}%, {most}%]"


def _shape(row: pd.Series) -> str:
    """The model, the sizes, and what else is not the usual in a row's cell, in words."""
    sizes = [f"{axes.AXES[name].prefix}={int(row[name])}" for name in _SIZES if pd.notna(row[name])]
    rest = grouping.labels(pd.DataFrame([row]), but={*_SIZES, "model"}).iloc[0]
    return " ".join([*([row["model"]] if pd.notna(row["model"]) else []), *sizes, *([rest] if rest else [])])
