"""Answers to what readers ask beyond a single cell: what a capacity costs, loss per second, the backward pass. Pure functions; no torch.

A rule answers from stored rows alone; where they do not hold the answer, it says what was not measured and what was.
"""

import pandas as pd

from moe_routing_bench.figures import capacity, row_groups, times, training_points
from moe_routing_bench.quality import compare, family
from moe_routing_bench.quantities import count, us
from moe_routing_bench.report.document import Answer, made

FACTOR = 1.0
_NOT_APART = "apart it is not measured, as this run has no layer alone of the same cell and card"


def answers(table: pd.DataFrame, trained: pd.DataFrame | None) -> list[Answer]:
    """All of them, in the order of the page."""
    found = [made(lost_bits, trained), made(loss_per_second, trained), made(backward_apart, table)]
    return [one for one in found if isinstance(one, Answer)]


def lost_bits(trained: pd.DataFrame | None, factor: float = FACTOR) -> Answer:
    """The bits per byte that a capacity factor costs trained causal rules; of other factors where this one was not trained with."""
    question = f"What does a capacity factor of {factor:g} cost in quality?"
    rows = pd.DataFrame() if trained is None else capacity.lost(trained)
    if rows.empty and trained is not None and len(capacity.limited(trained)):
        return Answer(question=question, text=f"{_sentence(compare.WITHDRAWN)}.")
    if rows.empty:
        return Answer(
            question=question,
            text="Not measured: this run has no trained rule that was evaluated with a capacity limit.",
        )
    asked = rows[rows["capacity_factor"] == factor]
    if len(asked):
        said = [f"{way}: {_each(group)}" for way, group in asked.groupby("way", sort=False)]
        return Answer(question=question, text=f"{_sentence('; '.join(said))}.", link="figure-capacity_bits")
    known = [
        f"{one:g} ({_each(rows[rows['capacity_factor'] == one])})" for one in sorted(rows["capacity_factor"].unique())
    ]
    return Answer(
        question=question,
        text=f"Not measured: no rule was evaluated with it. Measured: {'; '.join(known)}.",
        link="figure-capacity_bits",
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _each(rows: pd.DataFrame) -> str:
    """What is stated of the rules that lose least, middle and most, in the config with most rules; why nothing is, without noise."""
    mine = rows[rows["label"] == rows.groupby("label", sort=False)["contestant"].nunique().idxmax()]
    by_seed = mine.pivot_table(index="seed", columns="contestant", values="lost")
    found = family.against_none(by_seed, "{} with and without the limit")
    start = f"{mine['label'].iloc[0]}, {count(len(by_seed.columns), 'rule')}"
    if not found:
        return f"{start}: nothing is said, because seeds show no noise to test against"
    ranked = sorted(found.values(), key=lambda one: one.effect)
    places = dict.fromkeys([0, (len(ranked) - 1) // 2, len(ranked) - 1])
    what = {3: ("least: ", "middle: ", "most: "), 2: ("least: ", "most: ")}.get(len(places), ("",))
    return f"{start}: {', '.join(word + str(ranked[i]) for word, i in zip(what, places, strict=True))}"


def loss_per_second(trained: pd.DataFrame | None) -> Answer:
    """The causal rules that no other one beats in both loss and training seconds, at the end of equal schedules."""
    question = "Which rule learns most per second of training?"
    chart = None if trained is None else training_points.loss_seconds(trained)
    if chart is None or chart.marks.empty:
        return Answer(question=question, text="Not measured: this run has no trained rule with a loss and a speed.")
    marks = chart.marks
    panel = marks.groupby("panel", sort=False)["series"].nunique().idxmax()
    ends = marks[(marks["panel"] == panel) & marks["says"].str.contains("end of the schedule")]
    front = row_groups.front(ends.astype({"x": float, "y": float}), "x", "y")
    said = [f"{one['series']} {one['y']:.4f}{_half(one)} in {one['x']:#.3g} s" for _, one in front.iterrows()]
    around = " ± half of the 95 % interval" if any(map(_half, (one for _, one in front.iterrows()))) else ""
    return Answer(
        question=question,
        text=f"{panel.partition(':')[0]}: of {count(len(ends), 'causal rule')} at the end of equal schedules, no other has less loss in less time than {'; '.join(said)} (bits per byte{around}; seconds of the steps alone).",
        link="figure-loss_seconds",
    )


def _half(one: pd.Series) -> str:
    half = (one["high"] - one["low"]) / 2
    return f" ± {half:.4f}" if half else ""


def backward_apart(table: pd.DataFrame) -> Answer:
    """The fastest step of each cell of `training`, and what of it the backward pass takes where the same run measured the layer alone."""
    question = "What does the backward pass cost?"
    steps = row_groups.ok(table, "training")
    if steps.empty:
        return Answer(
            question=question,
            text="Not measured: this run has no layer forward and backward.",
            link="evidence-backward",
        )
    steps = steps.assign(forward=times.forwards(steps, table))
    fastest = steps.loc[steps.groupby("cell", sort=False)["median_us"].idxmin()]
    said = [
        _step(one, label, bool(fastest["forward"].notna().any()))
        for (_, one), label in zip(fastest.iterrows(), row_groups.labels(fastest), strict=True)
    ]
    rest = f"; {_NOT_APART}" * bool(fastest["forward"].isna().all())
    return Answer(question=question, text=f"{'; '.join(said)}{rest}.", link="figure-backward")


def _step(one: pd.Series, label: str, some: bool) -> str:
    """`some`: of a step of the run the layer alone was measured; else that it was not is said once, behind them all."""
    whole = f"{label}: {one['implementation']} takes {us(one['median_us'], one['ci_low_us'], one['ci_high_us'])} forward and backward"
    if one["forward"] >= one["median_us"]:
        return f"{whole}, no longer than the {us(one['forward'])} of the layer alone: the difference of two measurements says nothing here"
    if pd.isna(one["forward"]):
        return f"{whole}; {_NOT_APART}" if some else whole
    rest = one["median_us"] - one["forward"]
    return f"{whole}, of which the backward pass takes {us(rest)}, {rest / one['forward']:.3g}x the {us(one['forward'])} of the layer alone"
