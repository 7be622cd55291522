"""Numbers that figures make of rows, each by itself: shares, ratios, counts, orders and texts, of values that all differ."""

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.figures import (
    ceilings,
    composites,
    footer,
    formats,
    imbalance,
    paper,
    row_groups,
    times,
    training_points,
)
from moe_routing_bench.figures import training_rows as training
from moe_routing_bench.figures.chart import Chart, Scale, marks
from moe_routing_kernels.routers.zoo import ZOO


def test_parts_of_a_composite_lie_one_after_the_other():
    """By their order in the stages, whatever the order of the row; shares of their sum, not of the time of the whole."""
    row = pd.Series({"stage_us": [("combine", 5.0), ("router", 1.0), ("permute+pack", 4.0)], "median_us": 20.0})
    row = pd.concat([row, pd.Series({"ci_low_us": 19.0, "ci_high_us": 21.0})])
    found = composites._parts(row)
    assert [(part["series"], part["low"], part["high"]) for part in found] == [
        ("router", 0.0, 0.1),
        ("permute+pack (fused)", 0.1, 0.5),
        ("combine", 0.5, 1.0),
    ]
    assert [part["x"] for part in found] == [0.1, 0.4, 0.5]
    assert [part["text"] for part in found] == ["10 %", "40 %", "50 %"]
    assert found[1]["says"] == "40%: 4 µs of 10 µs; the whole takes 20 µs"


def composite(cell, times_, model=None, tokens=8, skew=0.0):
    return [
        one(
            "routing",
            name,
            cell=cell,
            median_us=us,
            ci_low_us=us - 1,
            ci_high_us=us + 2,
            model=model,
            tokens=tokens,
            skew=skew,
        )
        for name, us in times_.items()
    ]


def test_the_cells_of_a_crossover_are_over_their_own_fastest():
    """With both ends over the same time; cells of models come first."""
    rows = frame(
        *composite("b", {"cute": 10.0, "torch": 40.0}), *composite("a", {"torch": 4.0, "cute": 8.0}, "olmoe-1b-7b")
    )
    found = composites.choose_cells(rows)
    assert found[["cell", "implementation", "behind", "low", "high"]].to_numpy().tolist() == [
        ["a", "torch", 1.0, 0.75, 1.5],
        ["a", "cute", 2.0, 1.75, 2.5],
        ["b", "cute", 1.0, 0.9, 1.2],
        ["b", "torch", 4.0, 3.9, 4.2],
    ]


def test_a_cell_of_one_implementation_is_no_comparison():
    both, alone = composite("a", {"cute": 1.0, "torch": 2.0}), composite("b", {"cute": 1.0})
    assert set(composites._several(frame(*both, *alone))["cell"]) == {"a"}


def test_the_cells_that_are_shown_are_those_with_most_implementations_and_tokens():
    """One of each model first; then less skew of equal ones. Of a cell the fastest."""
    three = {"cute": 1.0, "torch": 2.0, "triton": 3.0}
    rows = [
        *composite("few", {"cute": 1.0, "torch": 2.0}, tokens=4096),
        *composite("small", three, tokens=64),
        *composite("skewed", three, tokens=512, skew=1.0),
        *composite("even", three, tokens=512),
        *composite("model", {"cute": 1.0}, "olmoe-1b-7b", tokens=1),
    ]
    shown = composites.choose(frame(*rows))
    assert list(shown["cell"].unique()) == ["model", "even", "skewed", "small", "few"]
    names = [f"i{i}" for i in range(composites.MOST_PER_CELL)]
    cells = [
        row
        for i in range(8)
        for row in composite(f"c{i}", {name: 1.0 + i for i, name in enumerate(names)}, tokens=8 - i)
    ]
    assert list(composites.choose(frame(*cells))["cell"].unique()) == [f"c{i}" for i in range(5)], "30 bars, of 6 each"
    names = [f"i{i}" for i in range(composites.MOST_PER_CELL + 3)]
    many = composites.choose(frame(*composite("a", {name: 9.0 - i for i, name in enumerate(names)})))
    assert set(many["implementation"]) == set(names[3:])


def test_cells_of_two_benches_are_not_one():
    """Though they have one key."""
    rows = frame(*(one(bench, cell=cell, tokens=8) for bench, cell in (("gate", "a"), ("pack", "a"), ("pack", "b"))))
    assert row_groups.shown_of(rows.iloc[:2], rows) == "2 of 3 cells" and row_groups.shown_of(rows, rows) == ""


def test_the_line_below_a_figure():
    """Samples of all rows, cells of each bench, days in order, cards once each."""
    rows = frame(
        *(
            one(bench, cell=cell, samples=samples, gpu_name="H200", torch_version="2.9", started_at=day, cold=True)
            for bench, cell, samples, day in (
                ("gate", "a", 1000, "2026-11-22T01:00"),
                ("pack", "a", 200, "2026-11-21T01:00"),
                ("pack", "a", 34, "2026-11-22T01:00"),
            )
        )
    )
    assert footer.measured(rows) == (
        "H200 | torch 2.9 | 2026-11-21 to 2026-11-22 | n = 3 rows of 2 cells, 1,234 samples | medians, device time, cold L2"
    )
    assert footer.measured(rows.iloc[:0]) == "no measured rows"


@pytest.mark.parametrize(
    ("warm", "of", "said"),
    [
        (0, 4, "cold L2"),
        (4, 4, "L2 may be warm"),
        (1, 4, "cold L2 but for 25% of rows"),
        (1, 400, "cold L2 but for 1% of rows"),
        (399, 400, "cold L2 but for 99% of rows"),
    ],
)
def test_the_share_of_warm_rows(warm, of, said):
    """Neither none nor all where it is neither; a row that does not say is one that may be warm."""
    cold = pd.Series([False] * warm + [True] * (of - warm), dtype=object)
    assert footer.caches(pd.DataFrame({"cold": cold})) == said
    assert footer.caches(pd.DataFrame({"cold": cold.where(cold, None)})) == said


def test_the_line_below_training_runs():
    """Runs are counted and not rows; one seed has no intervals."""
    rows = pd.DataFrame(
        {"run": ["a", "a", "b"], "seed": [1, 1, 2], "device": "H200", "torch_version": "2.9", "causal": True}
    )
    rows["ended_at"] = "2026-11-22T01:00"
    known = "H200 | torch 2.9 | 2026-11-22 | n = 2 runs | "
    assert footer.runs(rows, "training runs") == f"{known}means over seeds, 95 % CI by Student's t"
    alone = footer.runs(rows.assign(seed=1), "training runs")
    assert alone == f"{known}one seed: no intervals over seeds, differences may be chance"
    assert " sees later tokens: not ranked" in footer.runs(rows.assign(causal=[True, True, False]), "training runs")


def test_shapes_of_a_pareto_are_counted():
    """The one with most settings is drawn, of how many shapes, not rows."""

    def ran(tokens, factor, us):
        known = {"drop_rate": 1 / tokens + (factor or 0) / 10, "capacity_factor": factor, "skew": 1.0, "experts": 8}
        return one("routing", tokens=tokens, median_us=us, ci_low_us=us, ci_high_us=us, **known)

    rows = [ran(64, factor, 2.0) for factor in (None, 1.0)] + [ran(512, factor, 3.0) for factor in (None, 1.0, 2.0)]
    found = imbalance.pareto(frame(*rows))
    assert found.note == "routing: T512 E8, 2 shapes measured" and len(found.marks) == 3


def test_rules_are_kept_by_the_mean_of_their_bits():
    """Less what their entry has in the middle; what is no rule comes first, then the dense model."""
    shown = pd.DataFrame(
        [
            ("e", "a", 1.0),
            ("e", "a", 3.0),
            ("e", "b", 2.1),
            ("e", "b", 2.2),
            ("f", "a", 9.0),
            ("f", "dense", 9.5),
            ("f", "b", 9.2),
        ],
        columns=["label", "router", "bits_per_byte"],
    )
    names = ["b", "a", "dense", "best rate"]
    found = [{"panel": "p", "series": name, "x": 1, "y": 1} for name in names]
    chart = Chart("lines", Scale("x"), Scale("y"), marks(found), dict.fromkeys(names, "#000000"), shown)
    assert row_groups.preferred(chart) == ["best rate", "dense", "a", "b"]


def test_only_causal_rules_have_a_front():
    """In each panel: none slower and none with more bits."""
    points = [
        ("p", 1.0, 3.0),
        ("p", 2.0, 2.0),
        ("p", 1.5, 4.0),
        (f"p: {training_points.training_rows.NOT_CAUSAL} rules", 9.0, 1.0),
    ]
    found = training_points._joined(pd.DataFrame(points, columns=["panel", "x", "y"]))
    assert [value == "front" for value in found["join"]] == [False, True, False, False]


def test_why_no_bandwidth_is_drawn():
    """Rows with operations alone are no bench that moves data; without rows it is for want of them."""
    computed = one("experts", median_us=1.0, flops=8)
    assert ceilings.bandwidth(frame(computed)).reason == "no bench that only moves data was measured"
    assert ceilings.bandwidth(frame(one("gate", flops=0, status="crashed"))).reason.startswith("0 of 1 gate rows ok")


def test_the_roof_bends_where_the_ceilings_meet():
    """At 500 TFLOP/s over 2,000 GB/s, 250 FLOPs per byte; below it bytes bind, above it operations."""
    rows = pd.DataFrame({"copy_gb_per_s": [2000.0] * 3, "peak_tflops": [500.0] * 3})
    rows = rows.assign(flops=[100.0, 3000.0, 400.0], compulsory_bytes=[1.0, 2.0, 4.0])
    points = [(point["x"], point["y"]) for point in ceilings._roof("experts", rows)]
    assert points == [(50.0, 100.0), (250.0, 500.0), (3000.0, 500.0)]
    assert ceilings._roof("experts", rows.assign(peak_tflops=float("nan"))) == []


def test_a_panel_is_logarithmic_where_a_quarter_lies_far_below_the_copy():
    def part(*rates):
        return pd.DataFrame({"gb_per_s": rates, "copy_gb_per_s": 3000.0})

    assert ceilings._mostly_far_below(part(10.0, 20.0, 2000.0, 2500.0))
    assert not ceilings._mostly_far_below(part(10.0, 2000.0, 2200.0, 2500.0, 2600.0))


def test_a_model_of_several_names_and_its_sizes_share_a_panel():
    """Each name once, in order."""
    rows = frame(*(one("layer", tokens=8, hidden=64, model=model) for model in ("b", "a", "b", None)))
    assert set(times._panels(rows)) == {"layer: H64 (a, b)"}


def test_of_a_bench_the_shape_of_most_numbers_of_tokens_comes_first():
    rows = [
        one("gate", tokens=tokens, experts=experts, median_us=1.0)
        for experts, counts in ((8, (1, 2)), (16, (1, 2, 4)), (32, (1, 2)))
        for tokens in counts
    ]
    found = times.over_tokens(frame(*rows)).marks["panel"]
    assert list(found.unique()) == ["gate: E16", "gate: E32", "gate: E8"]


def test_a_training_step_is_no_decoding():
    rows = [one(bench, tokens=8, median_us=1.0) for bench in ("training", "layer")]
    assert list(times.decode(frame(*rows)).marks["panel"].unique()) == ["layer: T8"]


@pytest.mark.parametrize(
    ("high", "verdict", "other", "ties"),
    [
        (1.02, "undecided", "cute", ["cute", "torch"]),
        (0.99, "undecided", "cute", ["cute"]),
        (1.02, "slower", "cute", ["cute"]),
        (1.02, "undecided", "triton", ["cute"]),
    ],
)
def test_who_ties_with_the_fastest(high, verdict, other, ties):
    """Whose interval of the ratio to it ends above 1, though it begins below, and whom no verdict calls slower."""
    known = {"best_other": other, "best_speedup_ci_low": 0.9, "best_speedup_ci_high": high, "best_verdict": verdict}
    cell = frame(
        one("routing", "torch", cell="a", median_us=2.0, **known), one("routing", "cute", cell="a", median_us=1.0)
    )
    assert composites.winners(cell) == ties


def test_a_format_that_follows_another_is_not_said():
    formats = {"dtype": "fp16", "packed": "fp16", "weights": "int4_g128"}
    assert list(row_groups.labels(frame(one("experts", tokens=8, **formats)))) == ["T8 fp16 weights-int4_g128"]
    plain = frame(one("experts", tokens=8, **formats | {"weights": "fp16", "packed": "fp8_row"}))
    assert list(row_groups.labels(plain)) == ["T8 fp16 packed-fp8_row"]


def test_contestants_are_in_the_order_of_the_zoo_not_of_their_names():
    """The dense model first, what the zoo has not last, and contestants of one rule by name."""
    first, second, third = sorted(list(ZOO)[:3], reverse=True)
    place = {name: number for number, name in enumerate(ZOO)}
    rules = sorted((first, second, third), key=place.__getitem__)
    names = [*rules, "dense", "another", f"{rules[1]} cf1"]
    routers = [*rules, "dense", "another", rules[1]]
    rows = pd.DataFrame({"contestant": names, "router": routers}).sort_values("contestant")
    found = [name for name, _ in training.ordered(rows)]
    assert found == ["dense", rules[0], rules[1], f"{rules[1]} cf1", rules[2], "another"]
    assert [len(group) for _, group in training.ordered(pd.concat([rows, rows[:2]]))].count(2) == 2


def test_of_each_number_of_experts_the_first_config_of_most_rules_is_compared():
    about = {"params": 2e6, "top_k": 2.0, "steps": 1000.0, "tokens_seen": 3e6}
    rows = pd.DataFrame(
        [
            about | {"label": label, "experts": float(experts), "router": router, "seed": seed}
            for label, experts, routers in (
                ("late", 32, "ab"),
                ("few", 8, "a"),
                ("first", 8, "abc"),
                ("second", 8, "abd"),
                ("fewer", 8, "ab"),
            )
            for router in routers
            for seed in (1, 2)
        ]
    )
    found = training.contests(rows)
    assert [title.partition(":")[0] for title, _ in found] == ["first", "late"]
    assert found[0][0] == "first: E=8, k=2, 2 M parameters, 1,000 steps, 3 MB (n = 2 seeds)"
    sizes = rows[rows["label"] == "few"].assign(params=[1e6, 2.5e6], tokens_seen=[1e6, 4e6], seed=7)
    assert training.describe(sizes) == "few: E=8, k=2, 1 to 2.5 M parameters, 1,000 steps, 4 MB (n = 1 seed)"


def test_a_mean_has_no_interval_of_one_seed_and_lacks_what_is_missing():
    assert training.interval(pd.Series([2.0])) == (2.0, 0.0)
    mean, half = training.interval(pd.Series([1.0, float("nan"), 3.0]))
    assert mean == 2.0 and half == pytest.approx(12.706 * 2**0.5 / 2**0.5, rel=1e-4), "t of one degree of freedom"
    seen = pd.DataFrame({"tokens_seen": [2e6, 1e6, 1e6], "x": [9.0, 1.0, 3.0]})
    at, means, halves = training.over_tokens(seen, "x")
    assert (at.tolist(), means.tolist(), halves.tolist()) == (
        [1.0, 2.0],
        [2.0, 9.0],
        [pytest.approx(12.706, rel=1e-4), 0.0],
    )


def test_the_fastest_of_ours_of_each_format_size_and_card():
    """Whatever the order of rows; formats in the order of their table, those of others left out."""
    sizes = {"hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2, "dtype": "bf16", "packed": "bf16"}

    def row(name, us, weights, tokens=8, **values):
        return one("experts", name, **sizes | {"weights": weights, "tokens": tokens, "median_us": us} | values)

    rows = [
        row("cute", 9.0, "bf16"),
        row("dequant", 7.0, "int4_g128"),
        row("cute_quantised", 5.0, "int4_g128"),
        row("marlin", 1.0, "int4_g128"),
        row("dequant", 6.0, "int4_g128", gpu_uuid="GPU-2"),
        row("cute_quantised", 8.0, "int8_g128"),
        row("dequant", 4.0, "int8_g128", tokens=16),
        row("cute", 2.0, "bf16", hidden=128),
    ]
    found = formats.fastest(formats.with_quantised(frame(*rows)))
    kept = list(zip(found["tokens"], found["format"], found["card"], found["implementation"], strict=True))
    order = [name for name in formats.NAMES if name in ("bf16", "int8_g128", "int4_g128")]
    assert sorted(kept[:4], key=lambda one: order.index(one[1])) == kept[:4], "of 8 tokens, in the order of the table"
    assert set(kept) == {
        (8, "bf16", "GPU-1", "cute"),
        (8, "int4_g128", "GPU-1", "cute_quantised"),
        (8, "int4_g128", "GPU-2", "dequant"),
        (8, "int8_g128", "GPU-1", "cute_quantised"),
        (16, "int8_g128", "GPU-1", "dequant"),
    }
    assert len(kept) == 5, "a shape without quantised weights has no format to compare"


def test_padding_at_another_capacity_factor_is_a_point_of_its_own():
    """Two benches of one routing and layout are one point, as they pad alike."""
    about = {"tokens": 8, "experts": 4, "top_k": 2, "skew": 0.5, "load_cv": 0.4, "median_us": 1.0, "dtype": "bf16"}
    rows = [
        one(bench, layout=layout, capacity_factor=factor, padding_waste=waste, **about)
        for bench in ("pack", "combine")
        for layout, factor, waste in (
            ("padded", 1.0, 0.5),
            ("padded", 2.0, 1.5),
            ("compact", 1.0, 0.0),
            ("compact", 2.0, 0.0),
        )
    ]
    marks_ = imbalance.padding(frame(*rows)).marks
    found = sorted(zip(marks_["series"], marks_["x"], marks_["y"], strict=True))
    assert found == [("compact", 0.4, 1.0)] * 2 + [("padded", 0.4, 1.5), ("padded", 0.4, 2.5)]


@pytest.mark.parametrize(("half_ms", "reach"), [(0.0, 12.7062 * 100.0), (0.5, 12.7062 * 100.0), (20.0, 2000.0)])
def test_the_interval_of_a_speed_is_that_of_seeds_or_of_blocks_whichever_is_wider(half_ms, reach):
    """Two seeds of 900 and 1100 bytes a second; half of a step of 10 ms that is known to so many ms is so large a share of the speed."""
    rows = pd.DataFrame(
        {
            "train_tokens_per_s": [900.0, 1100.0],
            "bits_per_byte": [2.0, 2.0],
            "step_ms": 10.0,
            "step_half_width_ms": half_ms,
            "causal": True,
        }
    )
    found = training_points._mark("t", "a", rows)
    assert (found["x"], found["y"], found["low"]) == (1000.0, 2.0, 2.0)
    assert (found["x_high"] - found["x"], found["x"] - found["x_low"]) == (pytest.approx(reach, rel=1e-4),) * 2


def test_the_chart_of_the_scale_model_is_of_ways_without_tensor_parallelism(tmp_path):
    common = {"model": "m", "gpus": 8, "tokens": 64, "skew": 0.5, "tp": 1, "error_median": 0.1, "error_p90": 0.2}
    rows = [
        common | {"ep": ep, "layer_us": us, "drawn_us": us + 1, "planned_us": None} for ep, us in ((8, 20.0), (1, 90.0))
    ]
    paper.scaling(rows, tmp_path / "a.svg")
    paper.scaling([*rows, rows[1] | {"tp": 8, "layer_us": 5.0, "drawn_us": 5.0}], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
