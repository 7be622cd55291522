"""What the pages of a platform make of cells, on cells that are made up: which are shown, in what order, under which numbers."""

from dataclasses import replace

from test_ask import made

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.report import platform, platform_charts, platform_pages, platform_sections

OURS, OTHERS = "cute", ("torch_loop", "sonicmoe", "vllm_triton")


def cell(times=None, bench="experts", day="2026-11-21", model=None, run="run", **axes):
    """A cell with a row for each implementation; None: it crashed."""
    one = made(run, **axes)
    (row,) = one.rows
    row = {**row, "bench": bench, "cell": one.key, "model": model, "ended_at": day}
    rows = [
        row | {"implementation": name, "median_us": us, "status": "ok" if us else "crashed"}
        for name, us in (times or {OURS: 5.0}).items()
    ]
    return replace(one, bench=bench, rows=rows)


def test_a_cell_is_plain_where_both_weights_and_rows_are():
    assert platform_charts.plain(cell()) and platform_charts.plain(cell(weights=None, packed=None))
    assert not platform_charts.plain(cell(weights="int8_g128"))
    assert not platform_charts.plain(cell(packed="fp8_block128"))


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
