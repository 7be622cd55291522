"""What the pages of a platform make of cells, on cells that are made up: which are shown, in what order, under which numbers."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from test_ask import made

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.timeline import Line, Point
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.report import platform, platform_charts, platform_pages, platform_sections
from moe_routing_bench.report.platform_charts import MOST_PANELS, MOST_SERIES, OTHER
from moe_routing_bench.report.platform_charts import OURS as SERIES_OF_OURS

OURS, OTHERS = "cute", ("torch_loop", "sonicmoe", "vllm_triton")


def cell(times=None, bench="experts", day="2026-11-21", model=None, run="run", **axes: Any):
    """A cell with a row for each implementation; None: it crashed."""
    one = made(run, **axes)
    (row,) = one.rows
    row = {**row, "bench": bench, "cell": one.key, "model": model, "ended_at": day}
    rows = [
        row
        | {"implementation": name, "median_us": us, "ci_low_us": us and 0.9 * us, "ci_high_us": us and 1.1 * us}
        | {"status": "ok" if us else "crashed"}
        for name, us in (times or {OURS: 5.0}).items()
    ]
    return replace(one, bench=bench, rows=rows)


def test_a_cell_is_plain_where_both_weights_and_rows_are():
    assert platform_charts.plain(cell()) and platform_charts.plain(cell(weights=None, packed=None))
    assert not platform_charts.plain(cell(weights="int8_g128"))
    assert not platform_charts.plain(cell(packed="fp8_block128"))


def test_what_is_not_usual_of_a_cell_is_in_its_panels_name():
    """Neither sizes nor the seed, which draws other assignments of the same load."""
    one = cell(seed=5, capacity_factor=1.25, skew=0.0, layout="padded", weights="int4_g128", packed="bf16", top_k=8)
    said = ["capacity factor 1.25", "layout padded", "weights int4_g128"]
    assert sorted(platform_charts.unusual(one, ("tokens", "phase"))) == said
    assert platform_charts.unusual(one, (*platform_charts.LABELS, *platform_charts.FORMATS, "layout")) == [
        "capacity factor 1.25"
    ]
    assert platform_charts.unusual(cell(), ("tokens", "phase")) == []


def test_the_fastest_of_several_cells_is_drawn():
    cells = [cell({OURS: us}) for us in (5.0, 3.0, 4.0)]
    (mark,) = platform_charts._fastest("panel", "series", cells, lambda one: one.timed[0])
    assert mark["y"] == 3.0


def test_others_are_drawn_by_how_often_they_are_the_fastest():
    """The first is so in one cell, and absent from the others; the second is in all, and never ahead."""
    first, second, third = OTHERS
    cells = [
        cell({OURS: 1.0, first: 2.0, second: 3.0}, tokens=1),
        cell({OURS: 1.0, third: 2.0, second: 3.0}, tokens=2),
        cell({OURS: 1.0, third: 2.0, second: 3.0}, tokens=4),
    ]
    drawn = platform_charts.against_others(cells)
    assert drawn and list(drawn.chart.colors) == [platform_charts.OURS, third, first, second]


def test_a_section_draws_its_widest_bench_with_most_cells():
    """One training step over ranks hid four whole layers."""
    ranked = [cell(bench="ep_layer", tokens=count) for count in (1, 2)]
    assert len(BENCHES["ep_layer"].stages) == len(BENCHES["ep_training"].stages)
    cells = [*ranked, cell(bench="ep_training")]
    assert platform_sections.kept_bench(cells) == "ep_layer"
    gates = [cell(bench="gate", tokens=count) for count in (1, 2, 3)]
    assert BENCHES["routing"].stages and not BENCHES["gate"].stages
    assert platform_sections.kept_bench([*gates, cell(bench="routing")]) == "routing", (
        "one routing has three gates in it"
    )


def test_panels_are_of_cells_with_several_numbers_of_tokens():
    """Two phases of one number are none; where all have one number, they are drawn."""
    phases = [cell(hidden=1024, phase=phase) for phase in ("decode", "prefill")]
    tokens = [cell(hidden=2048, tokens=count) for count in (64, 128)]
    for given, shown in ((phases + tokens, tokens), (phases, phases)):
        (group,) = platform_charts._groups(given, platform_charts.LABELS).values()
        assert group == shown


def test_sections_leave_out_the_cells_of_seed_documents():
    cells = [cell(run="gpu.seed-004"), cell(run="gpu.decode"), cell(run="gpu", tokens=128)]
    for one in cells:
        one.axes["weights"] = "int8_g128"
    (section,) = (one for one in platform_sections.sections(cells) if one.name == "quantised")
    assert section.cells == [1, 2]


def test_cells_without_a_pair_are_counted_apart():
    both = [cell({OURS: 1.0, "torch_loop": 2.0}) for _ in range(3)]
    said = platform_sections.tally([*both, cell(), cell(), cell({"torch_loop": 2.0})])
    assert said.startswith("6 cells. ") and said.endswith("of 3; 3 more have no time of ours or of another.")
    assert "more" not in platform_sections.tally(both)


def test_a_page_opens_with_the_model_of_most_numbers_of_tokens():
    cells = [cell(bench="layer", model="a", tokens=8), cell(bench="layer", model="a", tokens=8, skew=1.0)]
    cells += [cell(bench="layer", model="b", tokens=count) for count in (16, 4096)]
    assert platform.opening(cells) == {"model": "b", "tokens": 16}
    assert platform.opening(cells[::-1]) == {"model": "b", "tokens": 16}


def test_a_run_is_as_old_as_its_latest_cell(monkeypatch):
    monkeypatch.setattr(platform_pages.stored, "submitter", lambda run: None)
    cells = [cell(day=day) for day in ("2026-11-22", "2026-11-29", "2026-11-21")]
    assert platform_pages._run("run", 3, [*cells, cell(run="other", day="2026-12-01")])["day"] == "2026-11-29"


def test_a_page_that_stands_alone_counts_all_rows(monkeypatch, tmp_path):
    """Those that crashed, too, as the page of a site does."""
    cells, written = [cell({OURS: 1.0, "torch_loop": None}), cell(tokens=128)], []
    monkeypatch.setattr(platform_pages.platform, "read", lambda name: cells)
    monkeypatch.setattr(platform_pages.stored, "submitter", lambda run: None)
    monkeypatch.setattr(platform_pages, "_speed", lambda *known: ([], {"rules": {"runs": {}}, "charts": {}}))
    monkeypatch.setattr(platform_pages.page, "write_platform", lambda *given, **more: written.append(more["runs"]))
    platform_pages.write_alone("gpu", tmp_path / "page.html", {})
    assert [(run["name"], run["rows"]) for (run,) in written] == [("run", "3")]


def test_a_cell_of_older_code_is_so_by_the_code_of_its_own_bench(monkeypatch):
    """And by the row that the page shows, which has a time."""
    today = {name: BENCHES[name].code_fingerprint() for name in ("gate", "pack")}
    cells = [cell({"torch": None, OURS: 1.0}, bench=name) for name in ("gate", "pack", "pack", "gate")]
    for one, code in zip(cells, (today["gate"], today["pack"], "older", today["pack"]), strict=True):
        one.rows[0] |= {"code_fingerprint": "of what crashed"}
        one.rows[1] |= {"code_fingerprint": code}
    monkeypatch.setattr(platform, "_rules", lambda *known: {})
    monkeypatch.setattr(platform, "_elsewhere", lambda *known: {})
    monkeypatch.setattr(platform, "_version", lambda one: None)
    monkeypatch.setattr(platform.command, "again", lambda row: "")
    monkeypatch.setattr(platform, "packed", list)
    assert platform.page_data("gpu", cells, {})["cells"]["older"] == [False, False, True, True]


def test_elsewhere_the_fastest_of_all_runs_counts(monkeypatch):
    runs = {"here": ["h"], "there": ["a", "b", "c"]}
    known = {"a": [cell({OURS: 5.0})], "b": [cell({"torch_loop": 3.0})], "c": [cell({OURS: 4.0}), cell(tokens=9)]}
    monkeypatch.setattr(platform.stored, "runs", lambda: runs)
    monkeypatch.setattr(platform.stored, "cells", lambda names, benches: [one for n in names for one in known[n]])
    found = platform._elsewhere("here", [cell()])
    assert list(found.values()) == [[{"platform": "there", "fastest": "torch_loop", "median_us": 3.0}]]


SIZES: dict[str, Any] = {"hidden": 32, "intermediate": 16, "experts": 8, "top_k": 2}


def marks(drawn, *names):
    """The values of a figure's marks in these columns."""
    return [tuple(mark) for mark in drawn.chart.marks[list(names)].itertuples(index=False)]


def test_a_mark_is_the_time_of_a_row_with_its_interval():
    """And says by what, in which phase and with which format, where this is not that of the activations."""
    one = cell({OURS: 5.0}, run="gpu.decode", tokens=96, phase="prefill")
    found = platform_charts._mark("panel", "series", one, one.rows[0])
    assert {name: found[name] for name in ("panel", "series", "x", "y", "low", "high", "says")} == {
        **{"panel": "panel", "series": "series", "x": 96, "y": 5.0, "low": 4.5, "high": 5.5},
        "says": "cute, prefill, run gpu.decode",
    }
    assert found["row"].startswith("../gpu.decode/index.html#row-")
    other = cell(weights="int8_g128")
    assert platform_charts._mark("p", "s", other, other.rows[0])["says"] == "cute, decode, int8_g128, run run"


def test_as_many_others_as_there_is_room_for():
    """One more than there is room for, all present as often: those ahead most often, then those in most cells, then by name."""
    names = [f"z{i}" for i in range(MOST_SERIES)]
    cells = [cell({OURS: 1.0, **{name: 2.0 + i for i, name in enumerate(names)}}, tokens=tokens) for tokens in (1, 2)]
    drawn = platform_charts.against_others(cells)
    assert drawn and list(drawn.chart.colors) == [SERIES_OF_OURS, *names[: MOST_SERIES - 1]]
    few, many = OTHERS[:2]
    cells = [cell({OURS: 1.0, few: 3.0, many: 4.0, "vllm": 2.0}), cell({OURS: 1.0, many: 3.0, "vllm": 2.0}, tokens=9)]
    drawn = platform_charts.against_others(cells)
    assert drawn and list(drawn.chart.colors) == [SERIES_OF_OURS, "vllm", many, few]


def test_the_panels_with_most_numbers_of_tokens_come_first():
    """However many cells another has; no more than have room, and all series on both axes of each."""
    wide = [cell(hidden=4096, tokens=tokens, phase="decode") for tokens in (1, 2, 4)]
    full = [cell(hidden=2048, tokens=tokens, phase=phase) for tokens in (1, 2) for phase in ("decode", "prefill")]
    groups = platform_charts._groups([*full, *wide], platform_charts.LABELS)
    assert list(groups.values()) == [wide, full]
    many = [cell(hidden=hidden, tokens=tokens) for hidden in range(1, MOST_PANELS + 3) for tokens in (1, 2)]
    assert len(platform_charts._groups(many, platform_charts.LABELS)) == MOST_PANELS


def test_sets_of_sizes_with_several_formats_are_preferred():
    """By as many as there are; where none has several, all are shown."""
    one = [cell(hidden=1024, tokens=tokens) for tokens in (1, 2, 4)]
    two = [cell(hidden=2048, tokens=tokens, weights=form) for tokens in (1, 2) for form in ("bf16", "int8_g128")]
    but = (*platform_charts.LABELS, *platform_charts.FORMATS)
    assert list(platform_charts._groups([*one, *two], but, several=True).values()) == [two]
    assert list(platform_charts._groups(one, but, several=True).values()) == [one]


def test_a_panel_is_named_by_its_model_or_all_of_its_sizes():
    sizes = cell(**SIZES, skew=1.5)
    assert platform_charts._name(sizes, ("tokens", "phase"), [sizes]) == "experts, H=32 I=16 E=8 k=2 skew 1.5"
    named = cell(**SIZES, model="mixtral-8x7b")
    assert platform_charts._name(sizes, ("tokens", "phase", "skew"), [sizes, named]) == "experts, mixtral-8x7b"


def test_formats_are_drawn_unquantised_first_then_by_how_many_cells_of_ours():
    """Cells without ours do not count, and are no line; the fastest other is of the formats that are drawn."""
    forms = [(tokens, form) for tokens in (1, 2, 4) for form in ("int8_g128", "int4_g128", "e4m3_g128")]
    ours = {("int8_g128", 1), ("int8_g128", 2), ("int4_g128", 1), ("int4_g128", 2), ("int4_g128", 4)}
    cells = [
        cell(
            {OURS: 5.0, "torch_loop": 9.0} if (form, tokens) in ours else {"torch_loop": 3.0 + tokens},
            tokens=tokens,
            weights=form,
        )
        for tokens, form in forms
    ]
    cells += [cell({OURS: 7.0}, tokens=1)]
    drawn = platform_charts.formats(cells)
    assert drawn and list(drawn.chart.colors) == ["bf16", "int4_g128", "int8_g128", OTHER]
    others = [(x, y) for series, x, y in marks(drawn, "series", "x", "y") if series == OTHER]
    assert others == [(1, 9.0), (2, 9.0), (4, 7.0)], "of the format without ours none"


def test_panels_of_one_number_of_tokens_each_are_rows_of_dots():
    """Ours first in each, whatever the order of the records; two numbers of tokens in one panel are lines."""
    found = [
        {"panel": panel, "series": series, "x": tokens, "y": us, "row": f"{panel}{series}"}
        for panel, tokens, series, us in (("a", 8, "b", 3.0), ("a", 8, "ours", 2.0), ("c", 16, "ours", 1.0))
    ]
    drawn = platform_charts.drawn(found, ["ours", "b"])
    assert drawn and drawn.chart.kind == "dots" and drawn.rows == ["aours", "cours", "ab"]
    assert marks(drawn, "panel", "x", "y") == [("a, T=8", 2.0, "ours"), ("c, T=16", 1.0, "ours"), ("a, T=8", 3.0, "b")]
    more = platform_charts.drawn([*found, found[0] | {"x": 32}], ["ours", "b"])
    assert more and more.chart.kind == "lines" and marks(more, "x", "y")[0] == (8, 3.0)


def test_a_page_opens_with_the_usual_number_of_tokens_and_no_seed():
    """The nearest to 64; a model that only replayed documents have does not count."""
    cells = [cell(bench="layer", model="a", tokens=tokens) for tokens in (8, 96, 4096)]
    seed = [cell(bench="layer", model="b", tokens=tokens, run="gpu.seed-003") for tokens in (1, 2, 4, 64)]
    lost = [cell({OURS: None}, bench="layer", model="c", tokens=tokens) for tokens in (1, 2, 4, 64)]
    assert platform.opening([*seed, *lost, *cells]) == {"model": "a", "tokens": 96}


def test_a_page_without_layers_opens_with_the_composite_of_most_cells():
    """Then with the bench of most cells that have a time."""
    composite = max((name for name, bench in BENCHES.items() if bench.stages), key=len)
    cells = [cell(bench=composite), *(cell(bench="pack") for _ in range(3))]
    assert platform.opening(cells) == {"bench": composite}
    crashed = [cell({OURS: None}, bench="model", tokens=tokens) for tokens in (1, 2)]
    assert platform.opening([*crashed, cell(bench=composite)]) == {"bench": composite}


def test_what_the_form_asks_of_an_axis():
    """Distances of axes that begin at nothing are linear; letters are their own labels."""
    found = {name: platform._asked(axis) for name, axis in AXES.items()}
    assert (found["tokens"]["scale"], found["skew"]["scale"], found["dtype"]["scale"]) == ("log", "linear", "name")
    assert [found[name]["label"] for name in ("tokens", "top_k", "capacity_factor")] == ["T", "k", "capacity factor"]


def test_the_rules_of_a_page_are_of_what_was_measured(monkeypatch):
    """A bench whose cells all crashed was not measured; a preset that cannot be has no sizes."""
    preset = {"unsupported": "", **dict.fromkeys(AXES)}
    models = {"a": type("Preset", (), preset)(), "b": type("Preset", (), preset | {"unsupported": "no sizes"})()}
    monkeypatch.setattr(platform.stored, "runs", lambda: {"gpu": []})
    monkeypatch.setattr(platform.presets, "values", lambda one: dict.fromkeys(platform.PRESET) | {"hidden": 7})
    cells = [cell(bench="gate"), cell({OURS: None}, bench="pack")]
    for one in cells:
        del one.axes["weights"]
    found = platform._rules("gpu", cells, models)
    assert found["measured"] == ["gate"] and found["models"] == {"a": {"hidden": 7}}
    assert found["unsupported"] == {"b": "no sizes"}


def test_each_cell_has_its_own_model(monkeypatch):
    for name in ("_rules", "_elsewhere"):
        monkeypatch.setattr(platform, name, lambda *known: {})
    monkeypatch.setattr(platform, "_version", lambda one: None)
    monkeypatch.setattr(platform.command, "again", lambda row: "")
    monkeypatch.setattr(platform, "packed", list)
    cells = [cell(model="a", tokens=8), cell(day="2026-11-29"), cell({OURS: 1.0, "torch_loop": 2.0}, model="b")]
    for one in cells:
        for row in one.rows:
            row["code_fingerprint"] = "old"
    found = platform.page_data("gpu", cells, {})
    assert found["cells"]["model"] == ["a", None, "b"] and found["cells"]["axis tokens"] == [8, 64, 64]
    assert found["cells"]["day"] == ["2026-11-21", "2026-11-29", "2026-11-21"]
    assert found["count"] == {"cells": 3, "rows": 4} and found["rows"]["of"] == [0, 1, 2, 2]


def test_only_verdicts_that_there_are_are_told():
    both = [cell({OURS: 1.0, "torch_loop": 9.0}) for _ in range(2)]
    assert platform_sections.tally(both).endswith("ours is faster in 2 of 2.")
    slow = cell({OURS: 9.0, "torch_loop": 1.0})
    assert platform_sections.tally([*both, slow]).endswith("ours is faster in 2, slower in 1 of 3.")


def line_of(name, *times, days=None):
    """A line with a time in microseconds on the first days of a month, at 06:00 each."""
    points = [
        Point("run", f"2026-11-{day:02d}T06:00:00+00:00", "c" * 40, us, 0.5 * us, 2 * us, {}, 1.25, 1.0, 1.5, verdict)
        for day, us, verdict in zip(days or range(1, 9), times, ("", *["faster"] * 7), strict=False)
    ]
    return Line("pack", "a", name, tuple(points))


def test_the_longest_history_of_ours_is_drawn_from_the_first_day_of_all():
    """Not the latest first day, nor a short one of `auto`; as many others as there is room for, whatever ours are called."""
    longer, short = line_of("cute", 8.0, 4.0, 2.0, days=(3, 4, 6)), line_of("auto", 8.0, 4.0)
    others = [line_of(f"z{i}", 3.0, 3.0, days=(1, 5)) for i in range(MOST_SERIES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform_sections, "longest", lambda lines, most: {"p": list(lines)})
        patch.setattr(platform_sections, "is_ours", lambda line: line.implementation in ("cute", "auto", "triton"))
        patch.setattr(platform_sections.chart, "doubts", lambda row: "")
        patch.setattr(platform_sections, "chart_data", lambda chart: {"chart": chart})
        drawn = platform_sections.over_time([longer, short, line_of("triton", 5.0), *others])["chart"]
    assert list(drawn.colors) == ["ours", *(f"z{i}" for i in range(MOST_SERIES - 1))]
    own = drawn.marks[drawn.marks["series"] == "ours"]
    assert list(own["x"]) == [2.0, 3.0, 5.0] and list(own["y"]) == [1.0, 2.0, 4.0]
    assert list(own["low"]) == [0.5, 1.0, 2.0] and list(own["high"]) == [2.0, 4.0, 8.0]
    texts = Counter(
        (series, text) for series, text in zip(drawn.marks["series"], drawn.marks["text"], strict=True) if text == text
    )
    assert texts == {("ours", "1.25x"): 2}, "of others no step has a text"
    assert drawn.x.label == "days since 2026-11-01" and set(own["panel"]) == {"p"}


def test_the_cells_of_a_model_have_all_of_its_sizes():
    """By stage, then tokens, then formats; others, and those without a time, are not of it."""
    sizes: dict[str, Any] = {
        name: i + 2 if AXES[name].kind is int else None for i, name in enumerate(platform_sections.SIZES)
    }
    mine = [
        cell(bench=bench, tokens=tokens, weights=weights, **sizes)
        for bench, tokens, weights in (
            ("layer", 8, "bf16"),
            ("layer", 64, "a4"),
            ("layer", 64, "bf16"),
            ("experts", 1, "bf16"),
        )
    ]
    rest = [cell(bench="layer", **sizes | {name: 99}) for name in sizes]
    rest += [cell({OURS: None}, bench="layer", **sizes), cell(bench="gate", **sizes)]
    assert platform_sections.of_model([*rest, *mine[::-1]], sizes) == mine


def test_the_line_of_a_cell_has_ours_before_the_fastest_other():
    one = cell(
        {"torch_loop": 2.0, "cute": 1.0, "triton": 1.5}, tokens=96, phase="prefill", weights="int8_g128", skew=1.5
    )
    texts = [text for text, _ in platform_sections.line(one)]
    assert texts[:5] == ["experts", "96", "prefill", "bf16, int8_g128", "skew 1.5"] and texts[-1] == "run"
    assert texts[5].startswith("cute 1") and texts[6].startswith("torch_loop 2") and texts[7].startswith("2.00x")


def test_the_figure_of_several_benches_is_that_of_most_stages():
    """Whatever their names."""
    assert platform_sections.kept_bench([cell(bench="routing"), cell(bench="router"), cell(bench="pack")]) == "routing"


def test_a_preview_is_the_first_panel_with_its_own_colours():
    cells = [
        cell({OURS: 1.0, other: 2.0}, bench="layer", hidden=hidden, tokens=tokens)
        for hidden, other, count in ((1, "torch_loop", 3), (2, "sonicmoe", 2))
        for tokens in range(1, count + 1)
    ]
    shown = platform_sections.preview(cells)
    assert shown and set(shown.colors) == {SERIES_OF_OURS, "torch_loop"} and len(shown.marks) == 6


def test_what_the_form_proposes_of_an_axis_rises():
    """Families of formats first, then those that were measured and the one that all may ask for; numbers that were measured alone."""
    cells = [cell(weights=form, tokens=tokens) for form, tokens in (("nvfp4", 512), ("e4m3_g128", 8), ("int4_g32", 64))]
    assert platform._known("tokens", cells) == [8, 64, 512]
    found = platform._known("weights", cells)
    assert found[-4:] == ["e4m3_g128", "int4_g32", "mxfp4", "nvfp4"] and found[:-4] == list(platform.nearest.FAMILIES)
    assert platform._known("phase", cells) == ["prefill", "decode", "training"]
