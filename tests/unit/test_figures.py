"""Every figure draws from any table of the schema, says when there is nothing to draw, and is reproducible."""

import itertools
import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rows import frame, one, rows, some

from campaign import sampled
from drawn import draw
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import FIGURES, ceilings, composites, matrices, palette, panels, paper, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks

pytestmark = pytest.mark.slow

FULL = rows()
SOME = some(FULL)
FEW = SOME["implementation"].isin(["cute", "triton", *(bench.baseline for bench in BENCHES.values())])
FITTED: dict[str, dict] = {
    "decode": {"tokens": 64},
    "pareto": {"drop_rate": [0.0, 0.25, 0.5, 0.1]},
    "verdict_matrix": {"best_verdict": "faster", "best_speedup": 1.1},
    "formats": {"weights": ["bf16", "int4_g128"]},
    "format_limits": {"weights": ["bf16", "int4_g128"], "share_of_roofline": 0.5},
    "padding": {"layout": ["compact", "padded"], "padding_waste": [0.0, 0.5]},
}


def fitted(name, table):
    """The table with what a figure asks for and these rows lack."""
    values = {
        key: one if not isinstance(one, list) else (one * len(table))[: len(table)]
        for key, one in FITTED.get(name, {}).items()
    }
    return table.assign(**values)


MEASURED = [name for name, figure in FIGURES.items() if figure.source == "measurements"]


@pytest.fixture(scope="module")
def full():
    """Each figure, drawn once, with its texts: that of stages, which leaves rows out, of the full table."""
    return {name: draw(name, fitted(name, FULL if name == "stage_share" else SOME)) for name in MEASURED}


@pytest.mark.parametrize("name", MEASURED)
def test_draws(name, full):
    """Full, CPU, failed and empty tables."""
    assert "no data" not in full[name][1]
    if name == "limits":  # of which a CPU has none
        assert "no data: no row has a floor" in draw(name, some(rows(gpu=False))[FEW])[1]
    elif name == "format_limits":
        assert "on a CPU none is one" in draw(name, some(rows(gpu=False))[FEW])[1]
    else:
        said = draw(name, fitted(name, some(rows(gpu=False))[FEW]))[1]
        assert ("only ratios are meaningful" in said) == (name not in ("padding", "load_cv")), "these show no times"
    assert "no data: " in draw(name, rows(status="crashed"))[1]
    assert "no data: " in draw(name, FULL.iloc[:0])[1]


def test_same_rows_same_svg(tmp_path):
    """Equal rows give equal files."""
    for copy in "ab":
        paper.save(
            draw("speedup", SOME[SOME["bench"] == "gate"])[0], tmp_path / f"{copy}.svg", tmp_path / f"{copy}.png"
        )
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_last_bits_of_a_layout_change_no_file(tmp_path, monkeypatch):
    """They differ from run to run; the names of what panels are cut to are drawn from their places."""
    execute = ConstrainedLayoutEngine.execute
    for copy, bits in (("a", 0.0), ("b", 4e-16)):

        def shaken(engine, figure, bits=bits):
            execute(engine, figure)
            for axes in figure.axes:
                axes.set_position([place + bits for place in axes.get_position(original=True).bounds], "original")

        monkeypatch.setattr(ConstrainedLayoutEngine, "execute", shaken)
        chart = draw("speedup", SOME[SOME["bench"] == "gate"])[0]
        paper.save(chart, tmp_path / f"{copy}.svg", tmp_path / f"{copy}.png")
    for kind in ("svg", "png"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_long_names_are_whole_in_pixels_too(tmp_path):
    """The layout is found once, for letters of 72 per inch."""
    figure, (axes,) = paper.canvas(1, 1, 10, 2)
    axes.set_yticks([0], ["T16384 H2048 E32 k2 trace topk_hard-e32-k2"], fontsize=7)
    paper.save(figure, tmp_path / "a.svg", tmp_path / "a.png")
    figure.set_dpi(150)
    assert axes.get_yticklabels()[0].get_window_extent().x0 >= 0


@pytest.mark.parametrize("series", ["softk", "deepseek_v4_hash+sqrtsoftplus_renorm"])
def test_the_title_of_a_panel_ends_before_the_legend(series):
    """Beside long names, too, and no sooner than it has to."""
    title = "a0: E=8, k=2, 20.1 to 38.9 M parameters, 3,050 steps, 50 MB (n = 5 seeds), capacity factor 1.25, trained with it"
    made = marks([{"panel": title, "series": name, "x": 1.0, "y": name} for name in dict.fromkeys((series, "softk"))])
    colors = dict.fromkeys(made["series"], "#000000")
    chart = Chart("dots", Scale("bits"), Scale("", "names"), made, colors, frame(one("gate", "torch", median_us=1.0)))
    figure = paper.drawn(chart, "Bits lost")
    figure.canvas.draw()
    legend, (axes,) = figure.legends[0].get_window_extent(), figure.axes
    drawn = axes._left_title.get_window_extent()
    assert 0.6 * (legend.x0 - drawn.x0) < drawn.width < legend.x0 - drawn.x0


def test_a_million_has_no_exponent_beside_numbers_that_have_none():
    _, (axes,) = paper.canvas(1, 1, 4, 4)
    axes.loglog([1, 2], [6e3, 1.2e6])
    panels.plain_log(axes.yaxis)
    labels = [axes.yaxis.get_major_formatter()(tick) for tick in (0.05, 20_000, 1_000_000, 12_000_000)]
    assert labels == ["0.05", "20,000", "1,000,000", "12,000,000"]


def test_captions():
    """Every figure has a title, a caption in whole sentences and a function; every function that makes a chart of a table is a figure."""
    for figure in FIGURES.values():
        assert figure.title and len(figure.caption) > 60 and figure.caption.rstrip().endswith(".")
    folder = Path(paper.__file__).parent
    charts = {
        path.stem if name == "chart" else name
        for path in folder.glob("*.py")
        for name in re.findall(r"^def (\w+)\(table: pd.DataFrame\) -> Chart:", path.read_text(), re.MULTILINE)
    }
    assert charts == set(FIGURES)


def test_a_fused_part_has_a_colour_of_its_own(full):
    """Named as fused in the legend; no stage has its colour."""
    figure, text = full["stage_share"]
    chosen = [composites.choose(row_groups.ok(FULL, bench)) for bench in ("layer", "routing")]
    shown = chosen[0]
    parts = {part for rows in chosen for value in rows["stage_us"] for part in row_groups.stages(value)}
    fused = {part for part in parts if "+" in part}
    assert fused and all(f"{part} (fused)" in text for part in fused)
    labels = {handle.get_label(): handle.get_facecolor() for handle in figure.legends[0].get_patches()}
    colors = [labels[f"{part} (fused)"] for part in fused]
    assert len(set(colors)) == min(len(fused), len(palette.FUSED))
    assert not set(colors) & {labels[part] for part in parts - fused}
    assert shown.groupby("cell").size().max() == composites.MOST_PER_CELL and len(shown) <= composites.MOST_BARS


@pytest.mark.parametrize(
    ("cells", "names", "says"),
    [
        (5, 6, ""),
        (6, 6, "5 of 6 cells"),
        (5, 7, "the 6 fastest of each"),
        (6, 7, "5 of 6 cells, the 6 fastest of each"),
        (31, 1, "30 of 31 cells"),
    ],
)
def test_a_share_of_the_rows_is_said_in_print_and_on_the_page(cells, names, says):
    """A cell is shown whole, as far as its fastest go; what is left out would be taken for unmeasured."""
    every = [one.name for one in BENCHES["layer"].implementations][:names]
    table = frame(
        *(
            one("layer", name, cell=f"c{i}", tokens=i + 1, model="m", median_us=10.0 + n, stage_us=[("experts", 5.0)])
            for i in range(cells)
            for n, name in enumerate(every)
        )
    )
    figure, said = draw("stage_share", table)
    assert figure.axes[0].get_title(loc="left") == "layer" and says in said
    assert composites.stage_share(table).note == (f"layer: {says}" if says else "")


def test_the_stage_of_shared_experts_has_a_colour_of_its_own():
    """Beside those of the stages that every layer has, which keep theirs."""
    assert list(palette.STAGES)[-1] == "shared" and len(set(palette.STAGES.values())) == len(palette.STAGES)
    layers = row_groups.ok(FULL, "layer")
    times = [[("shared", 10.0), *row_groups.stages(one).items()] for one in layers["stage_us"]]
    figure, text = draw("stage_share", layers.assign(stage_us=times))
    shown = [
        bar
        for axes in figure.axes
        for bar in axes.patches
        if bar.get_facecolor()[:3] == to_rgb(palette.STAGES["shared"])
    ]
    assert "shared" in text and len(shown) == len(composites.choose(layers))


def test_tables_without_routing_or_capacities(full):
    """Layers of one skew and no capacity: what has no points says so, and no panel stays empty beside one that has."""
    layers = FULL[(FULL["bench"] == "layer") & (FULL["skew"] == 0) & FULL["capacity_factor"].isna()]
    assert len(layers)
    assert "no data: no bench that only moves data was measured" in draw("bandwidth", layers)[1]
    assert "no data: no shape was measured with two skews or capacity factors" in draw("pareto", layers)[1]
    figure, text = draw("roofline", layers)
    assert len(figure.axes) == 1 and "no data" not in text
    assert "no data: no row with FLOPs is ok" in draw("roofline", FULL[FULL["bench"] == "pack"])[1]


def test_who_is_fastest_and_who_ties():
    """Times over the fastest of the cell; a tie is what pairs do not tell apart, and no verdict calls slower."""

    def row(name, us, low, high, verdict=None, cell="c1", **axes):
        other = {
            "best_other": "cute" if name != "cute" else "triton",
            "best_speedup_ci_low": low,
            "best_speedup_ci_high": high,
        }
        return one("layer", name, cell=cell, median_us=us, flops=1.0, best_verdict=verdict, **other, **axes)

    table = frame(
        row("cute", 20.0, 1.0, 1.1),
        row("triton", 20.1, 0.99, 1.0),
        row("cute_quack", 20.2, 0.98, 1.01, "slower"),
        row("sonicmoe", 20.4, 0.97, 0.99),
        row("liger", 20.1, None, None),
        row("torch_grouped_mm", 50.0, 0.3, 0.5),
        row("cute", 7.0, 1.1, 1.2, cell="c0", model="mixtral-8x7b"),
        row("triton", 14.0, 0.4, 0.6, cell="c0", model="mixtral-8x7b"),
        row("cute", 1.0, 1.1, 1.2, cell="alone"),
    )
    shown = composites.choose_cells(table[table["cell"] != "alone"])
    assert shown["cell"].tolist() == ["c0"] * 2 + ["c1"] * 6, "models first"
    assert shown["behind"].tolist() == [1.0, 2.0, 1.0, 20.1 / 20, 20.2 / 20, 20.4 / 20, 20.1 / 20, 2.5]
    assert composites.winners(table[table["cell"] == "c1"]) == ["cute", "triton"]
    figure, text = draw("crossover", table)
    assert "cute ≈ triton, 20 µs" in text and "cute, 7 µs" in text and "alone" not in text
    assert next(tick.get_text() for tick in figure.axes[0].get_yticklabels()).startswith("mixtral-8x7b")
    many = frame(
        *(
            row(name, 5.0, 1.0, 1.0, cell=f"c{i}", tokens=i)
            for i in range(composites.MOST_CELLS + 2)
            for name in ("cute", "triton")
        )
    )
    assert f"{composites.MOST_CELLS} of {composites.MOST_CELLS + 2} cells" in draw("crossover", many)[1]
    assert composites.choose_cells(many)["tokens"].max() == composites.MOST_CELLS - 1


@pytest.mark.parametrize("behind", sampled([1.15, 5, 7.9, 8, 30, 120], [1.15, 7.9, 8, 120]))
def test_numbers_below_the_fastest_keep_apart(behind):
    """However far behind the slowest is, and however wide the names of cells."""
    cells = [
        {"cell": f"c{i}", "model": "qwen3-30b-a3b", "tokens": 1024 << i, "weights": "e4m3_block128"} for i in range(3)
    ]
    table = frame(
        *(
            one("layer", name, median_us=us, ci_low_us=0.9 * us, ci_high_us=1.2 * us, **cell)
            for cell in cells
            for name, us in (("cute", 10.0), ("triton", 10.0 * behind))
        )
    )
    figure, _ = draw("crossover", table)
    figure.canvas.draw()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    ticks = [tick.label1.get_window_extent() for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert len(ticks) >= 2 and low <= 0.9 and 1.2 * behind <= high, "the intervals are whole"
    assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(ticks))


def test_composites_have_the_stages_of_their_tables(full):
    """One panel per composite; stages of the longest table come first, so that colours follow the order of work."""
    assert [axes.get_title(loc="left").split(" ")[0] for axes in full["stage_share"][0].axes] == list(
        row_groups.COMPOSITES
    )
    assert composites.ordered(["combine", "pack+experts", "router"]) == ["router", "pack+experts", "combine"]


FORMATS = {"weights": "weights-int4", "packed": "packed-fp8_row"}  # axes, and other values of theirs as keys spell them


def with_others():
    """The rows and, for each axis of formats and every row of a bench that reads it, another that differs only in it."""
    few = SOME[FEW]
    tables = [few]
    for axis, spelt in FORMATS.items():
        mine = few[few["bench"].isin(row_groups.reading(axis))]
        tables.append(mine.assign(**{axis: spelt.removeprefix(f"{axis}-")}, cell=mine["cell"] + f"-{axis}"))
    return pd.concat(tables, ignore_index=True)


# No format changes the loads of load_cv; formats and format_limits are of nothing but formats.
@pytest.mark.parametrize(
    "name",
    sampled(
        [name for name in MEASURED if name not in ("load_cv", "formats", "format_limits")],
        ["bandwidth", "pareto", "speedup", "crossover", "backward"],
    ),
)
def test_rows_that_differ_in_a_format_are_labelled_or_said_to_be_pooled(name, full):
    """Whatever the figure: the name of the axis, or its value as keys spell it, is in the picture."""
    text = draw(name, fitted(name, with_others()))[1]
    for axis, spelt in FORMATS.items():
        assert axis not in full[name][1]
        if (axis == "weights" and name == "bandwidth") or name == "backward":  # benches that do not read the axis
            assert axis not in text
        elif name == "pareto":
            assert "2 shapes measured" in full[name][1] and "6 shapes measured" in text
        else:
            assert spelt in text or axis in text


def test_labels_tell_rows_apart_by_every_axis():
    """Rows that differ in one axis only have two labels; a model's own values are left out."""
    two = FULL.iloc[:2].assign(**{name: None for name in AXES if name != "tokens"}, tokens=8)
    for name, axis in AXES.items():
        values = (*axis.choices, None)[:2] if axis.choices else ("a", "b") if axis.kind is str else (1, 2)
        assert row_groups.labels(two.assign(**{name: values})).nunique() == 2, name
        assert row_groups.pooled(two.assign(**{name: values})) == [name]
        if axis.default is not None:
            assert set(row_groups.labels(two.assign(**{name: axis.default}))) == {"T8"}, "a default says nothing"
    of_a_model = two.assign(model="m", experts=8, hidden=16)
    assert set(row_groups.labels(of_a_model)) == {"m T8"}
    assert row_groups.labels(of_a_model.assign(experts=[8, 9])).nunique() == 2


def test_a_front_joins_points_of_one_card_only():
    """Two capacity factors of one card are joined; of two cards they are not."""
    base = FULL[(FULL["bench"] == "layer") & (FULL["tokens"] == 1024) & (FULL["skew"] == 0)]
    tight = base.assign(capacity_factor=1.0, drop_rate=0.5, median_us=base["median_us"] / 2, cell="tight")

    def longest(table):
        lines = [line for axes in draw("pareto", table)[0].axes for line in axes.lines if line.get_linestyle() == "--"]
        return max(len(line.get_xdata()) for line in lines)

    assert longest(pd.concat([base, tight])) == 2
    assert longest(pd.concat([base, tight.assign(gpu_uuid="GPU-2")])) == 1


def printed(figure, which="x"):
    """What the ticks of each panel say, as it is drawn."""
    figure.draw_without_rendering()
    return [
        [tick.get_text() for tick in getattr(axes, f"get_{which}ticklabels")() if tick.get_text()]
        for axes in figure.axes
    ]


def test_an_axis_of_tokens_names_those_that_were_measured_and_have_room():
    """In print as on the page, where 5,000 stood between 4,096 and 16,384."""
    timed = [
        one(
            "routing",
            "cute",
            tokens=tokens,
            cell=f"{tokens}",
            median_us=tokens / 8,
            ci_low_us=tokens / 9,
            ci_high_us=tokens / 7,
            gpu_uuid="GPU-1",
        )
        for tokens in (64, 4096, 4160, 16384)
    ]
    figure, said = draw("over_tokens", frame(*timed))
    assert printed(figure)[0] == ["64", "4,160", "16,384"], "4,096 would lie on 4,160"
    assert "bars: 95 % confidence intervals of the medians" in said


def test_a_logarithmic_axis_is_in_plain_numbers_and_has_the_1_of_a_ratio():
    """Of one that spans less than a decade, too; 600, not 6 x 10^2."""
    timed = {
        "gpu_uuid": "GPU-1",
        "flops": 4_000_000_000,
        "compulsory_bytes": 4_000_000,
        "copy_gb_per_s": 4000.0,
        "peak_tflops": 800.0,
    }
    near = [
        one("experts", name, cell="a", tokens=64, median_us=6 * us, ci_low_us=6 * us, ci_high_us=6 * us, **timed)
        for name, us in (("cute", 0.95), ("quack", 1.6))
    ]
    assert {"1", "1.2", "1.4", "1.6"} <= set(printed(draw("limits", frame(*near))[0])[0])
    high = [
        one("experts", name, cell="a", median_us=10.0, ci_low_us=9.0, ci_high_us=11.0, tflops=tflops, **timed)
        for name, tflops in (("cute", 130.0), ("quack", 600.0))
    ]
    assert "500" in printed(draw("roofline", frame(*high))[0], "y")[0]


def test_rows_of_one_cell_that_have_lines_of_their_own_are_said_to():
    """Ten lines of eight cells are no mistake of counting."""
    timed = {
        "tokens": 64,
        "median_us": 2.0,
        "ci_low_us": 1.9,
        "ci_high_us": 2.1,
        "best_verdict": "faster",
        "best_speedup": 1.5,
        "gpu_uuid": "GPU-1",
        "compulsory_bytes": 4_000_000,
        "copy_gb_per_s": 4000.0,
    }
    own = frame(
        one("layer", "cute", cell="a", layout="compact", **timed),
        one("layer", "cute_deepgemm", cell="a", layout="block128", **timed),
    )
    alike = own.assign(layout="compact")
    for chart in (ceilings.limits, matrices.verdict_matrix):
        assert chart(own).note == "rows of one cell that differ in layout have lines of their own"
        assert chart(alike).note == ""


def test_what_costs_the_same_at_a_skew_has_no_panel():
    """All drops at 0, on an axis from -0.05 % to 0.05 %, told nothing."""
    routed = {
        "tokens": 64,
        "experts": 8,
        "top_k": 2,
        "median_us": 2.0,
        "ci_low_us": 1.9,
        "ci_high_us": 2.1,
        "padding_waste": 0.0,
        "gpu_uuid": "GPU-1",
    }
    each = [
        one("routing", "cute", cell=f"{skew} {factor}", skew=skew, capacity_factor=factor, drop_rate=rate, **routed)
        for skew, factor, rate in ((0.0, None, 0.0), (0.0, 1.0, 0.0), (0.7, None, 0.0), (0.7, 1.0, 0.2))
    ]
    said = draw("pareto", frame(*each))[1]
    assert "skew 0.7" in said and "skew 0\n" not in said and "n = 2 rows of 2 cells" in said
    assert (
        "no data: drops and padding are the same at every skew"
        in draw("pareto", frame(*each[:2], each[2] | {"drop_rate": 0.1}))[1]
    )


def test_an_interval_in_print_is_told_from_its_median():
    """278 µs [278, 278] said that nothing was uncertain."""
    staged = one(
        "routing",
        "cute",
        cell="a",
        tokens=64,
        median_us=277.83,
        ci_low_us=277.71,
        ci_high_us=278.01,
        stage_us=[("router", 1.0), ("pack", 2.0)],
    )
    assert "277.8 µs [277.7, 278.0]" in draw("stage_share", frame(staged))[1]
