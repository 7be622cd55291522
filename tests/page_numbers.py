"""What sentences of pages say, computed anew from the rows of Parquet files, without the code that wrote them.

`faults` of a sentence is empty where each of its numbers is that of the rows. A sentence that nothing here knows is a fault, too.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.origins import ours  # whose kernels they are is a table, not arithmetic
from moe_routing_bench.config.axes import AXES

ROOT = Path(__file__).parents[1]
SIZES = {"T": "tokens", "H": "hidden", "I": "intermediate", "E": "experts", "k": "top_k"}
SURE = math.exp(0.1)  # a ratio that needs no noise floor
_LATER = ("noise_floor", "twin_speedup", "best_speedup", "best_verdict")  # columns that older runs lack
N = r"-?\d(?:[\d,]*\d)?(?:\.\d+)?"
X = rf"({N})x(?: \[({N}), ({N})\])?"


@functools.cache
def stored(run: str) -> pd.DataFrame:
    """The rows of a published run, with the card that each is of and the verdict that its page shows."""
    rows = pd.read_parquet(ROOT / f"results/{run}/measurements.parquet")
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *AXES, *_LATER])))
    rows = rows.astype(
        dict.fromkeys(rows.select_dtypes("str"), object)
    ).copy()  # one block, which is indexed ten times as fast
    rows["card"] = rows["gpu_uuid"].astype(object).where(rows["gpu_uuid"].notna(), rows["host"])
    low, high = rows["best_speedup_ci_low"].astype(float), rows["best_speedup_ci_high"].astype(float)
    free = (
        (rows["status"] == "ok") & rows["noise_floor"].isna() & rows["gpu_uuid"].notna() & rows["best_verdict"].isna()
    )
    free &= rows["best_speedup"].notna()
    far = np.where(low > SURE, "faster", np.where(high < 1 / SURE, "slower", "undecided"))
    rows["shown"] = rows["best_verdict"].astype(object).where(~free, pd.Series(far, rows.index, object))
    return rows


def says(text: str, value: float) -> bool:
    """Whether a number is this value as it is printed."""
    decimals = len(text.partition(".")[2])
    return bool(abs(float(text.replace(",", "")) - value) <= 0.5 * 10.0**-decimals * (1 + 1e-6))


def wrong(**pairs: tuple[str | None, Any]) -> Iterator[str]:
    """Those of some numbers, by name, that are not what they should be."""
    for name, (text, value) in pairs.items():
        if text is not None and (value is None or pd.isna(value) or not says(text, float(value))):
            yield f"{name}: {text} is said, {value} is stored"


def ratio_of(m: re.Match, row: pd.Series, column: str, **more: tuple[str | None, Any]) -> list[str]:
    ends = {end: (m[end], row[f"{column}_ci_{end}"]) for end in ("low", "high")}
    return list(wrong(ratio=(m["ratio"], row[column]), **ends, **more))


def timed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["status"] == "ok") & rows["median_us"].notna()]


def at(rows: pd.DataFrame, shape: str) -> pd.DataFrame:
    """The rows of the sizes, and of the model, that a sentence ends with."""
    for letter, value in re.findall(r"\b([THIEk])=(\d+)", shape):
        rows = rows[rows[SIZES[letter]] == int(value)]
    model = shape.partition(" ")[0]
    return rows if "=" in model else rows[rows["model"] == model]


def quickest(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.loc[rows.groupby(["bench", "cell", "card"])["median_us"].idxmin()]


def doubts(rows: pd.DataFrame) -> pd.Series:
    """Rows that are suspect for something that touches ratios within a cell: anything but drifts of the ceilings."""
    drifts = rows["suspect_reason"].astype(str).str.fullmatch(r"ceilings drifted [^;]*(; ceilings drifted [^;]*)*")
    return rows["suspect"].eq(True) & ~drifts


def firm(rows: pd.DataFrame, verdict: str = "best_verdict", ratios: bool = False) -> pd.DataFrame:
    """Rows that are not suspect (for `ratios`, for more than a drift), and converged or told apart, of cells whose quickest row is."""
    rows = timed(rows)
    told = rows[verdict].notna() & (rows[verdict] != "undecided")
    sound = ~(doubts(rows) if ratios else rows["suspect"].eq(True)) & ((rows["converged"].ne(False)) | told)
    first = quickest(rows).index
    keys = list(zip(rows["bench"], rows["cell"], rows["card"], strict=True))
    good = {key for key, index, kept in zip(keys, rows.index, sound, strict=True) if kept and index in set(first)}
    return rows[sound & pd.Series([key in good for key in keys], rows.index)]


def middle(rows: pd.DataFrame, column: str) -> pd.Series:
    return rows.sort_values(column, kind="stable").iloc[(len(rows) - 1) // 2]


def gmean(values: pd.Series) -> float:
    return float(np.exp(np.log(values.astype(float)).mean()))


def cells_of(rows: pd.DataFrame) -> int:
    return len(rows[["bench", "cell", "card"]].drop_duplicates())


# Findings at the top of a report


def lead(m: re.Match, rows: pd.DataFrame) -> list[str]:
    sound, bench = firm(rows, "shown", ratios=True), rows[rows["bench"] == m["bench"]]
    wins = sound[(sound["bench"] == m["bench"]) & (sound["shown"] == "faster")]
    if wins["implementation"].value_counts().max() != (wins["implementation"] == m["name"]).sum():
        return [f"{m['name']} is not faster most often"]
    mine = wins[wins["implementation"] == m["name"]]
    judged = timed(bench)[timed(bench)["shown"].notna()]
    first = quickest(judged)
    doubtful = int(doubts(first).sum())
    one = middle(mine, "best_speedup")
    found = ratio_of(m, one, "best_speedup")
    found += wrong(won=(m["won"], len(mine)), of=(m["of"], len(first) - doubtful), more=(m["more"], doubtful))
    found += [f"best other: {one['best_other']}"] * (one["best_other"] != m["other"])
    found += ["other sizes"] * (one.name not in at(rows, m["shape"]).index)
    if m["rival"]:
        cell = timed(rows)[(timed(rows)["cell"] == one["cell"]) & (timed(rows)["bench"] == one["bench"])]
        rival = cell[~cell["implementation"].isin(ours(one["bench"])) & (cell["card"] == one["card"])]
        rival = rival.loc[rival["median_us"].idxmin()]
        found += [f"rival: {rival['implementation']}"] * (rival["implementation"] != m["rival"])
        found += wrong(times=(m["times"], rival["median_us"] / one["median_us"]))
    return found


def limit(m: re.Match, rows: pd.DataFrame) -> list[str]:
    sound = firm(rows)
    mine = sound[(sound["bench"] == m["bench"]) & (sound["implementation"] == m["name"])]
    mine = mine[mine["gpu_uuid"].notna() & (mine["converged"].ne(False)) & (mine["share_of_roofline"] <= 1)]
    one = middle(mine, "share_of_roofline")
    share, us = 100 * one["share_of_roofline"], one["median_us"]
    ends = {"low": (m["low"], share * us / one["ci_high_us"]), "high": (m["high"], share * us / one["ci_low_us"])}
    found = list(wrong(share=(m["ratio"], share), cells=(m["cells"], len(mine)), **ends))
    return found + ["other sizes"] * (one.name not in at(rows, m["shape"]).index)


def between(m: re.Match, high: pd.DataFrame, low: pd.DataFrame) -> list[str]:
    """That some two rows of one card have the ratio of times that is said."""
    both = high.merge(low, on="card", suffixes=("", "_low"))
    said = both["median_us"] / both["median_us_low"], both["ci_low_us"] / both["ci_high_us_low"]
    said = (*said, both["ci_high_us"] / both["ci_low_us_low"])
    good = [
        all(says(m[name], x) for name, x in zip(("ratio", "low", "high"), one, strict=True))
        for one in zip(*said, strict=True)
    ]
    return [] if any(good) else [f"no two rows have this ratio, but {[f'{x:.4f}' for x in said[0]]}"]


def of_skew(m: re.Match, rows: pd.DataFrame) -> list[str]:
    mine = at(timed(rows), m["shape"])
    mine = mine[(mine["bench"] == m["bench"]) & (mine["implementation"] == m["name"]) & mine["capacity_factor"].isna()]
    return between(
        m, mine[np.isclose(mine["skew"], float(m["high_skew"]))], mine[np.isclose(mine["skew"], float(m["low_skew"]))]
    )


def of_formats(m: re.Match, rows: pd.DataFrame) -> list[str]:
    """The middle one of all ratios of a quantised format to unquantised weights, of the fastest without a package of others in each."""
    ok = timed(rows)
    known = (ok["suspect"].ne(True)) & ok["ci_low_us"].notna() & ok["ci_high_us"].notna()
    free = {name: {one.name for one in bench.implementations if not one.peer} for name, bench in BENCHES.items()}
    there = set(zip(ok["bench"], ok["cell"], ok["card"], ok["implementation"], strict=True))
    alone = [
        name in free[bench] and not (name == "auto" and (bench, cell, card, str(ran).partition(";")[0]) in there)
        for bench, cell, card, name, ran in zip(
            ok["bench"], ok["cell"], ok["card"], ok["implementation"], ok["configuration"], strict=True
        )
    ]
    read = [("weights" in BENCHES[bench].axes) for bench in ok["bench"]]
    mine = ok[known & pd.Series(alone, ok.index) & pd.Series(read, ok.index)]
    packed = mine["packed"].where(mine["packed"].notna(), mine["dtype"])
    mine = mine.assign(packed=packed, weights=mine["weights"].where(mine["weights"].notna(), mine["dtype"]))
    fixed = [name for name in AXES if name not in ("weights", "packed", "phase", "model")]
    pairs = []
    for _, group in mine.groupby(["bench", "card", *fixed], dropna=False):
        best = group.loc[group.groupby(["weights", "packed"])["median_us"].idxmin()]
        plain = best[(best["weights"] == best["dtype"]) & (best["packed"] == best["dtype"])]
        if len(plain) == 1:
            pairs += [(one, plain.iloc[0]) for _, one in best[best["weights"] != best["dtype"]].iterrows()]
    pairs.sort(key=lambda pair: pair[0]["median_us"] / pair[1]["median_us"])
    one, plain = pairs[(len(pairs) - 1) // 2]
    ratio, low, high = (
        one["median_us"] / plain["median_us"],
        one["ci_low_us"] / plain["ci_high_us"],
        one["ci_high_us"] / plain["ci_low_us"],
    )
    found = list(
        wrong(count=(m["count"], len(pairs)), ratio=(m["ratio"], ratio), low=(m["low"], low), high=(m["high"], high))
    )
    names = (one["implementation"], plain["implementation"], plain["dtype"], one["weights"])
    found += [f"it is {names}"] * (names != (m["name"], m["plain"], m["dtype"], m["format"].partition(" ")[0]))
    return found + ["other sizes"] * (one.name not in at(rows, m["shape"]).index)


# Bench by bench


def left(m: re.Match, rows: pd.DataFrame) -> list[str]:
    all_, sound = (cells_of(one[one["bench"] == m["bench"]]) for one in (timed(rows), firm(rows, ratios=True)))
    return list(wrong(left=(m["left"], all_ - sound), of=(m["of"], all_)))


def doubtful(m: re.Match, rows: pd.DataFrame) -> list[str]:
    return list(wrong(rows=(m["rows"], int((timed(rows)["bench"] == m["bench"]).sum()))))


def not_ok(m: re.Match, rows: pd.DataFrame) -> list[str]:
    bad = rows[rows["status"] != "ok"]
    counted = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", m["counts"] or "")}
    found = list(wrong(bad=(m["bad"], len(bad)), of=(m["of"], len(rows))))
    return found + ["counts"] * (counted != bad["status"].value_counts().to_dict())


def cautions(m: re.Match, rows: pd.DataFrame) -> list[str]:
    ok = timed(rows)
    numbers = {
        "rows": len(ok),
        "suspect": int((ok["suspect"].eq(True)).sum()),
        "wide": int((ok["converged"].eq(False)).sum()),
    }
    return list(wrong(**{name: (m[name], value) for name, value in numbers.items()}))


def copies(m: re.Match, rows: pd.DataFrame) -> list[str]:
    sound = firm(rows)
    mine = sound[(sound["bench"] == m["bench"]) & sound["share_of_copy"].notna() & (sound["flops"] == 0)]
    medians = mine.groupby("implementation")["share_of_copy"].median()
    found = ["another is higher"] * int(medians.max() > medians[m["name"]])
    best = mine.loc[mine["implementation"] == m["name"], "share_of_copy"].max()
    base = medians.get(m["base"]) if m["base"] else None
    numbers = {"median": 100 * medians[m["name"]], "most": 100 * best, "baseline": None if base is None else 100 * base}
    return found + list(wrong(**{name: (m[name], value) for name, value in numbers.items()}))


def alone(m: re.Match, rows: pd.DataFrame) -> list[str]:
    sound = firm(rows, ratios=True)
    mine = sound[(sound["bench"] == m["bench"]) & (sound["speedup"] > 0)]
    found = [f"{name} ran, too" for name in set(mine["implementation"]) - {m["base"]}]
    return found + list(wrong(cells=(m["cells"], mine["cell"].nunique())))


def gaps(m: re.Match, rows: pd.DataFrame) -> list[str]:
    """Gaps of twins by bench; and how many a verdict would tell apart, each by the noise floor of the others."""
    twins = rows[(rows["status"] == "ok") & rows["twin_speedup"].notna()]
    apart = np.log(twins["twin_speedup"].astype(float)).abs()
    found = []
    said = re.findall(rf"({N})% for (\w+) \(at most ({N})%, (\d+) twins?\)", m["each"])
    found += ["benches"] * (sorted(bench for _, bench, *_ in said) != sorted(set(twins["bench"])))
    for median, bench, most, count in said:
        mine = 100 * apart[twins["bench"] == bench]
        found += wrong(median=(median, mine.median()), most=(most, mine.max()), count=(count, len(mine)))
    size = np.digitize(twins["median_us"], [10.0, 100.0])
    order = twins["twin_speedup_p"].astype(float).sort_values(ascending=False)
    adjusted = (order * len(order) / np.arange(len(order), 0, -1)).cummin()
    told = judged = 0
    for place, (index, row) in enumerate(twins.iterrows()):
        others = twins.index != index
        alike = others & (twins["bench"] == row["bench"])
        wider = next((one for one in (alike & (size == size[place]), alike, others) if one.sum() >= 5), None)
        if wider is None:
            continue
        judged += 1
        known = np.sort(apart[wider])
        floor = max(0.005, known[math.ceil(0.975 * (len(known) - 1))])
        if len(known) < 19:
            floor = max(floor, math.sqrt((known**2).mean()) * stats.t.ppf(0.975, len(known) / 2))
        beyond = row["twin_speedup_ci_low"] > 1 or row["twin_speedup_ci_high"] < 1
        told += bool(beyond and adjusted[index] <= 0.05 and apart[index] > floor)
    return found + list(wrong(judged=(m["judged"], judged), told=(m["told"], told)))


def drops(m: re.Match, rows: pd.DataFrame) -> list[str]:
    """The median drop rate of routings by capacity factor and skew; rows of one routing count once."""
    mine = timed(rows)
    mine = mine[mine["capacity_factor"].notna() & mine["skew"].notna() & mine["drop_rate"].notna()]
    mine = mine[(mine["sampler"] != "exact") | (mine["skew"] > 0)]
    mine = mine.drop_duplicates(["tokens", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace", "seed"])
    said = re.findall(rf"({N}) at skew ({N}): ({N})%", m["parts"])
    pairs = mine[["capacity_factor", "skew"]].drop_duplicates()
    found = list(wrong(routings=(m["routings"], len(mine)), parts=(str(len(said)), len(pairs))))
    for factor, skew, drop in said:
        of = mine[np.isclose(mine["capacity_factor"], float(factor)) & np.isclose(mine["skew"], float(skew))]
        found += wrong(**{f"{factor} at {skew}": (drop, 100 * of["drop_rate"].median())})
    return found


def equal_otherwise(rows: pd.DataFrame, axis: str) -> Iterator[pd.DataFrame]:
    """Rows of one implementation and card that differ in one axis alone, in rising order, none last."""
    others = [name for name in AXES if name != axis]
    for _, group in rows.groupby(["bench", "implementation", "card", *others], dropna=False):
        if group[axis].nunique(dropna=False) > 1:
            yield group.sort_values(axis, na_position="last")


_ENDS: dict[tuple[int, str, str], list[pd.DataFrame]] = {}


def ends_of(rows: pd.DataFrame, bench: str, axis: str) -> list[pd.DataFrame]:
    """The sound rows of a bench that are equal but for the axis, found once for the rows of a run, which `stored` keeps."""
    if (key := (id(rows), bench, axis)) not in _ENDS:
        mine = firm(rows[rows["bench"] == bench])
        mine = mine[mine["skew"].notna() & mine["capacity_factor"].isna()] if axis == "skew" else mine
        _ENDS[key] = list(equal_otherwise(mine, axis))
    return _ENDS[key]


def costs(m: re.Match, rows: pd.DataFrame, axis: str) -> list[str]:
    """Ratios of times of the ends of the widest range that is said, over cells that are equal otherwise."""
    found = []
    for part in re.split(r"; (?=\w+ at )", m["parts"]):
        if not (bench := re.match(r"\w+ at ", part)):
            continue
        name = bench[0].split()[0]
        groups = ends_of(rows, name, axis)
        for high, low, skew, median, least, most, count, slower, faster in COST.findall(part):
            ratios, told = [], [0, 0]
            for group in groups:
                one, other = group.iloc[0], group.iloc[-1]
                if axis == "skew":
                    same = math.isclose(one["skew"], float(low)) and math.isclose(other["skew"], float(high))
                    base, row = one, other
                else:
                    same = math.isclose(one[axis], float(high)) and pd.isna(other[axis])
                    same &= not skew or math.isclose(one["skew"], float(skew))
                    base, row = other, one
                if not same:
                    continue
                ratios.append(row["median_us"] / base["median_us"])
                told[0] += row["ci_low_us"] > base["ci_high_us"]
                told[1] += row["ci_high_us"] < base["ci_low_us"]
            numbers = {"median": (median, np.median(ratios) if ratios else None), "pairs": (count, len(ratios))}
            numbers |= {"least": (least, min(ratios, default=None)), "most": (most, max(ratios, default=None))}
            numbers |= {"slower": (slower, told[0]), "faster": (faster, told[1])}
            found += [f"{name} {high}: {one}" for one in wrong(**numbers)]
    return found


COST = re.compile(
    rf"at (?:skew|factor) ({N})(?: over ({N}))?(?: and skew ({N}))? ({N})x \(({N})x to ({N})x; (\d+) pairs?[^:]*: (\d+) slower and (\d+) faster with disjoint intervals\)"
)


def speedups(m: re.Match, rows: pd.DataFrame) -> list[str]:
    """The ratios to the fastest other and to the baseline, and verdicts, of the implementation that is named."""
    sound = firm(rows, ratios=True)
    name, base = m["name"] or m["nearest"] or m["largest"], m["base"] or m["below_base"] or m["unbeaten"]
    known = sound[(sound["bench"] == m["bench"]) & (sound["baseline"] == base)]
    mine, others = (
        known[(known["speedup"] > 0) & (known["implementation"] == name)],
        known[known["implementation"] != name],
    )
    mean = gmean(mine["speedup"])
    named = {"mean": mean, "nearest_mean": mean, "largest_mean": mean}
    named |= {"least": mine["speedup"].min(), "most": mine["speedup"].max()}
    found = ["it is above the baseline"] * bool(m["nearest"] and mean > 1)
    found += ["it is not above the baseline"] * bool(not m["nearest"] and mean <= 1)
    found += _another(name, known, base)
    if m["against"]:
        fastest = others.groupby(["cell", "card"])["median_us"].min().rename("rival")
        both = mine.join(fastest, on=["cell", "card"])
        best = both["best_speedup"].astype(float).fillna(both["rival"] / both["median_us"]).dropna()
        named |= {"against": gmean(best), "against_least": best.min(), "against_most": best.max()}
    if m["faster"]:
        verdicts = mine["verdict"].value_counts()
        floors = 100 * mine["noise_floor"].dropna().astype(float)
        named |= {name: verdicts.get(name, 0) for name in ("faster", "slower", "same", "undecided")}
        named |= {"of": len(mine), "floor": floors.min(), "floor_most": floors.max()}
    if m["above"]:
        low, high = mine["speedup_ci_low"] > 1, mine["speedup_ci_high"] < 1
        none = mine["speedup_ci_low"].isna()
        named |= {
            "above": low.sum(),
            "below": high.sum(),
            "cells": len(mine),
            "includes": (~(low | high | none)).sum(),
            "few": none.sum(),
        }
    named |= {"wide": int((mine["converged"].eq(False)).sum())}
    shown = named.get("faster", named.get("above", 0)) > 0
    found += ["it is shown to be faster"] * bool(m["largest"] and shown)
    found += ["it is not shown to be faster"] * bool(m["name"] and not shown)
    found += wrong(**{name: (m[name], value) for name, value in named.items()})
    us = mine[["cell", "gpu_uuid", "median_us"]].rename(columns={"median_us": "ours"})
    for name, mean, cells in re.findall(rf"(\w+) ({N})x \((\d+) cells?\)", m["rest"] or ""):
        both = others[others["implementation"] == name].merge(us, on=["cell", "gpu_uuid"])
        found += wrong(**{name: (mean, gmean(both["median_us"] / both["ours"])), f"{name} cells": (cells, len(both))})
    return found


def _another(name: str, rows: pd.DataFrame, base: str) -> list[str]:
    """Another implementation with a larger geometric mean, over the cells that all have which ran in half of the most cells or more."""
    ran = rows[(rows["speedup"] > 0) & (rows["implementation"] != base)]
    counts = ran.groupby("implementation")["cell"].nunique()
    wide = ran[ran["implementation"].isin(counts.index[2 * counts >= counts.max()])]
    table = wide.pivot_table(index="cell", columns="implementation", values="speedup")
    means = np.log(table if table.dropna().empty else table.dropna()).mean()
    better = means.index[means > means[name] + 1e-9] if name in means else ["any that is named"]
    return [f"{one} has a larger mean" for one in better[:1]]


def staged(m: re.Match, rows: pd.DataFrame) -> list[str]:
    def held(each: Any) -> dict[str, float]:
        return (
            {}
            if each is None or isinstance(each, float)
            else {name: us for name, us in each if us is not None and not np.isnan(us)}
        )

    mine = firm(rows)[firm(rows)["bench"] == m["bench"]]
    mine = mine[[sum(held(one).values()) > 0 for one in mine["stage_us"]]]
    winners = mine.loc[mine.groupby("cell")["median_us"].idxmin(), "implementation"]
    found = list(wrong(won=(m["won"], (winners == m["name"]).sum()), of=(m["of"], len(winners))))
    own = mine[mine["implementation"] == m["name"]]
    each = pd.DataFrame([held(one) for one in own["stage_us"]]).fillna(0)
    shares = 100 * each.div(each.sum(axis=1), axis=0).median()
    found += wrong(cells=(m["cells"], len(own)))
    for part, share in re.findall(r"([\w+]+)(?: \(fused\))? (\d+)%", m["parts"]):
        found += wrong(**{part: (share, shares.get(part))})
    return found


def scope(m: re.Match, rows: pd.DataFrame) -> list[str]:
    numbers = {
        "rows": len(rows),
        "timed": int((rows["status"] == "ok").sum()),
        "cells": len(rows[["bench", "cell"]].drop_duplicates()),
    }
    return list(wrong(**{name: (m[name], value) for name, value in numbers.items()}))


def suspects(m: re.Match, rows: pd.DataFrame) -> list[str]:
    ok = rows[rows["status"] == "ok"]
    return list(wrong(suspect=(m["suspect"], int((ok["suspect"].eq(True)).sum())), rows=(m["rows"], len(ok))))


RATIO = rf"(?P<ratio>{N})x(?: \[(?P<low>{N}), (?P<high>{N})\])?"
MIDDLE = r"(?:there|in the (?:median one|lower of the two middle ones) of these)"
KNOWN: tuple[tuple[str, Callable[[re.Match, pd.DataFrame], list[str]]], ...] = (
    (
        rf"(?P<bench>\w+): (?P<name>\w+) is faster than the best other implementation, (?:beyond noise|by more than 11 %), in (?P<won>\d+) of (?P<of>\d+) cells?(?: \((?P<more>\d+) more (?:is|are) suspect\))?; {MIDDLE} it is {RATIO} as fast as (?P<other>\w+)"
        rf"(?: \(ours, too(?:; (?P<rival>\w+), the fastest rival there, takes (?P<times>{N})x as long)?\))?, at (?P<shape>.+?)\.(?: Too few implementations were entered twice, so that differences up to 11 % are not judged\.)?",
        lead,
    ),
    (
        rf"(?P<bench>\w+): (?P<name>\w+) reaches (?P<ratio>{N})% \[(?P<low>{N})%, (?P<high>{N})%\] of the roofline in (?:its one converged cell|the (?:median one|lower of the two middle ones) of (?P<cells>\d+) converged cells), at (?P<shape>.+)\.",
        limit,
    ),
    (
        rf"(?P<bench>\w+): at skew (?P<high_skew>{N}) (?P<name>\w+) takes {RATIO} its time at skew (?P<low_skew>{N}), in cells equal otherwise on one card, at (?P<shape>.+)\.",
        of_skew,
    ),
    (
        rf"(?P<bench>\w+): with weights of (?P<format>\w+(?: x \w+)?), (?P<name>\w+) takes {RATIO} the time of (?P<plain>\w+) with (?P<dtype>\w+) \(the fastest of ours or torch in each\)(?:, the median of (?P<count>\d+) formats and sizes)?, at (?P<shape>.+)\.",
        of_formats,
    ),
    (
        r"(?P<bench>\w+): only the baseline (?P<base>\w+) ran \((?P<cells>\d+) cells?\); speed-ups: not measured\.",
        alone,
    ),
    (r"(?P<bench>\w+): (?P<left>\d+) of (?P<of>\d+) cells? (?:is|are) left out here: .*", left),
    (r"(?P<bench>\w+): nothing is said of (?P<rows>\d+) rows?: .*", doubtful),
    (
        r"(?P<bad>\d+) of (?P<of>\d+) rows are not ok(?: \((?P<counts>.*)\); each is listed below with its reason)?\.",
        not_ok,
    ),
    (
        r"Cautions: of (?P<rows>\d+) measured rows, (?P<suspect>\d+) are suspect .* and (?P<wide>\d+) reached a limit before .*",
        cautions,
    ),
    (
        rf"(?P<bench>\w+): the highest median share of the measured copy bandwidth is (?P<name>\w+)'s, (?P<median>{N})% \(at most (?P<most>{N})%\)(?:; the baseline (?P<base>\w+) reaches (?P<baseline>{N})%)?; medians over .*",
        copies,
    ),
    (
        rf"(?P<bench>\w+): (?:against the fastest other implementation of each cell, \w+ is (?P<against>{N})x as fast in the geometric mean \((?P<against_least>{N})x to (?P<against_most>{N})x\); against the baseline, )?"
        rf"(?:(?P<name>\w+) has the largest speed-up, (?P<mean>{N})x (?P<base>\w+) in the geometric mean"
        rf"|no implementation has a geometric mean above the baseline (?P<below_base>\w+); the nearest is (?P<nearest>\w+) with (?P<nearest_mean>{N})x"
        rf"|no implementation is shown to be faster than (?P<unbeaten>\w+); (?P<largest>\w+) has the largest geometric mean, (?P<largest_mean>{N})x) \((?P<least>{N})x to (?P<most>{N})x; "
        rf"(?:faster in (?P<faster>\d+) of (?P<of>\d+) cells?[^,]*(?:, [^,]*?)*?, slower in (?P<slower>\d+), same in (?P<same>\d+), undecided in (?P<undecided>\d+), beyond noise of (?P<floor>{N})%(?: to (?P<floor_most>{N})%)?"
        rf"|the 95 % interval lies above 1 in (?P<above>\d+) of (?P<cells>\d+) cells?.*?, below 1 in (?P<below>\d+), and includes 1 in (?P<includes>\d+)(?:; (?P<few>\d+) have too few pairs for an interval)?)"
        r"(?:; in (?P<wide>\d+) the interval of the time stayed wider than asked)?\)\.(?P<rest> \w+ over each of the others, where both ran: .*)?",
        speedups,
    ),
    (
        r"Where the time of (?P<bench>\w+) goes: (?P<name>\w+) has the lowest median in (?P<won>\d+) of (?P<of>\d+) cells; there, the median shares of its stages over (?P<cells>\d+) cells?.*? are (?P<parts>.*)\.",
        staged,
    ),
    (
        r"Noise: an implementation that was entered twice in a cell differs from itself by a median of (?P<each>.*?)(?:; of (?P<judged>\d+), each held against the floor of the others, the verdict would tell (?P<told>\d+) apart)?\.",
        gaps,
    ),
    (
        r"What a capacity factor drops of drawn loads \(median share of assignments over (?P<routings>\d+) routings?.*?; trained routers are under Quality\): (?P<parts>.*)\.",
        drops,
    ),
    (r"Cost of skew: .*? without a capacity limit: (?P<parts>.*)\.", functools.partial(costs, axis="skew")),
    (
        r"Time with a capacity factor: .*? equal otherwise: (?P<parts>.*)\.",
        functools.partial(costs, axis="capacity_factor"),
    ),
    (r"(?P<rows>\d+) rows?, (?P<timed>\d+) of them with a time, of (?P<cells>\d+) cells?\.", scope),
    (r"(?P<suspect>\d+) of (?P<rows>\d+) rows? with a time (?:is|are) suspect", suspects),
)


def faults(text: str, rows: pd.DataFrame) -> list[str]:
    """What is false in a sentence on the rows of a run."""
    for pattern, check in KNOWN:
        if found := re.fullmatch(pattern, text):
            return check(found, rows)
    return [f"nothing here computes this sentence: {text}"] if re.search(r"\d", text) else []


# Pages of a platform: cells of all runs, each on its card


@functools.cache
def cells(platform: str) -> list[pd.DataFrame]:
    """The timed rows of each cell, the quickest first, of all published runs of a platform."""
    found = []
    for manifest in sorted((ROOT / "results").glob("*/manifest.yaml")):
        run = manifest.parent.name
        if run.partition(".")[0] == platform and (manifest.parent / "measurements.parquet").is_file():
            groups = timed(stored(run).assign(run=run)).groupby(["bench", "cell", "card"], sort=False)
            found += [cell.sort_values("median_us", kind="stable") for _, cell in groups]
    return found


@functools.cache
def places(platform: str) -> dict[tuple[str, int], list[tuple[dict[str, Any], list[pd.Series | None]]]]:
    """The cells of a platform, by bench and number of tokens: the values of the quickest row, and our row and that of the fastest other."""
    found: dict[tuple[str, int], list[tuple[dict[str, Any], list[pd.Series | None]]]] = {}
    for cell in cells(platform):
        first = cell.iloc[0].to_dict()
        found.setdefault((first["bench"], int(first["tokens"])), []).append((first, list(own_and_rival(cell))))
    return found


def own_and_rival(cell: pd.DataFrame) -> tuple[pd.Series | None, pd.Series | None]:
    """The row of `auto`, or else of our fastest kernel, and the fastest of another package."""
    names, known = list(cell["implementation"]), ours(cell["bench"].iloc[0])
    mine = [place for place, name in enumerate(names) if name in known]
    auto = [place for place in mine if names[place] == "auto"]
    others = [place for place, name in enumerate(names) if name not in known]
    first = [cell.iloc[places[0]] if places else None for places in (auto or mine, others)]
    return first[0], first[1]


def first_page(text: str, runs: list[list[str]], platform: str) -> list[str]:
    """What is false of the first sentence of a platform's page, and of its table of runs: name, day, benches and rows."""
    m = re.search(r"(\d+) times? of (\d+) cells? from (\d+) published runs? on", text)
    if not m:
        return ["no sentence on times and cells"]
    every = cells(platform)
    found = list(wrong(times=(m[1], sum(map(len, every))), cells=(m[2], len(every)), runs=(m[3], len(runs))))
    for name, day, benches, rows in runs:
        if not (ROOT / f"results/{name}").is_dir():
            continue  # made up by a test
        known = timed(stored(name))
        found += wrong(rows=(rows, len(stored(name))))
        days = known["ended_at"].astype(str).str[:10]
        found += [f"{name}: {day}"] * (len(known) > 0 and day not in (days.max(), "–"))
        found += [f"{name}: {benches}"] * (set(benches.split(", ")) != set(stored(name)["bench"]))
    return found


TURNED = {"faster": "slower", "slower": "faster"}


def compared(row: pd.Series, other: pd.Series) -> tuple[float, float, float, str | None]:
    """The ratio of a row to another of its cell, above 1 where the row is the faster, its ends, and the verdict."""
    for named, column, verdict in (("best_other", "best_speedup", "best_verdict"), ("baseline", "speedup", "verdict")):
        ends = f"{column}_ci_low", f"{column}_ci_high"
        if row[named] == other["implementation"] and pd.notna(row[column]):
            found = (row[column], row[ends[0]], row[ends[1]], row[verdict])
            break
        if other[named] == row["implementation"] and pd.notna(other[column]):
            found = (
                1 / other[column],
                1 / other[ends[1]],
                1 / other[ends[0]],
                TURNED.get(other[verdict], other[verdict]),
            )
            break
    else:
        low, high = other["ci_low_us"] / row["ci_high_us"], other["ci_high_us"] / row["ci_low_us"]
        ratio, floor = other["median_us"] / row["median_us"], row["noise_floor"]
        apart = (low > 1 or high < 1) and abs(math.log(ratio)) > floor
        told = (
            None if pd.isna(floor) or pd.isna(low) else ("faster" if ratio > 1 else "slower") if apart else "undecided"
        )
        found = (ratio, low, high, told)
    ratio, low, high, told = found
    if pd.isna(told):
        sure = pd.notna(row["gpu_uuid"]) and (low > SURE or high < 1 / SURE)
        told = ("faster" if ratio > 1 else "slower") if sure else None
    return ratio, low, high, told


TALLY = re.compile(
    r"(?P<cells>\d+) cells?(?:, none with a time of both ours and another package|\. Against the fastest of other packages, torch included, ours is (?P<told>.*?) of (?P<both>\d+)(?:; (?P<lone>\d+) more (?:has|have) no time of ours or of another)?)\."
)


def tally(text: str, mine: list[pd.DataFrame]) -> list[str]:
    """What is false of how ours compare in these cells."""
    if not (m := TALLY.search(text)):
        return [f"no tally: {text}"]
    pairs = [(own, rival) for own, rival in map(own_and_rival, mine) if own is not None and rival is not None]
    verdicts = [compared(*pair)[3] for pair in pairs]
    numbers = {"cells": len(mine), "both": len(pairs), "lone": len(mine) - len(pairs)}
    found = list(wrong(**{name: (m[name], value) for name, value in numbers.items()}))
    said = {how: int(n) for how, n in re.findall(r"(faster|slower|not told apart) in (\d+)", m["told"] or "")}
    known = {how: verdicts.count(how) for how in ("faster", "slower")}
    known["not told apart"] = len(verdicts) - sum(known.values())
    return found + [f"verdicts: {known}"] * (bool(pairs) and said != {how: n for how, n in known.items() if n})


ANSWER = re.compile(
    rf"(?P<near>Nearest measured cell: )?(?P<name>\w+) (?P<how>is the fastest|has the lowest median|is the only implementation|and \w+ are the same)(?:[^:(]|\([^)]*\))*: (?P<us>{N}) µs(?: \[(?P<low>{N}), (?P<high>{N})\])?.*?\. +"
    rf"(?P<bench>\w+), (?P<sizes>[^,]+), (?P<kinds>[^:]+): asked T=(?P<asked>\d+), measured T=(?P<measured>\d+) \((?P<away>[^)]*(?:\([^)]*\)[^)]*)*)\)\."
    rf"(?: +Ours, (?P<own>\w+)(?: \((?P<own_us>{N}) µs[^)]*\))?: (?:(?P<ratio>{N})x(?: \[(?P<least>{N}), (?P<most>{N})\])? as fast as (?P<other>\w+) \((?P<verdict>[^)]*)\)|no other package has a time here)\.)?"
)


def answer(text: str, platform: str) -> list[str]:
    """What is false of an answer: it is that of a measured cell, whose quickest row is named with its time, and ours with its ratio."""
    if not (m := ANSWER.search(text)):
        return [f"no answer: {text}"]
    phase, dtype, *form = [one.strip() for one in m["kinds"].split(",")]
    sizes = [(SIZES[letter], int(value)) for letter, value in re.findall(r"\b([THIEk])=(\d+)", m["sizes"])]
    candidates = []
    for row, cell in places(platform).get((m["bench"], int(m["measured"])), []):
        like = all(row[name] == value for name, value in sizes) and row["implementation"] == m["name"]
        plain = pd.isna(row["weights"]) or row["weights"] == row["dtype"]
        if like and (row["phase"], row["dtype"]) == (phase, dtype) and (form == [row["weights"]] if form else plain):
            candidates.append((row, *cell))
    results = [list(_answered(m, *cell)) for cell in candidates]
    return min(results, key=len) if results else [f"no cell has these sizes: {m['sizes']}, T={m['measured']}"]


def _answered(m: re.Match, first: dict[str, Any], own: pd.Series | None, rival: pd.Series | None) -> Iterator[str]:
    yield from wrong(
        us=(m["us"], first["median_us"]), low=(m["low"], first["ci_low_us"]), high=(m["high"], first["ci_high_us"])
    )
    octaves = re.match(r"([\d.]+) octaves? away", m["away"])
    if octaves and m["away"] == octaves[0]:
        yield from wrong(octaves=(octaves[1], abs(math.log2(int(m["asked"]) / int(m["measured"])))))
    if not octaves and m["asked"] != m["measured"]:
        yield f"asked T={m['asked']}, measured T={m['measured']}"
    if m["own"] is None or own is None:
        if (m["own"] is None) != (own is None):
            yield "ours"
        return
    if own["implementation"] != m["own"]:
        yield f"ours is {own['implementation']}"
    yield from wrong(own_us=(m["own_us"], own["median_us"]))
    if rival is None or m["other"] is None:
        if (rival is None) != (m["other"] is None):
            yield "another package"
        return
    if rival["implementation"] != m["other"]:
        yield f"the fastest other is {rival['implementation']}"
    yield from pair(m, own, rival)


def pair(m: re.Match, own: pd.Series, rival: pd.Series) -> Iterator[str]:
    """What is false of a ratio with its ends and its verdict."""
    ratio, low, high, told = compared(own, rival)
    yield from wrong(ratio=(m["ratio"], ratio), least=(m["least"], low), most=(m["most"], high))
    if (m["verdict"].partition(" by more")[0].partition(",")[0]) != (told or "no verdict"):
        yield f"the verdict is {told}, not {m['verdict']}"


PAIR = re.compile(
    rf"(?P<ratio>{N})x(?: \[(?P<least>{N}), (?P<most>{N})\])? as fast as (?P<other>\w+) \((?P<verdict>[^)]*)\)"
)


def line(texts: list[tuple[str, list[str]]], platform: str) -> list[str]:
    """What is false of a line of a model's table: stage, tokens, phase, formats, what else, ours, the fastest other, their ratio, run."""
    (bench, _), (tokens, _), (phase, _), _, _, mine, others, (said, _), (run, _) = texts
    ids = {address.rpartition("-")[2] for _, links in (mine, others) for address in links}
    found = []
    for first, cell in places(platform).get((bench, int(tokens)), []):
        if (first["run"], first["phase"]) != (run, phase):
            continue
        if ids != {name_of(row) for row in cell if row is not None}:
            continue
        pairs = [(text, row) for (text, _), row in zip((mine, others), cell, strict=True) if row is not None]
        for text, row in pairs:
            name, us = text.split()[:2]
            found += (
                wrong(us=(us, row["median_us"]))
                if name == row["implementation"]
                else [f"{name} is {row['implementation']}"]
            )
        if len(pairs) == 2:
            found += pair(m, pairs[0][1], pairs[1][1]) if (m := PAIR.fullmatch(said)) else [f"no ratio: {said}"]
        return [f"{run} {bench} T={tokens}: {one}" for one in found]
    return [f"no cell of {run} has these rows: {texts}"]


def name_of(row: pd.Series) -> str:
    """The short name of a row in addresses."""
    text = json.dumps([row["bench"], row["cell"], row["implementation"]])
    return hashlib.sha256(text.encode()).hexdigest()[:10]
