"""What the report says of the training runs: the final evaluation of each router, ranked where that means something."""

from typing import Any

import pandas as pd

from moe_routing_bench.figures import training_rows
from moe_routing_bench.quality.comparison import batches, compare, perft_summary, specialisation
from moe_routing_bench.report.sections import Contest
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
        "mutual information of a choice's expert and its byte's domain, mean over layers",
    ),
    ("experts_per_token", "experts per byte", "{:.3g}", "choices that reach an expert without a capacity limit"),
    ("lr", "learning rate", "{:.3g}", "that of the pilot with the least validation loss, where there were pilots"),
)


def contests(table: pd.DataFrame) -> list[Contest]:
    """Every contest of a table of training runs, best first; dashes where a value is missing."""
    finals = compare.finals(table)
    if finals.empty:
        return []
    finals = compare.with_speeds(finals).assign(
        expert_domain_bits=finals["load_by_domain"].map(specialisation.mean_bits, na_action="ignore"),
        drop_rate=finals["drop_rate"].where(batches.known(finals)),
    )
    # An entry's runs see the same bytes and have the same sizes; its networks differ in their hash.
    ranks = compare.summary(table.assign(config_hash=table["label"]))
    found = []
    for (label, causal), rows in ranks.groupby(["label", "causal"], sort=False):
        mine = finals[(finals["label"] == label) & (finals["causal"].astype(bool) == causal)]
        lines = [_line(rank, mine[mine["contestant"] == rank["contestant"]]) for rank in rows.to_dict("records")]
        found.append(Contest(training_rows.describe(finals[finals["label"] == label]), bool(causal), lines))
    order = list(table["label"].unique())
    return sorted(found, key=lambda one: (order.index(one.title.partition(":")[0]), not one.causal))


def cautions(table: pd.DataFrame) -> list[tuple[str, str]]:
    """What speaks against the place of a rule among the runs, as the zoo says it: names and sentences."""
    there = set(table["router"])
    return [(name, rule.caution) for name, rule in ZOO.items() if rule.caution and name in there]


def _line(rank: dict[str, Any], runs: pd.DataFrame) -> dict[str, Any]:
    """The values of a contestant as the page shows them."""
    causal = runs["causal"].all()
    mark = "" if causal else f" {training_rows.NOT_CAUSAL}"
    note = " (causal in evaluation)" if not causal and runs["causal_in_evaluation"].all() else ""
    half = "–" if pd.isna(rank["half_width"]) else f"± {rank['half_width']:.4f}"
    return {
        "contestant": f"{rank['contestant']}{mark}{note}", "rank": rank["rank"], "ties": rank["ties"],
        "mean": f"{rank['mean']:.4f}", "half_width": half, "seeds": rank["seeds"],
        "values": [_mean(runs[name], form) for name, _, form, _ in COLUMNS],
    }  # fmt: skip


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
            "label": row["label"], "name": f"PERFT-{row['variant']}, r = {row['rank']}", "params": f"{row['params']:,}",
            "active_params": f"{row['active_params']:,}", "seeds": row["seeds"], "lr": f"{row['lr']:.3g}",
            **{metric: _with_half_width(row, metric) for metric in perft_summary.METRICS},
        }
        for row in rows.sort_values(["label", "bits_per_byte"]).to_dict("records")
    ]  # fmt: skip


def _with_half_width(row: dict[str, Any], metric: str) -> str:
    half = row[f"{metric}_half_width"]
    return f"{row[metric]:.4f}" + ("" if pd.isna(half) else f" ± {half:.4f}")
