"""The rule of all figures, on stored rows: few series, suspect rows hollow, equal scales across panels."""

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pandas as pd
import pytest

from moe_routing_bench.comparison import origins
from moe_routing_bench.figures import FIGURES, palette
from moe_routing_bench.figures import chart as charting
from moe_routing_bench.figures.chart import DOUBTFUL, KINDS, MOST_SERIES, Chart, Scale, look, marks
from moe_routing_bench.figures.row_groups import preferred
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.quality import adaptation_rows, run_rows
from moe_routing_bench.report.script_data import chart_data
from moe_routing_bench.store import paths, records

ROOT = PACKAGE.parents[1]
RUNS = sorted(path.parent.name for path in (ROOT / "results").glob("*/manifest.yaml"))
PARTS = ("bars", "matrix")  # whose series are parts of a whole, or classes of one number


def few(whole: Chart) -> Chart:
    return charting.few(whole, preferred)


def table(run: str, source: str) -> Any:
    """The stored rows that figures of a source draw; None where the run has none."""
    name = {"measurements": paths.measurements, "quality": paths.quality, "perft": paths.perft}[source](run)
    path = ROOT / name
    if not path.is_file():
        return None
    if source == "measurements":
        return records.frame(records.read(path))
    schema = run_rows.SCHEMA if source == "quality" else adaptation_rows.SCHEMA
    return run_rows.read(path, schema).to_pandas()


@cache
def charts(run: str) -> dict[str, tuple[Chart, Chart]]:
    """The figures of a run that have marks: as their function makes them, and as they are drawn."""
    found = {}
    tables = {source: table(run, source) for source in {figure.source for figure in FIGURES.values()}}
    for name, figure in FIGURES.items():
        if (rows := tables[figure.source]) is None:
            continue
        module = importlib.import_module(f"moe_routing_bench.figures.{figure.file}")
        whole = getattr(module, name if figure.module else "chart")(rows)
        if len(whole.marks):
            found[name] = whole, few(whole)
    return found


def every() -> Iterator[tuple[str, str, Chart, Chart]]:
    for run in RUNS:
        for name, (whole, drawn) in charts(run).items():
            yield run, name, whole, drawn


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_figure_has_few_series_and_no_panel_is_lost(run: str) -> None:
    for name, (whole, drawn) in charts(run).items():
        if drawn.kind not in PARTS:
            assert len(drawn.colors) <= MOST_SERIES, name
        assert set(drawn.marks["series"]) <= set(drawn.colors), name
        assert list(dict.fromkeys(whole.marks["panel"])) == list(dict.fromkeys(drawn.marks["panel"])), name
        assert len(chart_data(drawn)["legend"]) == len(drawn.colors)
        if len(drawn.colors) < len(whole.colors):
            said = f"{len(drawn.colors)} of {len(whole.colors)} series, the others are in the tables"
            assert drawn.note.endswith(said), name
        else:
            assert (drawn.marks is whole.marks, drawn.note) == (True, whole.note)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_two_series_have_one_colour(run: str) -> None:
    """On white paper and on a dark page."""
    for name, (_, drawn) in charts(run).items():
        for tints in (list(drawn.colors.values()), list(map(palette.dark, drawn.colors.values()))):
            assert len(set(tints)) == len(tints), name


# There are more implementations of a layer than colours.
LATE = {"torch_loop", "dequant_loop"}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_an_implementation_has_one_colour_in_all_figures_of_a_run(run: str) -> None:
    """`matmul_cute` was brown where `torch_compile` was not drawn, and red where it was."""
    seen: dict[str, dict[str, str]] = {}
    for figure, (_, drawn) in charts(run).items():
        if drawn.kind not in PARTS:
            for name, tint in drawn.colors.items():
                seen.setdefault(name, {}).setdefault(tint, figure)
    assert {name: tints for name, tints in seen.items() if len(tints) > 1 and name not in LATE} == {}


def test_a_mark_joined_to_a_series_goes_with_it() -> None:
    """The best rate of a rule that is not shown was a point on no line."""
    names = [*OURS, *OTHERS]
    found = [{"panel": "one", "series": name, "x": 1.0, "y": 2.0} for name in names]
    best = [{"panel": "one", "series": "best", "x": 1.0, "y": 2.0, "join": name} for name in names]
    whole = Chart(
        "lines", Scale("x"), Scale("y"), marks(found + best), dict.fromkeys([*names, "best"], "#000000"), pd.DataFrame()
    )
    kept = charting.few(whole, lambda _: ["best", *names])
    joined = kept.marks.loc[kept.marks["series"] == "best", "join"]
    assert set(joined) == set(kept.colors) - {"best"} and len(kept.colors) == MOST_SERIES


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_ours_and_the_fastest_other_are_among_them(run: str) -> None:
    """Of figures that compare implementations: what is most often the fastest, ours and of the others."""
    for name, (whole, drawn) in charts(run).items():
        shown = whole.shown
        if drawn is whole or "implementation" not in shown or not set(shown["implementation"]) & set(whole.colors):
            continue
        cells = shown.sort_values("median_us", kind="stable")
        mine = pd.Series(
            [one in origins.ours(bench) for bench, one in zip(cells["bench"], cells["implementation"], strict=True)],
            index=cells.index,
        )
        for some in (cells[mine], cells[~mine]):
            if len(some):
                first = some.drop_duplicates(["bench", "cell"])["implementation"].value_counts()
                assert set(first.index[first == first.max()]) & set(drawn.colors), name


@pytest.mark.slow
def test_all_kinds_of_charts_are_among_these_figures() -> None:
    found = list(every())
    assert {drawn.kind for *_, drawn in found} == set(KINDS)
    rare = {"backward", "perft", "networks", "train_modes"}
    untimed = {"learning_rates", "loss_seconds", "quality_pareto"}  # study A0 has one rate, and its runs shared GPUs
    assert {name for _, name, *_ in found} >= set(FIGURES) - rare - untimed
    assert sum(whole is not drawn for *_, whole, drawn in found) > 30


@pytest.mark.slow
def test_a_suspect_row_is_hollow_in_every_figure_of_times() -> None:
    looks = [
        (name, look(drawn, doubt))
        for _, name, _, drawn in every()
        if drawn.timed
        for doubt in drawn.marks["doubt"]
        if isinstance(doubt, str) and "suspect" in doubt
    ]
    assert {kind for _, kind in looks} == {DOUBTFUL} and len({name for name, _ in looks}) > 4


@pytest.mark.slow
def test_panels_of_one_scale_have_the_same_ends() -> None:
    """Of both axes; a panel whose scale differs on purpose has another label or kind in `own`."""
    several = set()
    for run, name, _, drawn in every():
        for which, equal in enumerate((drawn.shared, drawn.level)):
            scales = [drawn.scales(panel)[which] for panel in drawn.marks["panel"].unique()]
            if any(scales.count(one) > 1 and one.kind != "names" for one in scales):
                several.add((name, which))
                assert equal, (run, name, "xy"[which])
    assert several >= {("decode", 0), ("bandwidth", 0), ("bandwidth", 1), ("pareto", 1), ("format_limits", 1)}


def chart(names: list[str], panels: dict[str, list[str]] | None = None, **shown: Any) -> Chart:
    """Points of these series, each in all panels or in those given."""
    found = [
        {"panel": panel, "series": name, "x": 1.0, "y": 2.0}
        for panel, there in (panels or {"one": names}).items()
        for name in there
    ]
    colors = {name: f"#{place:06x}" for place, name in enumerate(names)}
    return Chart("points", Scale("x"), Scale("y"), marks(found), colors, pd.DataFrame(shown))


def rows(times: dict[str, list[float]], bench: str = "layer") -> dict[str, list[Any]]:
    """Rows of cells, in which implementations have these times."""
    found = [(f"c{cell}", name, us) for name, each in times.items() for cell, us in enumerate(each)]
    cell, implementation, median = (list(column) for column in zip(*found, strict=True))
    return {"bench": [bench] * len(found), "cell": cell, "implementation": implementation, "median_us": median}


OURS = ["cute", "cute_gather", "triton_gather"]
OTHERS = ["torch_loop", "torch_grouped_mm", "quack", "vllm_triton", "sglang_triton", "sonicmoe"]


def test_ours_that_are_fastest_and_the_others_that_are() -> None:
    times = {name: [10.0 + place, 10.0 + place] for place, name in enumerate([*OURS, *OTHERS])}
    times["triton_gather"] = [1.0, 99.0]
    times["quack"], times["torch_loop"] = [0.5, 0.5], [50.0, 50.0]
    kept = few(chart(list(times), **rows(times)))
    assert set(kept.colors) == {"cute", "triton_gather", "quack", "sglang_triton", "sonicmoe", "torch_grouped_mm"}
    assert set(kept.marks["series"]) == set(kept.shown["implementation"]) == set(kept.colors)
    assert kept.note == "6 of 9 series, the others are in the tables"


def test_the_fastest_of_each_cell_is_shown() -> None:
    """A line of a figure of who is the fastest had no mark of the one that was; another package keeps a place."""
    times = {name: [50.0] * 4 for name in [*OURS, "cute", *OTHERS]}
    for place, name in enumerate(OURS):
        times[name] = [60.0] * 4
        times[name][place] = 1.0
    kept = few(chart(list(times), **rows(times)))
    assert set(OURS) < set(kept.colors) and len(set(kept.colors) & set(OTHERS)) == MOST_SERIES - len(OURS)


def test_others_that_are_fastest_give_no_place_to_ours() -> None:
    """Four cells, each with another package in front, and ours behind them."""
    times = {name: [50.0] * 4 for name in [*OURS, *OTHERS]}
    for place, name in enumerate(OTHERS[:4]):
        times[name][place] = 1.0
    kept = few(chart(list(times), **rows(times)))
    assert set(kept.colors) == {*OURS[:2], *OTHERS[:4]}


def test_without_others_more_of_ours_are_shown() -> None:
    names = origins.ours("layer")
    assert len(names) > MOST_SERIES
    kept = few(chart(sorted(names), **rows({name: [1.0] for name in names})))
    assert len(kept.colors) == MOST_SERIES


def test_each_panel_keeps_a_series() -> None:
    """Also a panel whose only series is the fastest in no other panel."""
    names = [*OURS, *OTHERS]
    times = {name: [1.0 + place] for place, name in enumerate(names)}
    kept = few(chart(names, {"one": names, "two": ["sonicmoe"], "three": ["cute", "sonicmoe"]}, **rows(times)))
    assert set(kept.marks["panel"]) == {"one", "two", "three"} and len(kept.colors) == MOST_SERIES
    kept = few(
        chart(names, {"one": names, "two": ["vllm_triton"], "three": ["sonicmoe", "vllm_triton"]}, **rows(times))
    )
    others = {"torch_loop", "quack", "sglang_triton"}
    assert set(kept.colors) == {*OURS[:2], *others, "vllm_triton"}, "one of a panel is enough"


def test_rules_of_best_quality_and_those_of_the_front() -> None:
    rules = ["dense", *(f"rule{number}" for number in range(8))]
    bits = [9.0, *(1.0 + number for number in range(8))]
    whole = chart(rules, router=rules, bits_per_byte=bits)
    assert list(few(whole).colors) == ["dense", "rule0", "rule1", "rule2", "rule3", "rule4"]
    whole.marks["join"] = ["front" if name == "rule7" else None for name in whole.marks["series"]]
    assert list(few(whole).colors) == ["dense", "rule0", "rule1", "rule2", "rule3", "rule7"]


def test_rules_are_compared_within_an_entry() -> None:
    """One that only a larger model has is not the best by that."""
    rules = [f"rule{number}" for number in range(8)]
    label, router = ["small"] * 8 + ["large"] * 2, [*rules, "rule7", "rule0"]
    bits = [2.0 + number for number in range(8)] + [1.1, 1.0]
    assert "rule7" not in few(chart(rules, router=router, bits_per_byte=bits, label=label)).colors


def test_contestants_are_ranked_by_their_own_runs() -> None:
    """One rule with several networks or shared experts has several, which are not shown for having another name than their rule."""
    rules = [f"rule{number}" for number in range(8)]
    names = ["dense", *rules, "rule0 shared gated", "late †"]  # rows have the mark, too
    router, bits = ["dense", *rules, "rule0", "late"], [9.0, *(1.0 + number for number in range(8)), 8.5, 9.5]
    kept = few(chart(names, router=router, contestant=names, bits_per_byte=bits))
    assert list(kept.colors) == ["dense", "rule0", "rule1", "rule2", "rule3", "rule4"]
    assert set(kept.shown["contestant"]) == set(kept.colors)


def test_a_panel_keeps_a_rule_beside_what_it_is_compared_with() -> None:
    """What is no rule, such as chance, is in each panel, and says nothing alone."""
    rules, rest = [f"rule{number}" for number in range(8)], ["late0", "late1"]
    names, bits = ["chance", *rules, *rest], [*(1.0 + number for number in range(8)), 20.0, 21.0]
    panels = {"one": ["chance", *rules], "two": ["chance", *rest]}
    kept = few(chart(names, panels, router=[*rules, *rest], bits_per_byte=bits))
    assert set(kept.colors) == {"chance", "rule0", "rule1", "rule2", "rule3", "late0"}


def test_formats_without_zero_points_come_first() -> None:
    names = ["bf16", "int8_g128", "int8z_g128", "int4_g128", "int4z_g128", "int2_g128", "e4m3_g128", "e5m2_g128"]
    assert list(few(chart(names)).colors) == ["bf16", "int8_g128", "int4_g128", "int2_g128", "e4m3_g128", "e5m2_g128"]


def test_sizes_with_most_marks() -> None:
    """And one of a panel that would have none."""
    names = [f"E={2**power}" for power in range(9)]
    panels = {"one": names, "two": names[2:], "three": names[4:], "four": ["E=1"]}
    assert list(few(chart(names, panels)).colors) == ["E=1", *names[4:]]


def test_few_series_are_all_shown() -> None:
    whole = chart(OTHERS)
    assert few(whole) is whole and len(OTHERS) == MOST_SERIES
