"""Answers beyond a cell, on a few rows whose numbers are known: what each rule says, and where it says that nothing was measured."""

import numpy as np
import pyarrow as pa
import pytest
from rows import frame, one
from scipy import stats

from moe_routing_bench.quality import run_rows
from moe_routing_bench.report import answers


def runs(name, losses, label="e8", factor=1.0, bits=0.1, speed=1000.0, **values):
    """Two evaluations of each seed of a rule: half way and at the end."""
    return [
        {
            "label": label,
            "config_hash": label,
            "router": name,
            "network": "linear",
            "train_mode": "joint",
            "seed": seed,
            "run": f"{label}{name}{factor}{seed}",
            "causal": True,
            "learns": True,
            "purpose": "final",
            "step": step,
            "tokens_seen": step * 1000,
            "bits_per_byte": loss * (2 - step / 2),
            "val_loss": loss,
            "val_loss_with_capacity": loss * (1 + bits),
            "capacity_factor": factor,
            "drop_policy": "position",
            "drop_rate": 0.1,
            "experts": 8,
            "top_k": 2,
            "params": 1e6,
            "steps": 2,
            "validation_batches": "mixed",
            "train_tokens_per_s": speed,
            "step_ms": 1.0,
            "step_half_width_ms": 0.0,
            "eager_step_ms": float("nan"),
            "step_mode": "cuda_graph",
            "timed_alone": True,
            "batch": 1,
            "sequence": 1,
            "lr": 0.1,
        }
        | values
        for seed, loss in enumerate(losses)
        for step in (1, 2)
    ]


def table(*parts):
    """Such evaluations as the table of training runs."""
    found = [{name: run.get(name) for name in run_rows.SCHEMA.names} for part in parts for run in part]
    return pa.Table.from_pylist(found, schema=run_rows.SCHEMA).to_pandas()


def said(rule, *parts):
    return rule(table(*parts)).text


def test_bits_lost_at_a_factor():
    """Of rules that were trained with it, each by a test, interval, margin and n; other factors are named as others; without any it says so."""
    a, b, c = (
        runs("softk", (1.0, 1.1)),
        runs("switch_top1", (1.0, 1.0, 1.1), bits=0.2),
        runs("topk_hard", (1.0, 1.1, 1.2, 1.3), bits=0.3),
    )
    asked = said(answers.lost_bits, a, b, c, runs("softk", (1.0, 1.1), "other", 1.5))
    parts = []
    for what, name, lost in (
        ("least", "softk", [0.1, 0.11]),
        ("middle", "switch_top1", [0.2, 0.2, 0.22]),
        ("most", "topk_hard", [0.3, 0.33, 0.36, 0.39]),
    ):
        mean, reach = np.mean(lost), stats.t.ppf(1 - 0.05 / 6, len(lost) - 1) * stats.sem(lost)
        verdict, test = ("different", "t") if mean > reach else ("undecided", "neither t nor TOST")
        numbers = f"{mean:.4f} ({mean - reach:.4f} to {mean + reach:.4f}) bits per byte, n = {len(lost)} seeds"
        parts.append(f"{what}: {name} with and without the limit are {verdict} ({test}; margin 0.01): {numbers}")
    assert asked == f"Trained with it: e8, 3 rules: {', '.join(parts)}."
    other = runs("softk", (1.0,), factor=1.25)
    assert said(answers.lost_bits, other) == (
        "Not measured: no rule was evaluated with it. Measured: 1.25 (e8, 1 rule: nothing is said, because seeds show no noise to test against)."
    )
    assert "nothing is said" in said(answers.lost_bits, runs("softk", (1.0, 1.0))), "equal values are no noise"
    by_domain = runs("topk_hard", (1.0,), validation_batches="by_domain")
    assert said(answers.lost_bits, by_domain).startswith(
        "Withdrawn, because these runs validated on batches of one domain"
    )
    assert "topk_hard" not in said(answers.lost_bits, other, by_domain), "such runs take no part in others"
    later = runs("softk", (1.0, 2.0), factor=1.25, bits_by_capacity=[("1", 2.5), ("1.25", 9.0)])
    assert said(answers.lost_bits, later) == (
        "Set after training: e8, 1 rule: softk with and without the limit are undecided (neither t nor TOST; margin 0.01): "
        "1.0000 (-5.3531 to 7.3531) bits per byte, n = 2 seeds."
    )
    nothing = "Not measured: this run has no trained rule that was evaluated with a capacity limit."
    assert answers.lost_bits(None).text == said(answers.lost_bits, runs("softk", (1.0,), causal=False)) == nothing
    assert said(answers.lost_bits, runs("softk", (1.0,), factor=float("nan"))) == nothing


def middle(text):
    return text.partition("middle: ")[2].partition(" with ")[0]


@pytest.mark.parametrize(
    ("lost", "said_middle"),
    [
        ({"softk": 0.3, "switch_top1": 0.2, "topk_hard": 0.1}, "switch_top1"),
        ({"softk": 0.4, "switch_top1": 0.1, "topk_hard": 0.3, "hash": 0.2}, "hash"),
        ({"softk": 0.4, "switch_top1": 0.1, "topk_hard": 0.3, "hash": 0.2, "gshard_top2": 0.5}, "topk_hard"),
    ],
)
def test_the_middle_rule_is_the_lower_of_two(lost, said_middle):
    """By what they lose, not by their names; of two rules there is none."""
    parts = [runs(name, (1.0, 1.1), bits=bits) for name, bits in lost.items()]
    text = said(answers.lost_bits, *parts, runs("softk", (1.0, 1.1), "small", bits=9.0))
    assert middle(text) == said_middle and f"e8, {len(lost)} rules: " in text, "of the config with most rules"
    assert text.partition("least: ")[2].startswith(min(lost, key=lost.__getitem__))
    assert text.partition("most: ")[2].startswith(max(lost, key=lost.__getitem__))
    two = said(answers.lost_bits, *parts[:2])
    assert "middle" not in two and "least: switch_top1" in two and "most: softk" in two


def test_loss_per_second():
    """The rules that no other beats in both, at the end of the schedule; one that sees later tokens is none of them."""
    rows = (
        runs("softk", (1.0, 1.0)),
        runs("switch_top1", (2.0, 2.0), speed=4000.0),
        runs("topk_hard", (1.5, 1.5)),
        runs("expert_choice", (0.1, 0.1), causal=False),
        *(runs(name, (0.2, 0.2), "e32", experts=32) for name in ("softk", "switch_top1")),  # fewer rules
    )
    assert said(answers.loss_per_second, *rows) == (
        "e8: of 3 causal rules at the end of equal schedules, no other has less loss in less time than switch_top1 2.0000 in 0.500 s; softk 1.0000 in 2.00 s "
        "(bits per byte; seconds of the steps alone)."
    )
    wide = said(answers.loss_per_second, runs("softk", (1.0, 1.2)))
    assert (
        "softk 1.1000 ± 1.2706 in 2.00 s (bits per byte ± half of the 95 % interval; seconds of the steps alone)"
        in wide
    )
    nothing = "Not measured: this run has no trained rule with a loss and a speed."
    assert answers.loss_per_second(None).text == said(answers.loss_per_second, rows[3]) == nothing


STEP = one("training", "ops", cell="a", tokens=8, median_us=30.0, ci_low_us=29.0, ci_high_us=31.0)
LAYER = one("layer", "auto", tokens=8, median_us=10.0)


def test_backward():
    """Of the fastest step; apart only where the layer alone was measured on the card."""
    slower = STEP | {"implementation": "sonicmoe", "median_us": 40.0}
    whole = "T8: ops takes 30.00 µs [29.00, 31.00] forward and backward"
    assert (
        answers.backward_apart(frame(STEP, slower, LAYER)).text
        == f"{whole}, of which the backward pass takes 20 µs, 2x the 10 µs of the layer alone."
    )
    apart = f"{whole}; apart it is not measured, as this run has no layer alone of the same cell and card."
    assert answers.backward_apart(frame(STEP, LAYER | {"gpu_uuid": "GPU-2"})).text == apart
    long = LAYER | {"median_us": 30.5}
    assert (
        answers.backward_apart(frame(STEP, long)).text
        == f"{whole}, no longer than the 30.5 µs of the layer alone: the difference of two measurements says nothing here."
    )
    assert answers.backward_apart(frame(LAYER)).text == "Not measured: this run has no layer forward and backward."
    two = answers.backward_apart(frame(STEP | {"skew": 0.0}, STEP | {"cell": "uneven", "skew": 0.7})).text
    assert two.count("apart it is not measured") == 1 and two.endswith("of the same cell and card."), "once for all"
    some = answers.backward_apart(frame(STEP, STEP | {"cell": "b", "tokens": 16}, LAYER)).text
    assert (
        "2x the 10 µs of the layer alone; T16: ops takes 30.00 µs [29.00, 31.00] forward and backward; apart it is"
        in some
    )
    assert two.count("T8: ") == 1 and "; T8 skew0.7: ops takes" in two, (
        "cells that differ in skew alone do not look alike"
    )


@pytest.mark.parametrize("trained", [None, table(runs("softk", (1.0, 1.1)))])
def test_every_question_has_an_answer(trained):
    found = answers.answers(frame(STEP), trained)
    assert [one.question.endswith("?") and bool(one.text) for one in found] == [True] * 3
