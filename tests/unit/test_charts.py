"""Figures as data: which marks each makes of rows whose numbers are known, where it has none, and what the page is given of them."""

import collections
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb
from rows import frame, one

from drawn import draw
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.figures import FIGURES, ceilings, formats, imbalance, matrices, palette, panels, paper, times
from moe_routing_bench.figures.chart import DOUBTFUL, Chart, Scale, legend_of_doubts, look, marks
from moe_routing_bench.report import page, render, row_data, script_data
from moe_routing_bench.report.row_data import row_id


def ran(bench, implementation, us, **values):
    return one(bench, implementation, median_us=us, ci_low_us=us - 1, ci_high_us=us + 1, **values)


def shown(chart, *names):
    return [tuple(mark) for mark in chart.marks[list(names)].itertuples(index=False)]


def test_time_against_tokens():
    """A line per implementation through cells equal but for the tokens; one size is no line; composites come first."""
    rows = [
        ran(bench, name, us, tokens=t, experts=8, **values)
        for bench, name, us, t, values in (
            ("gate", "cute", 2.0, 64, {}),
            ("gate", "cute", 3.0, 512, {}),
            ("gate", "torch", 9.0, 64, {"gpu_uuid": "GPU-2"}),
            ("gate", "cute", 7.0, 64, {"dtype": "fp32"}),
            ("layer", "cute", 50.0, 512, {"model": "qwen3-30b-a3b"}),
            ("layer", "cute", 20.0, 64, {}),
        )
    ]
    found = times.over_tokens(frame(*rows))
    assert shown(found, "panel", "series", "x", "y", "join") == [
        ("layer: E8 (qwen3-30b-a3b)", "cute", 64, 20, "GPU-1"),
        ("layer: E8 (qwen3-30b-a3b)", "cute", 512, 50, "GPU-1"),
        ("gate: E8", "cute", 64, 2, "GPU-1"),
        ("gate: E8", "torch", 64, 9, "GPU-2"),
        ("gate: E8", "cute", 512, 3, "GPU-1"),
    ]
    assert times.over_tokens(frame(rows[0], rows[3])).reason.startswith(
        "no shape was measured at two numbers of tokens"
    )


@pytest.mark.parametrize("name", ["over_tokens", "formats"])
def test_cells_of_several_cards_are_one_line(name):
    """A line of four numbers of tokens was two that crossed, of one colour; where two cards measured one number, each has its line."""
    weights = {"dtype": "bf16", "packed": "bf16", "weights": "int4_g128", "gpu_name": "NVIDIA H200"}
    rows = [
        ran("experts", "cute", 10.0 + tokens, tokens=tokens, gpu_uuid=card, **weights)
        for tokens, card in ((1, "GPU-1"), (8, "GPU-2"), (64, "GPU-1"), (512, "GPU-2"))
    ]
    assert set(FIGURES[name].chart(frame(*rows)).marks["join"]) == {"NVIDIA H200"}
    twice = ran("experts", "cute", 90.0, tokens=64, gpu_uuid="GPU-2", **weights)
    assert set(FIGURES[name].chart(frame(*rows, twice)).marks["join"]) == {"GPU-1", "GPU-2"}


def test_a_line_of_a_format_is_of_one_card():
    """Of two cards both are drawn, though one is faster."""
    rows = [
        ran("experts", "cute", us + tokens, tokens=tokens, dtype="bf16", packed="bf16", weights=weights, gpu_uuid=card)
        for card, us in (("GPU-1", 10.0), ("GPU-2", 20.0))
        for weights in ("bf16", "int4_g128")
        for tokens in (1, 8)
    ]
    assert sorted(shown(formats.formats(frame(*rows)), "series", "join", "x", "y")) == [
        (weights, card, tokens, us + tokens)
        for weights in ("bf16", "int4_g128")
        for card, us in (("GPU-1", 10.0), ("GPU-2", 20.0))
        for tokens in (1, 8)
    ]


def test_decode_sizes():
    """At most 64 tokens; whole layers before stages; fastest first."""
    rows = [
        ran("gate", "cute", 2.0, cell="a", tokens=64),
        ran("gate", "torch", 1.0, cell="a", tokens=64),
        ran("layer", "cute", 5.0, tokens=8),
        ran("gate", "cute", 9.0, tokens=65),
    ]
    assert shown(times.decode(frame(*rows)), "panel", "y", "x") == [
        ("layer: T8", "cute", 5),
        ("gate: T64", "torch", 1),
        ("gate: T64", "cute", 2),
    ]
    assert "no cell of at most 64 tokens" in times.decode(frame(rows[3])).reason


@pytest.mark.parametrize(
    ("values", "floor", "binds"),
    [
        ({"compulsory_bytes": 8_000_000, "copy_gb_per_s": 4000.0}, 2.0, "bytes"),
        (
            {"flops": 7_000_000_000, "peak_tflops": 700.0, "compulsory_bytes": 8_000_000, "copy_gb_per_s": 4000.0},
            10.0,
            "MMA rate",
        ),
        (
            {"timer": "cuda_graph", "graph_node_us": 3.0, "compulsory_bytes": 8_000_000, "copy_gb_per_s": 4000.0},
            3.0,
            "launch",
        ),
        (
            {"timer": "events", "graph_node_us": 3.0, "compulsory_bytes": 8_000_000, "copy_gb_per_s": 4000.0},
            2.0,
            "bytes",
        ),
    ],
)
def test_the_floor_that_binds(values, floor, binds):
    """The longest of the three, where it applies; none on a CPU."""
    found = ceilings.limits(frame(ran("gate", "cute", 20.0, tokens=8, **values)))
    ((ratio, low, high, says),) = shown(found, "x", "low", "high", "says")
    assert (ratio, low, high) == (20 / floor, 19 / floor, 21 / floor) and says == f"floor {floor:g} µs: {binds}"
    assert ceilings.limits(frame(ran("gate", "cute", 20.0, gpu_uuid=None, **values))).marks.empty


def test_the_cells_of_a_limit_are_those_that_its_caption_names():
    """In the caption's words: one of each model, their others, those of no model; without skew and capacity limit, then of most tokens."""
    floor = {"compulsory_bytes": 8_000_000, "copy_gb_per_s": 4000.0}
    cells = [
        (None, 64, 0.0, None),
        (None, 1024, 0.0, None),
        (None, 4096, 0.7, None),
        (None, 2048, 0.0, 1.25),
        (None, 512, 0.0, None),
        ("mixtral-8x7b", 64, 0.0, None),
        ("mixtral-8x7b", 512, 0.0, None),
        ("qwen3-30b-a3b", 8, 0.0, None),
        ("qwen3-30b-a3b", 4096, 1.7, None),
        (None, 32, 0.0, None),
    ]
    rows = [
        ran("gate", "cute", 20.0, model=m, tokens=t, skew=skew, capacity_factor=cf, **floor) for m, t, skew, cf in cells
    ]
    found = ceilings.limits(frame(*rows))
    assert [name for (name,) in shown(found, "y")] == [
        "mixtral-8x7b T512",
        "qwen3-30b-a3b T8",
        "mixtral-8x7b T64",
        "qwen3-30b-a3b T4096 skew1.7",
        "T1024",
        "T512",
        "T64",
        "T32",
    ]
    assert (ceilings.MOST_CELLS, found.note, found.reference) == (8, "8 of 10 cells", 1.0)
    assert ceilings.limits(frame(*rows[:3])).note == "", "nothing is left out"
    caption = FIGURES["limits"].caption
    assert (
        f"at most {ceilings.MOST_CELLS} cells: one of each model, then the others of models, then those of no model; "
        in caption
    )
    assert "each time without skew and capacity limit first, and then of most tokens." in caption
    for said in (
        "the longest of the compulsory bytes at the copy bandwidth, the FLOPs at the rate of a large matrix product, and an empty node",
        "dashed: the floor",
    ):
        assert said in caption


def test_verdicts():
    """As stored, with the ratio; a row without one is no mark."""
    rows = [
        ran("gate", name, 2.0, cell="a", tokens=8, best_verdict=verdict, best_speedup=ratio)
        for name, verdict, ratio in (("torch", "slower", 0.0456), ("cute", "faster", 21.94), ("triton", None, 1.0))
    ]
    found = matrices.verdict_matrix(frame(*rows))
    assert shown(found, "panel", "x", "y", "series", "says") == [
        ("gate", "torch", "T8", "less than half as fast", "0.05x"),
        ("gate", "cute", "T8", "faster", "21.9x"),
    ]
    assert "no row has a verdict" in matrices.verdict_matrix(frame(rows[2])).reason
    assert [matrices.ratio(one) for one in (9.994, 20.0, 20.84, 103.4, 999.4, 1365.1, 0.0149, 0.0028)] == [
        "9.99x",
        "20.0x",
        "20.8x",
        "103x",
        "999x",
        "1365x",
        "0.01x",
        "0.003x",
    ]


def test_the_colour_of_a_slower_one_says_how_far_it_is_behind():
    """A reader took 0.99x and 0.28x for the same, as both were of one red."""
    ratios = {"torch": 0.28, "triton": 0.5, "cute": 0.7, "quack": 0.9, "vllm": 0.99}
    rows = [
        ran("gate", name, 2.0, cell="a", tokens=8, best_verdict="slower", best_speedup=ratio)
        for name, ratio in ratios.items()
    ]
    found = matrices.verdict_matrix(frame(*rows))
    tints = {one[0]: found.colors[one[1]] for one in shown(found, "x", "series")}
    assert tints["torch"] != tints["triton"] == tints["cute"] != tints["quack"] == tints["vllm"] != tints["torch"]
    assert matrices._shade("undecided", 0.3) == "undecided" and matrices._shade("faster", 1.2) == "faster"
    over = [row | {"baseline": "deepgemm", "speedup": row["best_speedup"], "verdict": "slower"} for row in rows]
    again = matrices.speedup(frame(*over))
    assert {one[0]: again.colors[one[1]] for one in shown(again, "x", "series")} == tints


def test_speedups():
    """The median over cells of a shape; grey where the stored verdict tells nothing, or, without one, the interval includes 1 or is missing."""

    def against(name, ratio, verdict=None, cell="a", low=None):
        low = ratio - 0.1 if low is None else low
        return ran(
            "gate",
            name,
            2.0,
            cell=cell,
            tokens=8,
            baseline="torch",
            speedup=ratio,
            verdict=verdict,
            speedup_ci_low=low,
            speedup_ci_high=ratio + 0.1,
        )

    rows = [
        against("cute", 2.0, "faster"),
        against("cute", 3.0, "faster", cell="b"),
        against("cute", 9.0, "faster", cell="c"),
        against("triton", 0.5, "slower"),
        against("quack", 1.5, "undecided"),
        against("vllm", 1.5, low=0.9),
        against("sglang", 1.5),
        against("marlin", 1.5) | {"speedup_ci_low": None, "speedup_ci_high": None},
        ran("gate", "torch", 4.0, cell="a", tokens=8, baseline="torch", speedup=1.0),
    ]
    found = matrices.speedup(frame(*rows))
    assert {name: (series, said) for name, series, said in shown(found, "x", "series", "says")} == {
        "cute": (matrices.ABOVE, "3.00x"),
        "triton": (matrices.BELOW, "0.50x"),
        "quack": (matrices.UNSURE, "1.50x"),
        "vllm": (matrices.UNSURE, "1.50x"),
        "sglang": (matrices.ABOVE, "1.50x"),
        "marlin": (matrices.UNSURE, "1.50x"),
    }
    assert found.note == "1 shape; baseline: torch; medians over cells"
    other = against("sonicmoe", 2.0) | {"bench": "layer", "baseline": "torch_grouped_mm"}
    apart = matrices.speedup(frame(rows[0], other | {"cell": "c", "tokens": 16}))
    assert apart.note == "2 shapes; baseline: torch, torch_grouped_mm", "one cell of each: no median"
    many = frame(
        *(against("cute", 2.0, "faster", cell=str(i)) | {"tokens": i} for i in range(1, matrices.MOST_SHAPES + 2))
    )
    assert matrices.speedup(many).note == "25 of 26 shapes; baseline: torch"
    assert "no implementation besides the baseline is ok" in matrices.speedup(frame(rows[-1])).reason


def test_padding():
    """Every layout and routing once; a single layout is no comparison."""
    rows = [
        ran(bench, "cute", 2.0, tokens=8, layout=layout, load_cv=0.5, padding_waste=waste)
        for bench, layout, waste in (("pack", "compact", 0.0), ("combine", "compact", 0.0), ("pack", "padded", 0.5))
    ]
    assert shown(imbalance.padding(frame(*rows)), "series", "x", "y") == [("compact", 0.5, 1), ("padded", 0.5, 1.5)]
    assert "no two layouts" in imbalance.padding(frame(*rows[:2])).reason
    assert (
        imbalance.padding(frame(rows[0], rows[2] | {"padding_waste": 0.0})).reason == "no layout that was measured pads"
    )


def test_backward_apart():
    """The forward part where the same run, card and cell have it; else the whole, which says so."""
    step, layer = ran("training", "sonicmoe", 30.0, tokens=8), ran("layer", "sonicmoe", 10.0, tokens=8)
    found = times.backward(frame(step, layer))
    assert shown(found, "series", "low", "high") == [("forward", 0, 10), ("backward (the rest)", 10, 30)]
    assert found.marks["says"].iloc[1].startswith("backward 20 µs, 2x the forward")
    ends = found.marks[["x_low", "x_high"]].astype(float)
    assert ends.iloc[0].isna().all() and list(ends.iloc[1]) == [step["ci_low_us"], step["ci_high_us"]], "of the whole"
    figure, _ = draw("backward", frame(step, layer))
    (interval,) = [tuple(one.get_segments()[0][:, 0]) for one in figure.axes[0].collections]
    assert interval == pytest.approx((29, 31)) and any(
        "lines at the ends of bars: 95 %" in one.get_text() for one in figure.texts
    )
    plain_layer = layer | {"dtype": "bf16", "packed": "bf16", "weights": "bf16"}
    assert len(times.backward(frame(step | {"dtype": "bf16"}, plain_layer)).marks) == 2
    for change in (
        {"gpu_uuid": "GPU-2"},
        {"packed": "fp8_row"},
        {"shared_intermediate": 8},
        {"tokens": 16},
        {"implementation": "torch"},
        {"status": "crashed"},
        {"median_us": 31.0},
    ):
        (bar,) = shown(times.backward(frame(step, layer | change)), "series", "low", "high", "says")
        assert bar[:3] == ("forward + backward", 0, 30) and "not measured in this run" in bar[3], change
    ops = times.backward(frame(step | {"implementation": "ops"}, layer | {"implementation": "auto"}))
    assert ops.shared, "panels of absolute times have one scale"
    assert len(ops.marks) == 2, "what auto chooses is what ops runs"
    assert times.backward(frame(layer)).reason == "no training row was asked for"


def test_what_the_page_is_given():
    """Marks by column with ids of rows; no number that JSON lacks; the colours of both pages, and one shape per implementation everywhere."""
    rows = [
        ran("gate", "cute", 2.0, cell="a", tokens=64),
        ran("gate", "torch", math.pi, cell="a", tokens=64) | {"ci_low_us": None},
    ]
    one_ = render.build(frame(*rows), ["decode"], Path("reports/x/index.html")).figures[0].chart
    marks_ = one_["marks"]
    assert marks_["x"] == {"each": [2, 3.1416]} and marks_["low"] == {"each": [1, None]} and "join" not in marks_
    assert marks_["row"] == {"each": [row_id(one) for one in rows]} and one_["count"] == 2
    assert {one["name"]: (one["light"], one["symbol"]) for one in one_["legend"]}["cute"] == (
        palette.color("cute"),
        "triangle2",
    )
    assert all(one["dark"] == palette.dark(one["light"]) for one in one_["legend"])


def test_decode_cells_share_an_axis_and_say_their_times():
    """On paper and on the page: had they axes of their own, 2 µs of one cell stood right of 20 µs of another."""
    rows = [
        ran("gate", name, us, cell=cell, tokens=tokens)
        for cell, tokens, slow in (("a", 8, 20.0), ("b", 64, 20.1))
        for name, us in (("cute", 2.0), ("torch", slow))
    ]
    found = times.decode(frame(*rows))
    assert (found.shared, found.own, found.x.kind) == (True, {}, "log")
    assert list(found.marks["aside"]) == ["2 µs", "20 µs", "2 µs", "20.1 µs"]
    assert script_data.chart_data(found)["marks"]["aside"]
    few, many = draw("decode", frame(*rows))[0].axes
    assert few.get_xlim() == many.get_xlim() and few.get_xlim()[0] > 0


def test_a_line_says_the_time_of_the_fastest():
    """Also where that is none of the series that are drawn; cells of two benches may have one name."""
    names = ["quack", "cute", "triton", "torch_loop", "torch_grouped_mm", "vllm_triton", "sglang_triton", "sonicmoe"]
    rows = [
        ran(
            bench, name, us + place, cell="c", tokens=64, compulsory_bytes=4_000_000, copy_gb_per_s=4000.0, gpu_uuid="G"
        )
        for bench, us in (("routing", 10.0), ("layer", 70.0))
        for place, name in enumerate(names)
    ]
    for name in ("crossover", "limits"):
        chart = FIGURES[name].chart(frame(*rows))
        assert {(mark.panel, mark.aside) for mark in chart.marks.itertuples()} == {
            ("routing", "quack, 10 µs"),
            ("layer", "quack, 70 µs"),
        }, name
    rest = FIGURES["crossover"].chart(frame(*rows))
    kept = rest.marks[rest.marks["series"] != "quack"]
    assert kept["aside"].notna().all(), "every mark of a line knows it"


def test_a_speed_up_of_doubtful_rows_is_pale():
    """Where half of the rows that it is the median of are suspect; the note alone said so."""
    rows = [
        ran(
            "gate", "cute", 2.0, cell=f"{i}", tokens=64, experts=8, speedup=2.0, skew=float(i), suspect=i < many, seed=i
        )
        | {"best_verdict": None, "gpu_uuid": f"GPU-{experts}"}
        | {"experts": experts}
        for experts, many in ((8, 1), (16, 2), (32, 4))
        for i in range(4)
    ]
    chart = matrices.speedup(frame(*rows))
    assert [look(chart, doubt) for doubt in chart.marks["doubt"]] == ["", DOUBTFUL, DOUBTFUL]
    assert "pale: suspect or not converged (2 marks)" in legend_of_doubts(chart)


@pytest.mark.parametrize("name", ["verdict_matrix", "stage_share"])
def test_letters_on_pale_ground_can_be_read_on_paper(name):
    """White letters on half a colour had a contrast of 2:1."""
    ran_ = {"best_verdict": "faster", "best_speedup": 1.5, "stage_us": [("router", 1.0), ("pack", 2.0)]}
    rows = [
        ran("routing", "cute", 2.0, tokens=64, suspect=True, **ran_),
        ran("routing", "triton", 3.0, tokens=64, **ran_),
    ]
    (axes,) = draw(name, frame(*rows))[0].axes
    inks = {text.get_color() for text in axes.texts if text.get_text() in ("1.50x", "33 %", "67 %")}
    pale = {patch.get_alpha() for patch in axes.patches} - {None}
    assert inks == {"0.1", "white"} and pale == {panels._PALE}
    for tint in palette.PALETTE:
        ground = [pale_ * one + 1 - pale_ for pale_ in pale for one in to_rgb(tint)]
        assert contrast(to_hex(ground), to_hex("0.1")) >= 4.5, tint


def test_a_chart_is_refused_that_nothing_draws():
    with pytest.raises(ValueError, match="pie"):
        Chart("pie", Scale("x"), Scale("y"), marks([]), {}, pd.DataFrame())
    with pytest.raises(ValueError, match=r"\['series'\]"):
        Chart("dots", Scale("x"), Scale("y"), marks([]).drop(columns="series"), {}, pd.DataFrame())


@pytest.mark.parametrize("kind", ["lines", "points", "dots", "bars", "matrix"])
def test_every_kind_is_drawn_for_paper(kind):
    """Two panels, all series in the legend, intervals or none."""
    names = Scale("names", "names")
    x, y = (
        names if kind == "matrix" else Scale("time", "log"),
        names if kind in ("dots", "bars", "matrix") else Scale("loss"),
    )
    values = [
        {
            "panel": panel,
            "series": series,
            "x": series if kind == "matrix" else i + 1,
            "y": "one" if y is names else i,
            "low": i + 0.5,
            "high": i + 1.5,
            "says": "7x",
            "join": "a",
        }
        for panel in ("p", "q")
        for i, series in enumerate(("cute", "torch"))
    ]
    chart = Chart(kind, x, y, marks(values), {"cute": "#d55e00", "torch": "#779988"}, frame(), 1.0)
    figure = paper.drawn(chart, "A title")
    text = " ".join(found.get_text() for found in figure.findobj(lambda found: hasattr(found, "get_text")))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["p", "q"] and "A title" in text
    assert [found.get_text() for found in figure.legends[0].get_texts()] == ["cute", "torch"]


# Machado, Oliveira and Fernandes (2009), severity 1; Ottosson's OKLab
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(color):
    parts = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(color):
    return linear(color) @ (0.2126, 0.7152, 0.0722)


def contrast(*pair):
    low, high = sorted(map(luminance, pair))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_seen_on_paper_and_at_night():
    """Marks have 3:1 (WCAG 2.2, 1.4.11) on the page in either mode; text inside bars and cells 4.5:1."""
    for light in [*palette.PALETTE, palette.OTHER, "#000000"]:
        assert contrast(light, palette.PAPER) >= 3 and contrast(palette.dark(light), palette.NIGHT) >= 3, light
    inside = [*palette.STAGES.values(), *matrices.VERDICT_COLORS.values()]
    assert all(
        contrast(one, palette.PAPER) >= 4.5 and contrast(palette.dark(one), palette.NIGHT) >= 4.5 for one in inside
    )
    assert re.search(
        r"--page: light-dark\(#fff, #161616\)", page.LIBRARY.parent.parent.joinpath("templates/report.css").read_text()
    )


@pytest.mark.parametrize("pair", [("int8_g128", "int4z_g128"), ("e4m3_g128", "e5m2_g128")])
def test_formats_that_runs_draw_together_are_apart_at_night(pair):
    """Two violets were drawn as one; two floats had one colour and one symbol."""
    first, second = (np.array(to_rgb(palette.dark(palette.FORMATS[name]))) for name in pair)
    assert np.abs(first - second).max() > 0.25
    assert palette.symbol(pair[0]) != palette.symbol(pair[1])


def test_implementations_of_one_bench_have_colours_of_their_own():
    """As far as the palette reaches; an addition never moves an earlier one, and one that no bench has takes the next."""
    for bench in BENCHES.values():
        names = [one.name for one in bench.implementations]
        assert len({palette.COLORS[name] for name in names}) == len(names) or len(names) > len(palette.PALETTE), (
            bench.name
        )
    names, tints = [f"n{i}" for i in range(40)], list(palette.PALETTE)
    found = palette.assigned(names, [("n0", "n1", "n25"), ("n2", "n25", "n26"), names[:19]])
    assert [found[name] for name in names[:18]] == tints and found["n25"] == tints[3]
    assert found["n18"] == found["n24"] == tints[0], "each is taken once; drawn with none"
    assert found["n26"] == found["n27"] == tints[1], (
        "no symbol of the first is left; n2 and n25 have the third and the fourth"
    )
    marks = {(palette.color(name), palette.symbol(name)) for name in palette.NAMES}
    assert len(marks) == len(palette.NAMES), "what has one colour has several shapes"


@pytest.mark.parametrize("count", [40, 144, 200])
def test_a_colour_has_as_many_names_as_there_are_symbols(count, monkeypatch):
    """An addition to the tables once raised IndexError, for want of a ninth symbol. Beyond the symbols of all colours, names share both."""
    names, most = [f"n{i}" for i in range(count)], len(palette.SYMBOLS) + 1
    found = palette.assigned(names, [(name, "n0") for name in names])
    of_tints = collections.Counter(found.values())
    full = count > most * len(palette.PALETTE)
    assert full or max(of_tints.values()) <= most
    monkeypatch.setattr(palette, "COLORS", found)
    monkeypatch.setattr(palette, "_PLACES", palette._places())
    marks = {(found[name], palette.symbol(name)) for name in names}
    assert len(marks) == count or full


def test_the_first_colours_are_told_apart_without_red_or_green():
    """By at least 8 in OKLab times 100, with deuteranopia: of the ten implementations that have fixed places."""
    seen = (
        np.cbrt(np.clip(np.array([linear(one) for one in list(palette.PALETTE)[:10]]) @ DEUTERANOPIA.T, 0, 1) @ LMS.T)
        @ LAB.T
        * 100
    )
    gaps = np.linalg.norm(seen[:, None] - seen[None], axis=2)[np.triu_indices(len(seen), 1)]
    assert gaps.min() >= 8


@pytest.mark.parametrize(("kept", "aside"), [(0, 0), (1, 0), (0, 1), (30, 30)])
def test_a_page_has_no_more_samples_of_a_row_than_it_may(kept, aside):
    """Every second sample is left out once there is one too many; samples that are set aside have a count of their own."""
    times = [1.0] * (row_data.MOST + kept), [1.0] * (row_data.MOST + aside)
    row = {"samples_us": times[0], "set_aside_samples_us": times[1], "median_us": 1.0}
    (found,) = row_data.samples([row])["rows"]
    assert found["every"] == (2 if kept else 1)
    assert len(found["at"]) == len(times[0][:: 2 if kept else 1]) <= row_data.MOST
    assert len(found["aside"]) == len(times[1][:: 2 if aside else 1]) <= row_data.MOST


def test_a_page_asks_for_shared_experts_and_for_shards_only_where_rows_have_them():
    def asked(**values):
        return {axis["name"] for axis in script_data.questions(frame(one("layer", **values)), {})["axes"]}

    alone, several = asked(), asked(ep=2)
    assert "shared_intermediate" in alone & several and several - alone == {"ep"}
