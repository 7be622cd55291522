"""Figures of training runs as data and on paper: marks that are told apart, scales that may be compared, and the curve of loss by learning rate."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Annotation

from moe_routing_bench.figures import palette, paper, training_lines, training_points
from moe_routing_bench.figures.chart import Chart, Scale, marks
from moe_routing_bench.quality import run_rows
from moe_routing_bench.report.script_data import chart_data
from moe_routing_kernels.routers.zoo import ZOO


def rows(label: str, routers: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    """Final rows of two seeds of each rule."""
    common = dict.fromkeys(run_rows.COLUMNS) | {
        "label": label,
        "purpose": "final",
        "network": "linear",
        "drop_policy": "position",
        "train_mode": "joint",
        "experts": 8,
        "top_k": 2,
        "steps": 100,
        "step": 100,
        "params": 10**6,
        "causal": True,
        "lr": 0.002,
        "val_loss": 1.0,
        "batch": 1,
        "sequence": 1,
        "step_mode": run_rows.GRAPH,
        "timed_alone": True,
        "device": "GPU",
        "platform": "gpu",
        "torch_version": "2",
        "ended_at": "9",
    }
    return [
        common
        | {"run": f"{label}{router}{seed}", "router": router, "seed": seed, "bits_per_byte": 1.5 + 0.1 * seed + i / 100}
        | more
        for i, router in enumerate(routers)
        for seed in (0, 1)
    ]


def table(*several: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([row for group in several for row in group], dtype=object).infer_objects()


def test_no_two_rules_of_a_figure_share_colour_and_mark() -> None:
    """All rules of the zoo at once, and several contestants of one rule."""
    names = [*ZOO, "dense", "softk cf1.0", "softk cf1.25", "softk cfnone", "softk+mlp"]
    colors = {name: palette.router(name.split("+")[0].split(" ")[0]) for name in names}
    symbols = palette.symbols(colors)
    assert len({(colors[name], symbols[name]) for name in names}) == len(names)
    assert all(symbols[name] == palette.symbol(name) for name in [*ZOO, "dense"]), "a rule has its own everywhere"
    chart = Chart("points", Scale("x"), Scale("y"), marks([]), colors, table(rows("a", ["softk"])))
    assert {one["name"]: one["symbol"] for one in chart_data(chart)["legend"]} == symbols


def test_names_of_points_have_marks_and_no_lines() -> None:
    """Lines from points to names would cross; lines of one last place do not, and keep theirs."""
    found = table(
        rows("a", list(ZOO)[:12], train_tokens_per_s=1e6),
        rows("b", ["softk", "base"], train_tokens_per_s=3e6, experts=32),
    )
    figure = paper.drawn(training_points.quality_pareto(found), "t", "quality")
    for axes in figure.axes:
        names = [text for text in axes.texts if isinstance(text, Annotation) and text.get_text() in ZOO]
        marks = [line for line in axes.lines if line.get_transform() == axes.transAxes]
        assert names and all(text.arrow_patch is None for text in names) and len(marks) == len(names)
        looks = {(line.get_color(), line.get_marker()) for line in marks}
        assert len(looks) == len(names)


def test_panels_share_a_scale_of_speeds() -> None:
    """So that a length means the same in each; on the page too."""
    found = table(
        rows("a", ["softk", "base"], train_tokens_per_s=1e6),
        rows("b", ["softk", "base"], train_tokens_per_s=3e6, experts=32),
    )
    chart = training_points.quality_pareto(found)
    first, second = (axes.get_xlim() for axes in paper.drawn(chart, "t", "quality").axes[:2])
    assert first == second and first[0] <= 1e6 and first[1] >= 3e6 and chart_data(chart)["shared"]


@pytest.mark.parametrize(("lr", "kind"), [(0.002, training_lines.BEST), (0.004, training_lines.EDGE)])
def test_the_curve_of_rates_has_seeds_and_winner(lr: float, kind: str) -> None:
    """In bits per byte; a winner at the edge of its grid is marked as such."""
    several = {0.001: [1.3, 1.5], 0.002: [1.0, 1.2], 0.004: [1.1, 1.3]}
    pilots = {
        "pilot_lrs": list(several),
        "pilot_losses": [1.4, 1.1, 1.2],
        "pilot_losses_by_seed": list(several.values()),
    }
    found = training_lines.learning_rates(table(rows("a", ["softk"], lr=lr, bits_per_byte=3.0, val_loss=2.0, **pilots)))
    points = found.marks[found.marks["series"] == "softk"]
    line = points[points["join"] == "mean"]
    assert list(line["x"]) == list(several) and list(line["y"]) == pytest.approx([2.1, 1.65, 1.8])
    assert sorted(points.loc[points["join"] != "mean", "y"]) == pytest.approx([1.5, 1.65, 1.8, 1.95, 1.95, 2.25])
    (best,) = found.marks[found.marks["series"] == kind].to_dict("records")
    assert (best["x"], best["y"], best["says"]) == (lr, pytest.approx({0.002: 1.65, 0.004: 1.8}[lr]), "softk")
    assert set(found.marks["series"]) == {"softk", kind} == set(found.colors)
    none = training_lines.learning_rates(table(rows("a", ["softk"])))
    assert none.marks.empty and "none of 2 final runs has pilots" in none.reason


def test_curves_are_held_against_the_dense_model_or_else_the_rule_that_ends_best() -> None:
    """At equal seed and step."""
    bits = {"a": (3.0, 2.0), "b": (9.0, 1.0), "dense": (8.0, 5.0)}
    table = pd.DataFrame(
        [
            {"contestant": name, "seed": 1, "step": step, training_lines.Y: value}
            for name, values in bits.items()
            for step, value in enumerate(values)
        ]
    )
    for rows, base, differences in (
        (table, "dense", [-5.0, -3.0, 1.0, -4.0]),
        (table[table["contestant"] != "dense"], "b", [-6.0, 1.0]),
    ):
        found, others = training_lines._paired(rows)
        assert found == base and others["difference"].tolist() == differences
