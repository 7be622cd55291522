"""Which router is better, as far as the seeds can tell: means with intervals, paired tests, and a ranking with its ties.

Runs of one seed saw the same bytes in the same order, so two routers are compared seed by seed. Only runs of one config
are compared, and rules that see the future only with their like: on a causal task their loss means something else.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from moe_routing_bench.quality import runs

METRIC = "bits_per_byte"
ALPHA = 0.05


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every final run, with the name of its contestant: the router, and what else varies."""
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
    """Final rows with speeds of one mode a config: of steps launched from Python where not all were replayed as a graph."""
    eager = rows["step_mode"].astype("string").str.startswith(runs.EAGER).fillna(True).astype(bool)
    mixed = eager.groupby(rows["label"]).transform("any") & ~eager & rows["eager_step_ms"].notna()
    by_host = 1e3 * rows["batch"] * rows["sequence"] / rows["eager_step_ms"]
    return rows.assign(
        train_tokens_per_s=rows["train_tokens_per_s"].mask(mixed, by_host),
        step_ms=rows["step_ms"].mask(mixed, rows["eager_step_ms"]),
        step_half_width_ms=rows["step_half_width_ms"].mask(mixed),
        step_mode=rows["step_mode"].mask(mixed | eager, runs.EAGER),
    )


def timed(rows: pd.DataFrame) -> str:
    """How the speeds of final runs were taken."""
    alone = rows["timed_alone"].astype("boolean").fillna(False).astype(bool)
    if not alone.any():
        return "of runs that shared the machine"
    modes = set(rows.loc[alone & rows["cuda_version"].notna(), "step_mode"])
    how = {
        frozenset(): "",
        frozenset({runs.GRAPH}): ", steps replayed as a CUDA graph",
        frozenset({runs.EAGER}): ", steps launched from Python (limited by the host)",
    }.get(frozenset(modes), ", steps replayed as a CUDA graph in some configs, launched from Python in others")
    return f"one run a rule with the machine to itself{how}" + ("" if alone.all() else "; other configs shared the machine")  # fmt: skip


def summary(table: pd.DataFrame, metric: str = METRIC) -> pd.DataFrame:
    """One row a contestant of each config: seeds, mean, 95 % interval by Student's t, rank and ties, best first.

    The rank is one more than the number of contestants that are significantly better; `ties` names those of which it
    cannot be told.
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
            found.append({
                "label": label, "config_hash": config, "causal": bool(causal), "contestant": name, "seeds": len(values),
                "mean": float(values.mean()) if len(values) else float("nan"), "half_width": half_width(values), "rank": 1 + len(better),
                "ties": ties, "lr": rows.loc[rows["contestant"] == name, "lr"].iloc[0],
            })  # fmt: skip
    return pd.DataFrame(found)


def pairs(by_seed: pd.DataFrame) -> list[tuple[str, str, float]]:
    """(better, worse, p) of every two columns over the seeds that both have: paired t-tests, p corrected by Holm."""
    found = []
    for first, second in itertools.combinations(by_seed.columns, 2):
        both = by_seed[[first, second]].dropna()
        gap = (both[first] - both[second]).to_numpy()
        better, worse = (first, second) if gap.mean() < 0 else (second, first)
        p = float(stats.ttest_rel(both[first], both[second]).pvalue) if len(gap) > 1 and np.ptp(gap) > 0 else 1.0
        found.append((better, worse, p))
    corrected = holm([p for *_, p in found])
    return [(better, worse, p) for (better, worse, _), p in zip(found, corrected, strict=True)]


def holm(values: Sequence[float]) -> list[float]:
    """Holm's correction (1979): the i-th smallest of m times m - i + 1, never falling, at most 1."""
    order = np.argsort(values, kind="stable")
    scaled = np.maximum.accumulate(np.array(values)[order] * np.arange(len(values), 0, -1)) if len(values) else []
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(scaled, 1)
    return corrected.tolist()


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean by Student's t; nan for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def text(table: pd.DataFrame, metric: str = METRIC) -> str:
    """The summary as lines to print."""
    lines = []
    for (label, config, causal), rows in summary(table, metric).groupby(["label", "config_hash", "causal"], sort=False):
        lines.append(
            f"\n{label} ({config}), {metric}, {'causal' if causal else 'NOT causal: no rank beside the others'}"
        )
        lines.append(
            f"{'rank':>4}  {'router':<28} {'mean':>8} {'± 95 %':>8} {'seeds':>5} {'lr':>8}  cannot be told from"
        )
        for row in rows.to_dict("records"):
            lines.append(f"{row['rank']:>4}  {row['contestant']:<28} {row['mean']:>8.4f} {row['half_width']:>8.4f} {row['seeds']:>5}"
                         f" {row['lr']:>8.2g}  {', '.join(row['ties']) or '-'}")  # fmt: skip
    return "\n".join(lines)
