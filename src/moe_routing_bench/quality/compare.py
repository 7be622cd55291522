"""Which router is better as far as the seeds can tell: means with intervals, paired tests, and a ranking with ties.

Runs of one seed saw the same bytes in the same order, so routers are compared seed by seed. Only runs of one config are
compared. Rules that see later tokens are compared among themselves, because their loss on a causal task means something
else.
"""

import itertools

import numpy as np
import pandas as pd
from scipy import stats

from moe_routing_bench.quality import run_rows
from moe_routing_bench.quality.run_rows import MIXED
from moe_routing_bench.statistics import holm, mean_half_width

METRIC = "bits_per_byte"
ALPHA = 0.05


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every final run, with its `contestant`: the name of the router, and what else varies."""
    rows = table[table["purpose"] == "final"].sort_values("step").groupby("run", sort=False).tail(1).sort_index()
    names = rows["router"].astype(str)
    routed = rows["router"] != "dense"
    names = names.where(rows["network"] == "linear", names + "+" + rows["network"])
    for column, prefix in (("capacity_factor", "cf"), ("drop_policy", ""), ("train_mode", "")):
        varies = rows[routed].groupby("label")[column].transform(lambda one: one.nunique(dropna=False) > 1)
        varies = varies.astype(bool).reindex(rows.index, fill_value=False)
        text = rows[column].map(lambda value, p=prefix: f" {p}{'none' if pd.isna(value) else value}").astype(str)
        names = names.where(~varies, names + text)
    return rows.assign(contestant=names)


def with_speeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Final rows whose speeds are of one mode per config: of steps launched from Python unless all have a graph."""
    eager = rows["step_mode"].astype("string").str.startswith(run_rows.EAGER).fillna(True).astype(bool)
    mixed = eager.groupby(rows["label"]).transform("any") & ~eager & rows["eager_step_ms"].notna()
    by_host = 1e3 * rows["batch"] * rows["sequence"] / rows["eager_step_ms"]
    return rows.assign(
        train_tokens_per_s=rows["train_tokens_per_s"].mask(mixed, by_host),
        step_ms=rows["step_ms"].mask(mixed, rows["eager_step_ms"]),
        step_half_width_ms=rows["step_half_width_ms"].mask(mixed),
        step_mode=rows["step_mode"].mask(mixed | eager, run_rows.EAGER),
    )


def timed(rows: pd.DataFrame) -> str:
    """How the speeds of final runs were taken, in words."""
    alone = rows["timed_alone"].astype("boolean").fillna(False).astype(bool)
    if not alone.any():
        return "of runs that shared the machine"
    modes = set(rows.loc[alone & rows["cuda_version"].notna(), "step_mode"])
    how = {
        frozenset(): "",
        frozenset({run_rows.GRAPH}): ", steps replayed as a CUDA graph",
        frozenset({run_rows.EAGER}): ", steps launched from Python (limited by the host)",
    }.get(frozenset(modes), ", steps replayed as a CUDA graph in some configs, launched from Python in others")
    rest = "" if alone.all() else "; other configs shared the machine"
    return f"one run per rule with the machine to itself{how}{rest}"


def summary(table: pd.DataFrame, metric: str = METRIC) -> pd.DataFrame:
    """One row per contestant and config, best first: seeds, mean, 95 % interval by Student's t, rank and ties.

    The rank is one more than the number of contestants that are significantly better. `ties` names those that are
    neither significantly better nor significantly worse.
    """
    found = []
    for (label, config, causal), rows in finals(table).groupby(["label", "config_hash", "causal"], sort=False):
        by_seed = rows.pivot(index="seed", columns="contestant", values=metric)
        tests = pairs(by_seed)
        for name in by_seed.mean().sort_values().index:
            values = by_seed[name].dropna().to_numpy()
            better = [a for a, b, p in tests if b == name and p < ALPHA]
            worse = [b for a, b, p in tests if a == name and p < ALPHA]
            ties = [one for one in by_seed.columns if one not in (name, *better, *worse)]
            row = {
                "label": label,
                "config_hash": config,
                "causal": bool(causal),
                "contestant": name,
                "seeds": len(values),
                "mean": float(values.mean()) if len(values) else float("nan"),
                "half_width": mean_half_width(values),
                "rank": 1 + len(better),
                "ties": ties,
                "lr": rows.loc[rows["contestant"] == name, "lr"].iloc[0],
            }
            found.append(row)
    return pd.DataFrame(found)


def pairs(by_seed: pd.DataFrame) -> list[tuple[str, str, float]]:
    """(better, worse, p) of every two columns: paired t-tests over the seeds that both have, p corrected by Holm."""
    found = []
    for first, second in itertools.combinations(by_seed.columns, 2):
        both = by_seed[[first, second]].dropna()
        gap = (both[first] - both[second]).to_numpy()
        better, worse = (first, second) if gap.mean() < 0 else (second, first)
        p = float(stats.ttest_rel(both[first], both[second]).pvalue) if len(gap) > 1 and np.ptp(gap) > 0 else 1.0
        found.append((better, worse, p))
    corrected = holm([p for *_, p in found])
    return [(better, worse, p) for (better, worse, _), p in zip(found, corrected, strict=True)]


def text(table: pd.DataFrame, metric: str = METRIC) -> str:
    """The summary as lines to print."""
    lines = []
    for (label, config, causal), rows in summary(table, metric).groupby(["label", "config_hash", "causal"], sort=False):
        kind = "causal" if causal else "NOT causal: no rank beside the others"
        lines.append(f"\n{label} ({config}), {metric}, {kind}")
        lines.append(
            f"{'rank':>4}  {'router':<28} {'mean':>8} {'± 95 %':>8} {'seeds':>5} {'lr':>8}  cannot be told from"
        )
        for row in rows.to_dict("records"):
            numbers = f"{row['mean']:>8.4f} {row['half_width']:>8.4f} {row['seeds']:>5} {row['lr']:>8.2g}"
            lines.append(f"{row['rank']:>4}  {row['contestant']:<28} {numbers}  {', '.join(row['ties']) or '-'}")
    return "\n".join(lines)


# Stored runs of before 2026-11-22 validated on batches of one domain each. The tokens of one domain choose the same experts, so a capacity
# seemed to drop, and to cost, many times as much as for mixed batches, which is what a model meets.
WITHDRAWN = "withdrawn, because these runs validated on batches of one domain each, of which a capacity drops many times as much as of mixed ones"


def with_mixed_batches(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that validated on batches of all domains: only these can tell the cost of a capacity."""
    return rows[has_mixed_batches(rows)]


def has_mixed_batches(rows: pd.DataFrame) -> pd.Series:
    """Whether each row validated on batches of all domains."""
    return rows["validation_batches"] == MIXED


def why_no_capacity(rows: pd.DataFrame, otherwise: str) -> str:
    """The reason why no figure on capacity is shown for these rows: `WITHDRAWN` where none has mixed batches, else `otherwise`."""
    return WITHDRAWN if len(rows) and with_mixed_batches(rows).empty else otherwise
