"""What a report says first of trained routing rules. Pure functions; no torch."""

import numpy as np
import pandas as pd

from moe_routing_bench.quality.comparison import batches, compare
from moe_routing_bench.quality.statistics import half_width
from moe_routing_bench.quantities import count
from moe_routing_bench.report.document import Dot, Sentence, pictured


def quality(finals: pd.DataFrame) -> Sentence | None:
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
    return Sentence(text, "quality", pictured(dots, "bits per byte"))


def left_over(finals: pd.DataFrame, factor: float = 1.0) -> Sentence | None:
    """What trained rules leave over a capacity: the middle one of the causal rules that learn, in the config with most of them."""
    finals = batches.mixed(finals)
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
    text = f"Capacity ({mine['label'].iloc[0]}): with a factor of {factor:g}, {np.mean(values):.1%} ± {half_width(values):.1%} of the choices of trained {name} go over the capacity, the median of {count(len(means), 'rule')} ({means.iloc[0]:.1%} to {means.iloc[-1]:.1%})."
    kept = {other: mine.loc[mine["contestant"] == other, "left"].to_numpy(float) for other in means.index}
    dots = [
        Dot(str(other), one.mean(), one.mean() - half_width(one), one.mean() + half_width(one), other == name)
        for other, one in kept.items()
        if len(one) > 1
    ]
    return Sentence(text, "quality", pictured(dots, "choices over the capacity", "%"))


def _at(factor: float, factors: np.ndarray, shares: np.ndarray) -> float:
    """The share at one of the factors; nan where it is none of them."""
    return dict(zip(factors, shares, strict=True)).get(factor, float("nan"))
