"""What the report says of the training runs: its first sentences, the final evaluations, ranked where that means something, and what alterations cost."""

from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.figures import training_rows
from moe_routing_bench.quality import compare, family, perft_summary, specialisation, study_costs
from moe_routing_bench.quantities import count
from moe_routing_bench.report.document import Dot, Sentence, pictured
from moe_routing_bench.report.parts import Altered, Contest
from moe_routing_bench.statistics import mean_half_width
from moe_routing_kernels.routers.zoo import ZOO

# column, heading, format of the mean, meaning
COLUMNS = (
    ("train_tokens_per_s", "bytes/s", "{:,.0f}", "bytes trained on per second, steps alone"),
    ("drop_rate", "dropped", "{:.1%}", "share of choices over capacity, in evaluation with it"),
    ("load_cv", "load CV", "{:.3f}", "coefficient of variation of choices per expert, mean over layers"),
    ("dead_experts", "dead experts", "{:.3g}", "experts that no validation byte chose, all layers together"),
    (
        "expert_domain_bits",
        "expert–domain bits",
        "{:z.3f}",
        "mutual information of a choice's expert and its byte's domain, mean over layers, without the bias of finite counts (Miller and Madow)",
    ),
    (
        "expert_class_bits",
        "expert–class bits",
        "{:z.3f}",
        "the same of the expert and the class of the byte, such as digit or space",
    ),
    ("expert_token_bits", "expert–token bits", "{:z.3f}", "the same of the expert and the token itself"),
    ("choices", "n", "{:,.0f}", "validation choices of a layer, of which these bits are"),
    ("experts_per_token", "experts per byte", "{:.3g}", "choices that reach an expert without a capacity limit"),
    (
        "lr",
        "learning rate",
        "{:.3g}",
        "that of the pilot with the least validation loss, where there were pilots; of one seed each, so that their noise is not known",
    ),
)
SHARE_MARGIN = 0.01  # of the choices
NOT_JUDGED = "not judged, because"
FROM_NONE = {family.DIFFERENT: "from", family.EQUIVALENT: "to", family.UNDECIDED: "against"}
WAYS = {
    "bits_by_format": "experts in another format, no capacity",
    "bits_by_capacity": "another capacity factor, experts as trained",
}


def quality(finals: pd.DataFrame) -> Sentence | None:
    """The causal rule of the least loss, in the config with most of them; only where the seeds tell it from some other."""
    causal = finals[finals["causal"].astype(bool)]
    causal = causal[compare.refusals(causal) == ""]
    if causal.empty:
        return None
    label = causal.groupby("label", sort=False)["contestant"].nunique().idxmax()
    mine = causal[causal["label"] == label]
    if why := compare.too_weak(mine):
        return Sentence(f"Quality ({label}): {NOT_JUDGED} {why}.", "quality")
    ranks = compare.summary(mine.assign(config_hash=label))
    found = family.family(family.by_seed(mine, compare.METRIC))
    best = ranks.iloc[0]
    rest = (best["equivalent"], best["undecided"])
    below = len(ranks) - 1 - sum(map(len, rest))
    if best["rank"] != 1 or below < 1:  # of one seed nothing is told apart
        return None
    second = next(pair for pair in found.pairs if {pair.better, pair.worse} == set(ranks["contestant"][:2]))
    text = (
        f"Quality ({label}): {best['contestant']} has the least loss of {len(ranks)} causal rules, {best['mean']:.4f} ± {best['half_width']:.4f} bits per byte "
        f"over {best['seeds']} seeds; less than {below} of the {count(len(ranks) - 1, 'other')} (Tukey), equivalent to {len(rest[0])} within {family.MARGIN:g}, "
        f"undecided against {len(rest[1])}. The first two: {second.statement}."
    )
    dots = [
        Dot(
            str(rank["contestant"]),
            rank["mean"],
            rank["mean"] - rank["half_width"],
            rank["mean"] + rank["half_width"],
            i == 0,
            any(rank["contestant"] in names for names in rest),
        )
        for i, rank in enumerate(ranks.dropna(subset=["half_width"]).to_dict("records"))
    ]
    return Sentence(text, "quality", pictured(dots, "bits per byte"))


def left_over(finals: pd.DataFrame, factor: float = 1.0) -> Sentence | None:
    """What trained rules leave over a capacity: the middle one of the causal rules that learn, in the config with most of them."""
    finals = compare.with_mixed_batches(finals)
    kept = finals[finals["causal"].astype(bool) & finals["learns"].astype(bool) & finals["drop_rate_by_factor"].notna()]
    kept = kept.assign(left=[_at(factor, *one) for one in kept[["capacity_factors", "drop_rate_by_factor"]].to_numpy()])
    kept = kept[kept["left"].notna()]
    if kept.empty:
        return None
    mine = kept[kept["label"] == kept.groupby("label", sort=False)["contestant"].nunique().idxmax()]
    if why := compare.too_weak(mine):
        return Sentence(f"Capacity ({mine['label'].iloc[0]}): {NOT_JUDGED} {why}.", "quality")
    means = mine.groupby("contestant")["left"].mean().sort_values()
    name = str(means.index[(len(means) - 1) // 2])
    by_seed = mine.pivot_table(index="seed", columns="contestant", values="left")
    stated = family.against_none(by_seed, "{}", SHARE_MARGIN, "of the choices").get(name)
    if stated is None:
        return None
    text = (
        f"Capacity ({mine['label'].iloc[0]}): with a factor of {factor:g}, {stated.effect:.1%} ({stated.low:.1%} to {stated.high:.1%}) of the choices of trained {name} go over the "
        f"capacity, the median of {count(len(means), 'rule')}; {stated.verdict} {FROM_NONE[stated.verdict]} none ({stated.test}; margin {stated.margin:.0%}; n = {stated.n} seeds)."
    )
    kept = {other: mine.loc[mine["contestant"] == other, "left"].to_numpy(float) for other in means.index}
    dots = [
        Dot(str(other), one.mean(), one.mean() - mean_half_width(one), one.mean() + mean_half_width(one), other == name)
        for other, one in kept.items()
        if len(one) > 1
    ]
    return Sentence(text, "quality", pictured(dots, "choices over the capacity", "%"))


def _at(factor: float, factors: np.ndarray, shares: np.ndarray) -> float:
    """The share at one of the factors; nan where it is none of them."""
    return dict(zip(factors, shares, strict=True)).get(factor, float("nan"))


def contests(table: pd.DataFrame) -> list[Contest]:
    """Every contest of a table of training runs, best first; dashes where a value is missing."""
    finals = compare.finals(table)
    if finals.empty:
        return []
    finals = specialisation.with_information(compare.with_speeds(finals)).assign(
        drop_rate=finals["drop_rate"].where(compare.has_mixed_batches(finals)),
    )
    # An entry's runs see the same bytes and have the same sizes; its networks differ in their hash.
    ranks = compare.summary(table.assign(config_hash=table["label"]))
    found = []
    if ranks.empty:
        return []
    for (label, causal), rows in ranks.groupby(["label", "causal"], sort=False):
        mine = finals[(finals["label"] == label) & (finals["causal"].astype(bool) == causal)]
        lines = [_line(rank, mine[mine["contestant"] == rank["contestant"]]) for rank in rows.to_dict("records")]
        kept = mine[compare.refusals(mine) == ""]
        by_seed = family.by_seed(kept, compare.METRIC)
        tests = family.family(by_seed)
        found.append(
            Contest(
                training_rows.describe(finals[finals["label"] == label]),
                bool(causal),
                ". ".join(filter(None, (_power(tests, kept["contestant"].nunique()), family.told_far(by_seed, tests)))),
                lines,
            )
        )
    order = list(table["label"].unique())
    return sorted(found, key=lambda one: (order.index(one.title.partition(":")[0]), not one.causal))


def cautions(table: pd.DataFrame) -> list[tuple[str, str]]:
    """What speaks against the place of a rule among the runs, as the zoo says it: names and sentences."""
    there = {part for name in set(table["router"]) for part in str(name).split("+")}
    rows = compare.finals(table)
    reasons = compare.refusals(rows)
    refused = dict.fromkeys(
        zip(
            rows.loc[reasons != "", "label"] + " " + rows.loc[reasons != "", "contestant"],
            reasons[reasons != ""],
            strict=True,
        )
    )
    return [*((name, rule.caution) for name, rule in ZOO.items() if rule.caution and name in there), *refused]


def _power(tests: family.Family, rules: int) -> str:
    """What these seeds can show, and how many an equivalence takes, in words."""
    if not tests.detectable > 0:
        return "no noise is known, so nothing is told apart"
    return (
        f"noise of a run {tests.noise:.4f} bits per byte; with a power of {family.POWER:.0%} an effect of {tests.detectable:.3f} is told apart, "
        f"and {study_costs.power_of_equivalence(tests.noise, rules)}"
    )


def _line(rank: dict[str, Any], runs: pd.DataFrame) -> dict[str, Any]:
    """The values of a contestant as the page shows them."""
    causal = runs["causal"].all()
    mark = "" if causal else f" {training_rows.NOT_CAUSAL}"
    note = " (causal in evaluation)" if not causal and runs["causal_in_evaluation"].all() else ""
    half = "–" if pd.isna(rank["half_width"]) else f"± {rank['half_width']:.4f}"
    return {
        "contestant": f"{rank['contestant']}{mark}{note}",
        "rank": rank["rank"],
        "letters": rank["letters"],
        "equivalent": rank["equivalent"],
        "undecided": rank["undecided"],
        "mean": f"{rank['mean']:.4f}",
        "half_width": half,
        "seeds": rank["seeds"],
        "values": [_mean(runs[name], form) for name, _, form, _ in COLUMNS],
    }


def _mean(values: pd.Series, form: str) -> str:
    kept = values.dropna()
    return form.format(float(kept.mean())) if len(kept) else "–"


def adaptations(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Adapters of each entry, the least loss on the new text first, as the page shows them."""
    rows = perft_summary.summary(table)
    if rows.empty:
        return []
    return [
        {
            "label": row["label"],
            "name": f"PERFT-{row['variant']}, r = {row['rank']}",
            "params": f"{row['params']:,}",
            "active_params": f"{row['active_params']:,}",
            "seeds": row["seeds"],
            "lr": f"{row['lr']:.3g}",
            **{metric: _with_half_width(row, metric) for metric in perft_summary.METRICS},
        }
        for row in rows.sort_values(["label", "bits_per_byte"]).to_dict("records")
    ]


def _with_half_width(row: dict[str, Any], metric: str) -> str:
    half = row[f"{metric}_half_width"]
    return f"{row[metric]:.4f}" + ("" if pd.isna(half) else f" ± {half:.4f}")


def altered_costs(table: pd.DataFrame) -> list[Altered]:
    """The tables of all configs whose rows have such evaluations."""
    found = []
    for column, what in WAYS.items():
        rows = training_rows.finals(table, column) if column in table else table.iloc[:0]
        for _, group in rows.groupby("label", sort=False):
            names = list(dict.fromkeys(name for one in group[column] for name in dict(one)))
            lines = [
                _altered_line(contestant, runs, column, names) for contestant, runs in training_rows.ordered(group)
            ]
            found.append(Altered(f"{training_rows.describe(group)}: {what}", names, lines))
    return found


def _altered_line(contestant: str, runs: pd.DataFrame, column: str, names: list[str]) -> tuple[str, str, list[str]]:
    """The mean over seeds and half of its interval: of the bits per byte, and of what each alteration adds to those of the same seed."""
    added = [runs[column].map(lambda one, name=name: dict(one).get(name)) - runs["bits_per_byte"] for name in names]
    return contestant, _added(runs["bits_per_byte"], ".4f"), [_added(one, "+z.4f") for one in added]


def _added(values: pd.Series, form: str) -> str:
    if not values.notna().any():
        return "–"
    mean, half = training_rows.interval(values)
    return f"{mean:{form}}" + (f" ± {half:.4f}" if half else "")
