"""Which router is better as far as the seeds can tell: means with intervals, and a ranking from the tests in `family`.

Runs of one seed saw the same bytes in the same order, so seeds are blocks. Only runs of one config are
compared. Rules that see later tokens are compared among themselves, because their loss on a causal task means something
else.
"""

import numpy as np
import pandas as pd

from moe_routing_bench.quality import family, rates, run_rows
from moe_routing_bench.quality.run_rows import MIXED
from moe_routing_bench.statistics import mean_half_width
from moe_routing_kernels.routers.zoo import ZOO

METRIC = "bits_per_byte"
AT_THE_EDGE = "not ranked: its best learning rate is at the edge of the grid."
RECURRING = 0.01  # of the validation bytes, the most that may recur in training
RECURS = "not ranked: {share:.1%} of its validation text recurs in training, of which at most {most:.0%} may."
WEAKEST = 2.5  # bits per byte of the best rule, from which on training is judged
SHORTEST = 1.0  # tokens per active parameter, from which on training is judged
OLDER_CODE = "not ranked: trained before the rule, or how a layer seats its choices, last changed."


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every final run, with its `contestant`: the name of the router, and what else varies."""
    rows = table[table["purpose"] == "final"].sort_values("step").groupby("run", sort=False).tail(1).sort_index()
    names = rows["router"].astype(str)
    routed = rows["router"] != "dense"
    names = names.where(rows["network"] == "linear", names + "+" + rows["network"])
    for column, prefix in (
        ("capacity_factor", "cf"),
        ("drop_policy", ""),
        ("train_mode", ""),
        ("shared_gate", "shared "),
    ):
        if column not in rows:
            continue
        varies = rows[routed].groupby("label")[column].transform(lambda values: values.nunique(dropna=False) > 1)
        varies = varies.astype(bool).reindex(rows.index, fill_value=False)
        text = rows[column].map(lambda value, p=prefix: f" {p}{'none' if pd.isna(value) else value}").astype(str)
        names = names.where(~varies, names + text)
    return rows.assign(contestant=names)


def alone(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose speed was taken with the machine to itself: runs that share one slow each other down by what happens to run."""
    return rows[rows["timed_alone"].astype("boolean").fillna(False).astype(bool)]


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
    timed_alone = alone(rows)
    if timed_alone.empty:
        return "of runs that shared the machine"
    modes = set(timed_alone.loc[timed_alone["cuda_version"].notna(), "step_mode"])
    how = {
        frozenset(): "",
        frozenset({run_rows.GRAPH}): ", steps replayed as a CUDA graph",
        frozenset({run_rows.EAGER}): ", steps launched from Python (limited by the host)",
    }.get(frozenset(modes), ", steps replayed as a CUDA graph in some configs, launched from Python in others")
    rest = "" if len(timed_alone) == len(rows) else "; other configs shared the machine"
    return f"one run per rule with the machine to itself{how}{rest}"


_SUMMARY = [
    "label",
    "config_hash",
    "causal",
    "contestant",
    "seeds",
    "mean",
    "half_width",
    "rank",
    "letters",
    "equivalent",
    "undecided",
    "lr",
]


def summary(table: pd.DataFrame, metric: str = METRIC) -> pd.DataFrame:
    """One row per contestant and config, best first: seeds, mean, 95 % interval by Student's t, rank and verdicts.

    The rank is one more than the number of contestants that are significantly better. `letters` are Tukey's. `equivalent` and `undecided`
    name those that are not different. Contestants that are `refused` are left out.
    """
    lines = []
    rows = finals(table)
    rows = rows[refusals(rows) == ""]
    for (label, config, causal), group in rows.groupby(["label", "config_hash", "causal"], sort=False):
        by_seed = family.by_seed(group, metric)
        found = family.family(by_seed)
        names = sorted(by_seed.columns, key=found.means.__getitem__)
        letters = family.letters(found, names)
        for name in names:
            values = by_seed[name].dropna().to_numpy()
            row = {
                "label": label,
                "config_hash": config,
                "causal": bool(causal),
                "contestant": name,
                "seeds": len(values),
                "mean": found.means[name],
                "half_width": mean_half_width(values),
                "rank": 1 + len(found.better_than(name)),
                "letters": letters[name],
                "equivalent": found.of(name, family.EQUIVALENT),
                "undecided": found.of(name, family.UNDECIDED),
                "lr": group.loc[group["contestant"] == name, "lr"].iloc[0],
            }
            lines.append(row)
    return pd.DataFrame(lines, columns=_SUMMARY)


def refusals(rows: pd.DataFrame) -> pd.Series:
    """Why each final row may not be compared; empty where it may.

    A best learning rate at the edge of its grid says that a better one lies outside. Validation text that recurs in training measures memory.
    Rows from before their rule changed are of another.
    """
    edge = [
        rates.at_the_edge(lr, grid)
        for lr, grid in zip(rows["lr"], rows.get("pilot_lrs", pd.Series(None, index=rows.index)), strict=True)
    ]
    changed = rows["router"].map(
        lambda name: max(ZOO[part].changed if part in ZOO else "" for part in str(name).split("+"))
    )
    ended = rows.get("ended_at", pd.Series("9", index=rows.index)).astype("string").fillna("9")
    reasons = pd.Series("", index=rows.index).mask(pd.Series(edge, index=rows.index, dtype=bool), AT_THE_EDGE)
    recurring = pd.to_numeric(rows.get("recurring_share", pd.Series(np.nan, index=rows.index)), errors="coerce")
    reasons = reasons.mask(recurring > RECURRING, [RECURS.format(share=share, most=RECURRING) for share in recurring])
    return reasons.mask(ended.lt(changed).fillna(False).astype(bool), OLDER_CODE)


def too_weak(rows: pd.DataFrame) -> str:
    """Why final rows of one entry say nothing of training: their models are too short or too weak to judge; empty where they are not.

    A model of 4 bits per byte has learnt frequencies of bytes: what a rule would do to a trained one is not seen in it.
    """
    if rows.empty:
        return "no final row"
    best = rows.groupby("contestant")[METRIC].mean().min()
    if not best <= WEAKEST:
        return f"the models are too weak to judge: {best:.2f} bits per byte at best, at most {WEAKEST:g} are asked for"
    seen = (rows["tokens_seen"] / rows["active_params"]).min()
    if seen < SHORTEST:
        return f"the models are trained too short to judge: {seen:.2g} tokens per active parameter, at least {SHORTEST:g} are asked for"
    return ""


def text(table: pd.DataFrame, metric: str = METRIC) -> str:
    """The summary as lines to print, and why others are not in it."""
    lines, runs = [], finals(table)
    reasons = refusals(runs)
    for reason, left_out in runs.groupby(reasons, sort=False):
        if reason:
            lines.append(f"{', '.join(dict.fromkeys(left_out['contestant']))}: {reason}")
    for (label, config, causal), rows in summary(table, metric).groupby(["label", "config_hash", "causal"], sort=False):
        kind = "causal" if causal else "NOT causal: no rank beside the others"
        lines.append(f"\n{label} ({config}), {metric}, {kind}")
        lines.append(
            f"{'rank':>4}  {'router':<28} {'mean':>8} {'± 95 %':>8} {'seeds':>5} {'lr':>8} {'letters':>7}  undecided; equivalent within {family.MARGIN:g}"
        )
        for row in rows.to_dict("records"):
            numbers = (
                f"{row['mean']:>8.4f} {row['half_width']:>8.4f} {row['seeds']:>5} {row['lr']:>8.2g} {row['letters']:>7}"
            )
            others = f"{', '.join(row['undecided']) or '-'}; {', '.join(row['equivalent']) or '-'}"
            lines.append(f"{row['rank']:>4}  {row['contestant']:<28} {numbers}  {others}")
        mine = (runs["label"] == label) & (runs["config_hash"] == config) & (runs["causal"] == causal)
        by_seed = family.by_seed(runs[mine & (reasons == "")], metric)
        if far := family.told_far(by_seed, family.family(by_seed)):
            lines.append(far)
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
