"""Loads, time against drops, and adapters as data: which marks each makes of rows whose numbers are known, and where it has none."""

import pandas as pd
import pytest
from rows import frame, one

from drawn import draw
from moe_routing_bench.figures import imbalance, row_groups, training_points
from moe_routing_bench.report import script_data

SIZES = {"tokens": 64, "top_k": 2, "experts": 8, "hidden": 32, "dtype": "bf16"}
ROUTED = {"median_us": 2.0, "tokens": 64, "top_k": 2, "sampler": "exact"}


def test_loads_and_drops():
    """A point per routing beside the line as asked; per capacity factor the median drops with their range, in percent, on a scale of their own."""
    rows = [
        one("pack", "cute", **ROUTED, experts=8, skew=0.5, load_cv=0.6, drop_rate=0.0),
        one("pack", "torch", **ROUTED, experts=8, skew=0.5, load_cv=0.6, drop_rate=0.0),
        one("pack", "cute", **ROUTED, experts=16, skew=1.5, load_cv=1.5, drop_rate=0.1, capacity_factor=1.0),
        one(
            "pack",
            "cute",
            **ROUTED | {"tokens": 128},
            experts=16,
            skew=1.5,
            load_cv=1.5,
            drop_rate=0.3,
            capacity_factor=1.0,
        ),
    ]
    found = imbalance.load_cv(frame(*rows))
    shown = [
        tuple(mark)
        for mark in found.marks[["series", "x", "y", "low", "high"]]
        .astype(object)
        .where(lambda values: values.notna(), None)
        .itertuples(index=False)
    ]
    assert shown == [
        ("as asked", 0, 0, None, None),
        ("as asked", 1.5, 1.5, None, None),
        ("E=8", 0.5, 0.6, None, None),
        ("E=16", 1.5, 1.5, None, None),
        ("E=16", 1.5, 1.5, None, None),
        ("capacity factor 1", 1.5, pytest.approx(20), pytest.approx(10), pytest.approx(30)),
        ("no limit", 0.5, 0, 0, 0),
    ]
    drops = found.marks["panel"].iloc[-1]
    assert drops == "dropped assignments (%)" == found.scales(drops)[1].label
    assert script_data.chart_data(found)["own"] == {
        drops: {"x": {"label": found.x.label, "kind": "linear"}, "y": {"label": drops, "kind": "linear"}}
    }
    assert list(found.marks["says"].iloc[-2:]) == ["median and range of 2 routings", "median and range of 1 routing"]
    assert found.marks[found.marks["series"].str.startswith("E=")]["join"].nunique() == 3, "no line joins routings"
    free = [*rows[:2], rows[2] | {"capacity_factor": None, "drop_rate": 0.0}]
    assert imbalance.load_cv(frame(*free)).marks["panel"].nunique() == 1, "without a limit nothing is dropped"
    assert imbalance.load_cv(frame(*rows[:2])).reason == "all loads were drawn with one skew"
    assert imbalance.load_cv(frame(one("gate", "cute"))).reason == "no ok row has a skew and a load"


def test_no_share_below_nothing_is_drawn():
    """The axis of drops begins at nothing, with room for the marks that stand on it."""
    routed = [one("pack", "cute", **ROUTED, experts=8, skew=skew, load_cv=skew, drop_rate=0.0) for skew in (0.0, 0.5)]
    axes = draw("load_cv", frame(*routed, routed[0] | {"skew": 1.5, "drop_rate": 0.2}))[0].axes[1]
    low, high = axes.get_ylim()
    assert -0.05 * high <= low <= 0 and 20 <= high <= 40


def test_fronts_of_each_card():
    """What no other row of the card beats in time and drops is joined; a panel per skew, a mark per factor."""

    def ran(us, drop, name="cute", **values):
        return one(
            "routing",
            name,
            median_us=us,
            ci_low_us=us - 1,
            ci_high_us=us + 1,
            drop_rate=drop,
            **{"skew": 1.0, "tokens": 64, "capacity_factor": None} | values,
        )

    rows = [
        ran(20.0, 0.0),
        ran(10.0, 0.25, capacity_factor=1.0),
        ran(30.0, 0.25, name="torch", capacity_factor=1.0),
        ran(5.0, 0.25, capacity_factor=1.0, gpu_uuid="GPU-2"),
        ran(15.0, 0.0, skew=0.0),
        ran(14.0, 0.0, skew=0.0, capacity_factor=1.0),
    ]
    found = imbalance.pareto(frame(*rows))
    marks = found.marks
    assert list(marks["panel"].unique()) == ["dropped assignments (%), skew 1"], "at skew 0 both factors drop the same"
    assert len(found.shown) == len(marks), "rows that are not drawn are not counted"
    assert [
        (x, y, join)
        for x, y, join in marks[["x", "y", "join"]]
        .astype(object)
        .where(lambda values: values.notna(), None)
        .itertuples(index=False)
    ] == [
        (0, 20, "GPU-1"),
        (25, 10, "GPU-1"),
        (25, 30, None),
        (25, 5, "GPU-2"),
    ]
    assert list(marks["says"].iloc[:2]) == ["capacity factor none", "capacity factor 1"] and marks["low"].iloc[0] == 19
    assert found.scales(marks["panel"].iloc[0])[1].kind == "log" and found.y.label == "routing time (µs)"
    even = imbalance.pareto(frame(*rows[:2], ran(12.0, 0.1, skew=0.5)))
    assert even.y.kind == "linear"
    apart = imbalance.pareto(frame(rows[0], ran(12.0, 0.1, skew=0.5)))
    assert apart.marks.empty and apart.reason == "drops and padding are the same at every skew of the shape"
    assert (
        imbalance.pareto(frame(rows[0], ran(12.0, 0.0, skew=2.0))).reason
        == "drops and padding are the same in all cells of the shape"
    )
    assert imbalance.pareto(frame(rows[0])).reason == "no shape was measured with two skews or capacity factors"


def test_adapters():
    """A line per variant through its ranks, against either count of parameters, each on a logarithmic scale of its own."""

    def runs(variant, rank, losses, params):
        base = {
            "label": "py",
            "config_hash": "a",
            "variant": variant,
            "rank": rank,
            "params": params,
            "active_params": params // 2,
            "lr": 0.1,
            "router": "softk",
            "experts": 8,
            "base_params": 2e7,
            "domains": ["b"],
            "old_domains": ["a"],
            "purpose": "final",
        }
        return [
            base
            | {
                "run": f"{variant}{rank}{seed}",
                "seed": seed,
                "step": step,
                "bits_per_byte": loss + 1 - step,
                "old_bits_per_byte": 1.0,
            }
            for seed, loss in enumerate(losses)
            for step in (0, 1)
        ]

    table = pd.DataFrame([*runs("R", 8, (1.0, 1.2), 400), *runs("R", 2, (1.5, 1.5), 100), *runs("S", 2, (2.0,), 50)])
    found = training_points.perft(table)
    shown = [tuple(mark) for mark in found.marks[["series", "x", "y", "says"]].itertuples(index=False)]
    assert shown[:3] == [
        ("PERFT-R", 100, 1.5, "rank 2, n = 2 seeds"),
        ("PERFT-S", 50, 2.0, "rank 2, n = 1 seeds"),
        ("PERFT-R", 400, pytest.approx(1.1), "rank 8, n = 2 seeds"),
    ]
    assert [one[1] for one in shown[3:]] == [50, 25, 200]
    scales = [found.scales(panel)[0] for panel in found.marks["panel"].unique()]
    assert [(one.label, one.kind) for one in scales] == [
        ("trainable parameters", "log"),
        ("trainable parameters that a token meets", "log"),
    ]
    assert found.marks["low"].iloc[0] == 1.5 and found.marks["low"].iloc[2] < 1.1 < found.marks["high"].iloc[2]
    assert training_points.perft(table.iloc[:0]).reason == "no final adaptation of a trained run"


def test_one_skew_is_no_axis():
    """On paper as on the page there is nothing to draw, so that neither a line nor a picture of one point stands there."""
    rows = frame(
        *(
            one("pack", "cute", **ROUTED | {"tokens": tokens}, experts=8, skew=0.0, load_cv=0.0, drop_rate=0.0)
            for tokens in (64, 128)
        )
    )
    assert imbalance.load_cv(rows).reason == "all loads were drawn with one skew"
    texts = [text.get_text() for axes in draw("load_cv", rows)[0].axes for text in axes.texts]
    assert texts and all("all loads were drawn with one skew" in text for text in texts)


def test_the_middle_of_three_routings_is_shown():
    rows = [
        one("pack", **ROUTED, experts=8, skew=0.5, load_cv=cv, drop_rate=drop, capacity_factor=1.0)
        for cv, drop in ((0.5, 0.1), (0.6, 0.2), (0.7, 0.6))
    ]
    found = imbalance.load_cv(frame(*rows, rows[0] | {"skew": 1.0, "load_cv": 1.0}))
    mark = found.marks[(found.marks["series"] == "capacity factor 1") & (found.marks["x"] == 0.5)]
    assert mark[["y", "low", "high"]].to_numpy(float).tolist() == [pytest.approx([20, 10, 60])]


def test_a_cost_is_in_percent():
    rows = [
        one(
            "routing",
            median_us=us,
            ci_low_us=us,
            ci_high_us=us,
            skew=0.0,
            drop_rate=drop,
            capacity_factor=factor,
            **SIZES,
        )
        for us, drop, factor in ((1.0, 0.25, 1.0), (2.0, 0.0, 2.0))
    ]
    assert sorted(imbalance.pareto(frame(*rows)).marks["x"]) == [0, 25]


def test_a_front_has_no_point_that_costs_more_for_the_same_time():
    """Nor one that takes longer at the same cost; of equal points it has the first."""
    points = pd.DataFrame({"x": [1.0, 2.0, 3.0, 3.0, 4.0, 1.0], "y": [9.0, 9.0, 7.0, 7.0, 8.0, 10.0]})
    assert list(row_groups.front(points, "x", "y").index) == [0, 2]
