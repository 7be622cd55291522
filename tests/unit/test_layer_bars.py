"""Which bars of layers and models a few rows reach: on the bar, beside it, suspect, absent, of another card or code."""

from dataclasses import replace

import pytest
from rows import frame, one

from moe_routing_bench.comparison.ratios import Estimate
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import completion
from moe_routing_bench.report import layer_bars, reached
from moe_routing_bench.report.bars import AT_MOST, PERCENT_MORE, PLATFORM, Bar, Cells, Figure, Level, Unit
from moe_routing_bench.report.parts import BarLine

BLOCKS = (1.0, 1.001, 0.999, 1.0005)
BY_NAME = {bar.what: bar for bar in layer_bars.BARS}
SIZES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "deepseek-v3": (7168, 2048, 256, 8), "mixtral-8x7b": (4096, 14336, 8, 2)}


def row(name: str, us: float, bench: str = "layer", spread: float = 1.0, **values: object) -> dict[str, object]:
    """A row of the platform that the bars are for, of the cell that its values name."""
    key = "-".join(str(value) for value in (bench, *values.values()))
    known = {
        "platform": PLATFORM,
        "dtype": "bf16",
        "phase": "prefill",
        "skew": 0.0,
        "sampler": "exact",
        "seed": 17,
        "set_aside": 0,
        "code_fingerprint": "a" * 16,
    }
    known |= {"packed": "bf16", "weights": "bf16"} if bench == "layer" else {}
    times = {
        "median_us": us,
        "ci_low_us": us * 0.99,
        "ci_high_us": us * 1.01,
        "block_medians_us": [us * (1 + spread * (i - 1)) for i in BLOCKS],
    }
    return one(bench, name, cell=key, cell_hash=key, **known | times | values)


def cells(cute: float = 100.0, other: float = 110.0, torch: float = 170.0, **values: object) -> list[dict[str, object]]:
    """Rows of every cell of the prefill bars."""
    found = []
    for cell in layer_bars.PREFILL.values():
        at = dict(cell) | values
        found += [row("cute", cute, **at), row("sonicmoe", other, **at), row("torch_grouped_mm", torch, **at)]
    return found


def lines(what: str, *rows: dict[str, object], absent: bool = False) -> list[BarLine]:
    return reached.lines([BY_NAME[what]], {"layers": frame(*rows)}, absent)


def line(what: str, *rows: dict[str, object]) -> BarLine:
    (found,) = lines(what, *rows)
    return found


UNEVEN = "layer, uneven loads: time over balanced, less 1"
FASTEST, TORCH = "layer: speed over the fastest other", "layer: speed over torch sort and grouped_mm"


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (105.5, "reached"),
        (105.1, "reached, within noise"),
        (104.9, "missed, within noise"),
        (104, "missed"),
        (116, "reached, and the stretch"),
    ],
)
def test_the_geometric_mean_against_the_fastest_other(other: float, verdict: str) -> None:
    """One cell of 11 scatters enough to doubt what is near the bar."""
    rows = cells(other=other)
    for one_row in rows[:2]:
        one_row["block_medians_us"] = [
            one_row["median_us"] * factor for factor in ((0.97, 1.03, 1.0, 1.0) if one_row is rows[0] else (1, 1, 1, 1))
        ]
    found = line(FASTEST, *rows)
    assert (found.verdict, found.cells, found.left_out, found.where) == (verdict, "11 of 11", "–", "layers")
    assert (found.bar, found.stretch) == (
        "≥ 1.05x in the geometric mean, each ≥ 0.95x",
        "≥ 1.15x in the geometric mean",
    )
    assert found.measured.startswith(f"{other / 100:.3f}x [") and "in the geometric mean; worst: " in found.measured


def test_one_cell_below_its_bound_is_a_miss_whatever_the_mean() -> None:
    """Also while other cells are not measured: nothing can cure it."""
    rows = cells(other=130.0)
    rows[1]["median_us"], rows[1]["block_medians_us"] = 90.0, [90.0] * 4
    found = line(FASTEST, *rows)
    assert (
        found.verdict == "missed"
        and "; worst: qwen3-30b-a3b T=16384: 0.900x [0.899, 0.901] (cute, sonicmoe); best: " in found.measured
        and found.measured.endswith("; 1 of 11 miss the bar of each")
    )
    assert line(FASTEST, *rows[:3]).verdict == "missed" and line(FASTEST, *rows[:3]).cells == "1 of 11"


def test_what_is_not_measured_leaves_a_bar_open_or_silent() -> None:
    """The mean of some cells decides nothing, on whatever side of its bound it lies."""
    for other in (110.0, 100.0):
        found = line(FASTEST, *cells(other=other)[:6])
        assert (found.verdict, found.cells) == ("open", "2 of 11")
    assert (
        lines(FASTEST, *cells(platform="cpu"))
        == []
        == lines(FASTEST, row("cute", 1.0, **layer_bars.PREFILL["olmoe-1b-7b T=4096"]))
    )
    elsewhere, bars = {"layers": frame(*cells(platform="cpu"))}, [BY_NAME[FASTEST], replace(BY_NAME[TORCH], cells=None)]
    assert reached.lines(bars, elsewhere) == []
    assert reached.lines(bars, elsewhere, absent=True) == [
        BarLine(bar.what, bar.words(bar.level), bar.words(bar.stretch), "–", number, "–", "not measured")
        for bar, number in zip(bars, ("0 of 11", "0"), strict=True)
    ]


def test_a_run_of_some_cells_is_silent_where_another_has_all() -> None:
    """It is not where it misses the bar, or where cells that it has are in doubt: that is news."""

    def found(*some: dict[str, object]) -> list[tuple[str, str]]:
        tables = {"whole": frame(*cells(other=130.0)), "some": frame(*some)}
        return [(one.where, one.verdict) for one in reached.lines([BY_NAME[FASTEST]], tables)]

    whole = ("whole", "reached, and the stretch")
    assert found(*cells(other=130.0)[:6]) == [whole]
    assert found(*cells(other=90.0)[:6]) == [whole, ("some", "missed")]
    assert found(*cells(other=130.0)[:3], *cells(other=130.0, suspect=True)[3:6]) == [whole, ("some", "open")]
    both = reached.lines([BY_NAME[FASTEST]], {"some": frame(*cells()[:6]), "others": frame(*cells()[6:9])})
    assert [(one.where, one.cells) for one in both] == [("some", "2 of 11"), ("others", "1 of 11")]
    apart = [one | {"gpu_uuid": f"GPU-{one['implementation']}"} for one in cells()]
    (few,) = reached.lines([BY_NAME[FASTEST]], {"apart": frame(*apart[:6])})
    assert (few.verdict, few.cells) == ("not comparable", "0 of 11")
    neither = reached.lines([BY_NAME[FASTEST]], {"apart": frame(*apart), "some": frame(*cells()[:6])})
    assert [(one.where, one.verdict, one.left_out) for one in neither] == [
        ("apart", "not comparable", "–"),
        ("some", "open", "–"),
    ]


def test_rows_without_a_time_and_suspect_cells_are_left_out_and_counted() -> None:
    """What they would make of it is said, but decides nothing."""
    rows = cells(other=112.0)
    rows[2] |= {"status": "crashed", "median_us": None, "block_medians_us": None}
    for i in (4, 5):
        rows[i] |= {"median_us": 200.0, "block_medians_us": [200.0] * 4, "suspect": i == 4}
    of_no_cell = rows[2] | {"tokens": 1, "cell": "other"}
    found = line(FASTEST, *rows, of_no_cell)
    assert (found.verdict, found.cells, found.left_out) == (
        "open",
        "10 of 11",
        "suspect cells: 1; rows without a time: 1",
    )
    assert found.measured.startswith("1.120x") and "; with the suspect cells: 1." in found.measured
    rows[4]["suspect"], rows[5]["suspect"] = False, True  # what is not compared may be suspect
    assert line(FASTEST, *rows).cells == "11 of 11"


def test_a_suspect_rival_takes_its_cell_along() -> None:
    """Left out alone, it would leave the field to a slower one."""
    rows = cells(other=90.0)
    rows[1]["suspect"] = True
    assert line(FASTEST, *rows).cells == "10 of 11"


def said(**fields: object) -> dict[str, object]:
    """What a worker says against a row with these fields."""
    measured = {
        "median_us": 1e3,
        "compulsory_bytes": 8,
        "flops": 0,
        "copy_gb_per_s": 1,
        "peak_tflops": 1,
        "device": "cpu",
        "expert_load": [8],
        "layout": None,
    }
    found = completion.derived(
        Job(cell_of("gate", tokens=8, experts=8, top_k=2), ("torch",), Settings()), measured | fields
    )
    return {name: found[name] for name in ("suspect", "suspect_reason")} | {
        "calibration_drift": fields["calibration_drift"]
    }


def test_a_drift_of_the_ceilings_widens_shares_and_ratios_to_other_cells_but_not_those_of_rivals_in_turns() -> None:
    """By its size, once for each cell; what else makes a row suspect has none, and its cell decides nothing."""
    drifted, shared = said(calibration_drift=0.04), said(calibration_drift=0.04, other_gpu_processes=1)
    rows = cells(over_dense=1.0)
    rows[0] |= drifted
    rows[1] |= drifted
    assert (line(FASTEST, *rows).cells, line(FASTEST, *rows).left_out) == ("11 of 11", "–")
    found = line("layer: time over its own two dense products, sustained", *rows)
    assert found.cells == "4 of 4"
    assert [found.measured.count(one) for one in ("1.000x [0.960, 1.041]", "1.000x [0.990, 1.010]")] == [1, 3]
    rows[0] |= shared
    assert (line(FASTEST, *rows).cells, line(FASTEST, *rows).left_out) == ("10 of 11", "suspect cells: 1")
    cell = {"model": "qwen3-30b-a3b", "tokens": 16384}
    even, uneven = row("cute", 100.0, spread=0.0, skew=0.0, **cell), row("cute", 104.0, spread=0.0, skew=0.7, **cell)
    for other, measured in ((even, "4.0 % [0.0, 8.2]"), (even | drifted, "4.0 % [-1.6, 9.9]")):
        found = line(UNEVEN, other, uneven | drifted)
        assert (found.cells, found.left_out) == ("1 of 2", "–") and found.measured.startswith(
            f"load CV 0.7: {measured}"
        )
    assert line(UNEVEN, even, uneven | shared).cells == "0 of 2"


@pytest.mark.parametrize("change", [{"gpu_uuid": "GPU-2"}, {"code_fingerprint": "b" * 16}])
def test_cards_and_versions_of_the_code_are_not_pooled(change: dict[str, str]) -> None:
    rows = cells()
    for each in rows[3:]:
        each |= change
    found = lines(FASTEST, *rows)
    assert [(each.cells, each.verdict) for each in found] == [("1 of 11", "open"), ("10 of 11", "open")]
    assert all(
        f"layers, {card}" in each.where
        for card, each in zip(("GPU-1", change.get("gpu_uuid", "GPU-1")), found, strict=True)
    )
    own = reached.lines([BY_NAME[FASTEST]], {"": frame(*rows)})
    assert [each.where for each in own] == [each.where.removeprefix("layers, ") for each in found], (
        "of a report's own rows"
    )
    two = reached.lines([BY_NAME[FASTEST]], {"a": frame(*rows[:3]), "b": frame(*cells()[3:])})
    assert [(each.where, each.cells) for each in two] == [("a", "1 of 11"), ("b", "10 of 11")]


def test_rows_that_name_no_code_are_of_one_version() -> None:
    rows = cells()
    for each in rows[3:]:
        each["code_fingerprint"] = None
    found = lines(FASTEST, *rows)
    assert [(each.cells, each.where) for each in found] == [
        ("1 of 11", "layers, GPU-1, code aaaaaaaa"),
        ("10 of 11", "layers, GPU-1, code unknown"),
    ]


def test_products_of_others_are_ours_only_where_it_is_said() -> None:
    rows = cells(other=112.0)
    rows += [row("cute_quack_gather", 80.0, **dict(cell)) for cell in layer_bars.PREFILL.values()]
    assert line(FASTEST, *rows).verdict == "missed"
    with_quack = line("layer, QuACK's products among ours: speed over the fastest other", *rows)
    assert with_quack.verdict == "reached, and the stretch" and "(cute_quack_gather, sonicmoe)" in with_quack.measured
    auto = [row("auto", 50.0, **dict(cell)) for cell in layer_bars.PREFILL.values()]
    assert line(FASTEST, *cells(), *auto).measured.startswith("1.100x"), "auto is one of ours again"


def test_against_torch() -> None:
    assert line(TORCH, *cells()).measured.startswith("1.700x") and line(TORCH, *cells()).verdict == "reached"
    assert line(TORCH, *cells(torch=159.0)).verdict == "missed"


def test_each_layer_has_its_own_bound_over_dense_products() -> None:
    what = "layer: time over its own two dense products, sustained"
    rows = [
        row("cute", 100.0, over_dense=over, **dict(cell))
        for cell, over in zip(layer_bars.LARGE.values(), (1.18, 1.1, 1.2, 1.06), strict=True)
    ]
    found = line(what, *rows, row("cute_gather", 90.0, **layer_bars.LARGE["mixtral-8x7b T=8192"]))
    assert (found.verdict, found.bar) == ("reached", "each ≤ 1.2x, 1.12x, 1.25x, 1.08x")
    assert "deepseek-v3 T=8192: 1.200x [1.188, 1.212] (cute)" in found.measured, "all four are shown"
    assert line(what, *rows[:3], rows[3] | {"over_dense": 1.1}).verdict == "missed"
    assert line(what, *rows[:3], rows[3] | {"over_dense": 1.085}).verdict == "missed, within noise"
    assert line(what, *rows[:3]).verdict == "open"
    doubted = line(what, *rows[:3], rows[3] | {"suspect": True})
    assert "; suspect: mixtral-8x7b T=8192: 1.060x" in doubted.measured and doubted.measured.count("deepseek-v3") == 1
    assert line(what, rows[0] | {"suspect": True}).measured.startswith("suspect: qwen3-30b-a3b T=16384: 1.180x")


def test_forward_and_backward_against_sonicmoe() -> None:
    what = "layer forward and backward: speed over SonicMoE"
    rows = [
        row(name, us, "training", **dict(cell))
        for cell in layer_bars.TRAINING.values()
        for name, us in (("ops", 100.0), ("sonicmoe", 102.0), ("moe_ops", 50.0))
    ]
    assert (line(what, *rows).verdict, line(what, *rows).cells) == ("reached", "3 of 3")
    assert line(what, *rows[:-3], rows[-3] | {"block_medians_us": [104.0] * 4}, *rows[-2:]).verdict == "missed"


def test_bytes_over_time_in_decoding() -> None:
    what = "layer, decode: bytes of active weights over time, of copy"
    shares = dict(zip(layer_bars.DECODE, (0.7, 0.61, 0.8, 0.76, 0.9, 0.85), strict=True))
    rows = [row("cute", 100.0, share_of_copy=shares[name], **dict(cell)) for name, cell in layer_bars.DECODE.items()]
    found = line(what, *rows)
    assert (found.verdict, found.bar) == ("reached", "each ≥ 60 %, 75 %, 80 %")
    assert "qwen3-30b-a3b T=8: 80.0 % [79.2, 80.8] (cute)" in found.measured
    assert line(what, *rows[:-1], rows[-1] | {"share_of_copy": 0.7}).verdict == "missed"


def test_uneven_loads_are_held_against_even_ones_of_the_same_implementation() -> None:
    what = "layer, uneven loads: time over balanced, less 1"
    at = {"model": "qwen3-30b-a3b", "tokens": 16384}
    rows = [row("cute", 100.0, **at), row("cute_gather", 101.0, **at)]
    rows += [row(name, us, **at | {"skew": skew}) for skew, us in ((0.7, 107.0), (1.7, 118.0)) for name in ("cute",)]
    found = line(what, *rows, row("cute_gather", 100.0, **at | {"skew": 1.7}))
    assert found.verdict == "reached" and found.measured.startswith("load CV 0.7: 7.0 % [6.")
    assert "load CV 1.7: 18.0 % [" in found.measured and found.measured.count("] (cute)") == 2
    assert line(what, *rows[:3], rows[3] | {"median_us": 130.0, "block_medians_us": [130.0] * 4}).verdict == "missed"
    lost = {"status": "crashed", "median_us": None, "block_medians_us": None}
    even, uneven = row("triton", 1.0, **at) | lost, row("triton", 1.0, **at | {"skew": 1.7}) | lost
    assert line(what, *rows, even, uneven).left_out == "rows without a time: 2", (
        "even loads are of both cells, and one row"
    )
    apart = line(what, *rows[:2], *(each | {"gpu_uuid": "GPU-2"} for each in rows[2:]))
    assert (apart.verdict, apart.cells) == ("not comparable", "0 of 2"), "no card has both"


def test_regret_of_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells: in the one the choice is the best, in the other a peer is 10 % faster than it."""
    monkeypatch.setattr(layer_bars.choices, "load", tuple)
    what, sizes = (
        "auto, chosen in the table: regret against the best measured",
        {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    )
    known = {
        "activation": "swiglu",
        "gpu_name": "NVIDIA H200",
        "started_at": "2026-11-23T01:00",
        "git_sha": "a",
        "git_dirty": False,
    }
    rows = [row("cute", 100.0, tokens=t, **sizes, **known) for t in (64, 4096)]
    rows += [
        row("sonicmoe", 100 / 1.1, tokens=4096, **sizes, **known),
        row("torch_grouped_mm", 300.0, tokens=64, **sizes, **known),
    ]
    found = line(what, *rows)
    assert found.measured.startswith("5.0 % [") and "worst: T4096 H2048 I768 E128 k8: 10.0 % [" in found.measured
    assert "] (cute, the best is sonicmoe); best: " in found.measured
    assert (found.verdict, found.cells, found.bar) == ("missed", "2 of 2", "≤ 3 % in the mean, each ≤ 15 %")
    assert line(what, rows[0], rows[3]).verdict == "reached, and the stretch"
    auto = row("auto", 80.0, tokens=64, **sizes, **known) | {"configuration": "cute_gather; tiles"}
    ran = line(what, rows[0], auto).measured
    assert "worst: T64 H2048 I768 E128 k8: 25.0 % [" in ran, "the table is empty: the first of both"
    assert "] (cute, the best is cute_gather); " in ran, "what auto ran counts as itself"


def test_models_against_the_better_of_two_forms() -> None:
    what = "model, one token: speed over the better of batched_mm and grouped_mm"
    rows = [
        row(name, us, "model", **dict(cell))
        for cell in layer_bars.MODELS.values()
        for name, us in (
            ("ops", 100.0),
            ("transformers_batched_mm", 140.0),
            ("transformers_grouped_mm", 135.0),
            ("transformers_eager", 50.0),
        )
    ]
    found = line(what, *rows)
    assert (found.verdict, found.cells) == ("reached", "4 of 4") and found.measured.startswith("1.350x")
    assert line(what, *rows[:8]).verdict == "open"


def test_cells_have_defaults_where_nothing_is_asked() -> None:
    """Another load, format, capacity or shared experts is another cell; a model sets its router and activation."""
    at = {"model": "qwen3-30b-a3b", "tokens": 4096}
    plain = row("cute", 1.0, **at, router="deepseek_v3", activation="swiglu_oai")
    others = [
        {"skew": 0.7},
        {"weights": "int4_g128"},
        {"capacity_factor": 1.25},
        {"shared_intermediate": 512},
        {"phase": "decode"},
    ]
    found = Cells(frame(plain, *(plain | other for other in others))).of(at)
    assert list(found.index) == [0]
    uneven = Cells(frame(plain, plain | {"skew": 0.7}))
    assert len(uneven.of(at | {"skew": (0.0, 0.7)})) == 2
    assert len(uneven.of(at | {"skew": None})) == 2
    assert [list(uneven.of(at | {"skew": skew}).index) for skew in (0.0, 0.7, 0.0)] == [[0], [1], [0]]
    sizes = {"tokens": 4096, "hidden": 2048}
    usual = {name: AXES[name].default for name in ("router", "activation")}
    bare = row("cute", 1.0, **sizes, **usual)
    others = [bare | {"router": "deepseek_v3"}, bare | {"activation": "relu2"}]  # which no model sets
    assert list(Cells(frame(bare, *others)).of(sizes).index) == [0]


def test_words_of_units_and_levels() -> None:
    assert Unit().bound(1.05) == "1.05x" and Unit().measured(Estimate(1.0, float("nan"), 2.0)) == "1.000x [no interval]"
    assert PERCENT_MORE.measured(Estimate(0.99999, 0.99, 1.1)) == "0.0 % [-1.0, 10.0]"
    bar = Bar("a", "layer", lambda rows: Figure(Estimate(1, 1, 1), rows), Level(2.0, (1.0, 1.0, 3.0)), side=AT_MOST)
    assert bar.words(bar.level) == "≤ 2x in the geometric mean, each ≤ 1x, 3x" and bar.words(bar.stretch) == "–"


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate(1.2, 1.15, 1.25), "reached"),
        (Estimate(1.2, 1.0, 1.4), "reached, within noise"),
        (Estimate(1.2, float("nan"), float("nan")), "reached, no interval"),
        (Estimate(1.0, 0.9, 1.05), "missed"),
        (Estimate(1.0, float("nan"), float("nan")), "missed, no interval"),
    ],
)
def test_a_figure_without_an_interval_is_not_sure(estimate: Estimate, verdict: str) -> None:
    """Nor is one whose interval has the bound in it."""
    bar = Bar("it", "layer", lambda rows: None, Level(each=1.1), cells={"a": {}})
    found = reached._verdict(bar, ["a"], {"a": Figure(estimate, ())})
    doubt = {"": "", "within noise": reached.WITHIN_NOISE, "no interval": reached.NO_INTERVAL}
    said, _, why = verdict.partition(", ")
    stretched = replace(bar, stretch=Level(each=1.3))
    if said == "reached":
        assert reached._verdict(stretched, ["a"], {"a": Figure(estimate, ())}) == found, "1.2 is not stretched by noise"
    assert found == {"reached": reached.REACHED, "missed": reached.MISSED}[said] + doubt[why]
