"""The report is one offline file that holds every finding, figure and reason, and escapes what it shows."""

import html
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rows import BAD, frame, one, rows, some

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison.regret import entries
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import FIGURES, row_groups
from moe_routing_bench.report import reached, routing_bars, section_tables
from moe_routing_bench.report import render as render_module
from moe_routing_bench.report.costs import cost_of_capacity, cost_of_skew, pairs
from moe_routing_bench.report.findings import findings
from moe_routing_bench.report.page import percent, quantity
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_fields import COLUMNS
from moe_routing_bench.store import records
from moe_routing_kernels.implementations import ranked

pytestmark = pytest.mark.slow

FEW = rows().query("bench == 'gate'")


def test_report(tmp_path):
    """Findings, figures, reasons; no markup from a value; nothing fetched. Failed and empty tables too."""
    svg, out = tmp_path / "f.svg", tmp_path / "index.html"
    svg.write_text("<svg/>")
    for table in (some(rows()), some(rows(gpu=False)), some(rows(status="crashed")), rows().iloc[:0]):
        render(table, dict.fromkeys(FIGURES, svg), out)
        page = out.read_text()
        assert all(percent(one.text) in html.unescape(page) for one in findings(table))
        measured = [figure for figure in FIGURES.values() if figure.source == "measurements"]
        undrawn = page.partition('id="undrawn"')[2].partition("</p>")[0]
        assert page.count('<div class="chart"') + sum(one.title in undrawn for one in measured) == len(measured)
        assert not re.search(r"https?://(?!www\.w3\.org/)|<script>alert", page)
        assert table.empty or html.escape(BAD) in page


def test_what_a_newcomer_is_told(tmp_path):
    """On a CPU what routing is, what to read and what to do next, and nothing of what auto chooses on a GPU; elsewhere neither."""
    pages = {}
    for cpu in (True, False):
        render(
            rows(gpu=not cpu).query("bench == 'layer' and skew == 0 and status == 'ok'"), {}, tmp_path / "index.html"
        )
        pages[cpu] = (tmp_path / "index.html").read_text()
        assert ('id="newcomer"' in pages[cpu], 'id="choices"' in pages[cpu]) == (cpu, not cpu)
        assert 'id="published-page"' not in pages[cpu]
    (tmp_path / "published.html").write_text("")
    render(rows(gpu=False).query("bench == 'layer'"), {}, tmp_path / "index.html")
    assert '<a id="published-page" href="published.html">' in (tmp_path / "index.html").read_text()
    told = pages[True].partition('id="newcomer"')[2].partition("</p>")[0]
    for text in (
        "permute sorts the choices by expert",
        "median_us",
        "best_verdict",
        "may exceed 100 %",
        "Next: <code>make report",
    ):
        assert text in told


def test_rows_without_a_time_are_told_by_reason():
    """Every status but ok, with the cells of each reason and their rows."""
    table = frame(
        one("pack", "cute", status="ok"),
        one("pack", "cute", cell="b", status="timeout", reason="60 s"),
        one("pack", "cute", cell="a", status="timeout", reason="60 s"),
        one("gate", "torch", cell="a", status="unsupported"),
    )
    found = [
        (one.status, one.bench, one.implementation, one.reason, [cell for cell, _ in one.cells])
        for one in render_module._failed(table)
    ]
    assert found == [
        ("timeout", "pack", "cute", "60 s", ["a", "b"]),
        ("unsupported", "gate", "torch", "no reason recorded", ["a"]),
    ]


def test_the_machine_in_words():
    """Distinct values, the median and range of ceilings, the first start and the last end."""
    table = frame(
        *(
            one(
                "pack",
                "cute",
                cell=str(i),
                driver=f"d{i}",
                copy_gb_per_s=ceiling,
                started_at=f"2026-11-2{i}T06:00:00",
                ended_at=f"2026-11-2{i}T07:30:00",
            )
            for i, ceiling in enumerate((4000.0, 4100.0, 4400.0, None, None))
        )
    )
    assert render_module._values(table, "driver") == "d0, d1, d2, d3 and 1 more"
    assert render_module._spread(table, "copy_gb_per_s") == "4,100 (median; 4,000 to 4,400)"
    peaks = frame(*(one("pack", "cute", cell=str(peak), peak_tflops=peak) for peak in (763.0, 784.31, 791.04)))
    assert render_module._spread(peaks, "peak_tflops") == "784.3 (median; 763.0 to 791.0)", "as many digits each"
    assert render_module._days(table) == "2026-11-20 06:00 to 2026-11-24 07:30 UTC"
    nothing = frame(one("pack", "cute"))
    assert [render_module._values(nothing, "driver"), render_module._spread(nothing, "copy_gb_per_s")] == ["–", "–"]
    assert render_module._days(nothing.assign(started_at=None, ended_at=None)) == "–"


def test_every_axis_is_a_column():
    """Rows that differ in an axis look different in the table."""
    assert set(AXES) < {column.name for column in COLUMNS}


@pytest.mark.parametrize(("axis", "value"), [("weights", "int4"), ("packed", "fp8_row")])
def test_no_finding_pools_a_format_in_silence(axis, value):
    """Rows that differ only in it form no pair, and a finding over both names the axis."""
    table = some(rows())
    mine = table[table["bench"].isin(row_groups.reading(axis))]
    both = pd.concat([table, mine.assign(**{axis: value}, cell=mine["cell"] + value)], ignore_index=True)
    before, after = ([one.text for one in findings(rows)] for rows in (table, both))
    changed = [text for text in after if text not in before and not text.startswith(("Cautions", "1 of", "2 of"))]
    assert changed and all(axis in text for text in changed)
    assert not any(axis in text for text in before)
    still = both[(both["skew"] == 0) & (both["status"] == "ok")]
    assert pairs(still, "skew") == ([], 0) and pairs(still.assign(skew=still[axis].eq(value)), "skew") == ([], 0)


def test_costs_compare_rows_of_one_card():
    """A ratio of two cards is refused, with the reason; rows without a GPU are compared within a host."""
    some_benches = "status == 'ok' and bench in ('pack', 'layer')"
    ok = rows().query(some_benches)
    apart = ok.assign(gpu_uuid="GPU-" + ok["skew"].astype(str))
    assert "at skew 1.4 over 0" in cost_of_skew(ok) and "comparable" not in cost_of_skew(ok)
    assert "over 0" not in cost_of_skew(apart)
    pairs = 2 * len(BENCHES["layer"].implementations)  # at two sizes
    assert f"layer {pairs} pairs not comparable: measured on different cards" in cost_of_skew(apart)
    some = ok.assign(gpu_uuid=ok["gpu_uuid"].where(ok["skew"] < 1, "GPU-2"))
    packs = 2 * len(BENCHES["pack"].implementations)
    assert "pack at skew 0.7 over 0" in cost_of_skew(some) and f"and {packs} pairs not comparable" in cost_of_skew(some)
    cpu = rows(gpu=False).query(some_benches)
    assert "at skew 1.4 over 0" in cost_of_skew(cpu)
    assert "over 0" not in cost_of_skew(cpu.assign(host="h" + cpu["skew"].astype(str)))
    tight = pd.concat([ok, ok.assign(capacity_factor=1.25, median_us=ok["median_us"] / 2)], ignore_index=True)
    costs = cost_of_capacity(tight)
    assert all(f"at factor 1.25 and skew {skew} 0.50x" in costs for skew in (0, 0.7, 1.4)), "skews are not pooled"
    assert "differ in tokens and skew" not in costs and "pack at factor 1.25 and skew 0 0.50x" in costs
    cards = tight["capacity_factor"].notna().map({True: "GPU-1", False: "GPU-2"})
    refused = cost_of_capacity(tight.assign(gpu_uuid=cards))
    assert "0.50x" not in refused and f"pack {3 * packs} pairs not comparable: measured on different cards" in refused


def test_figures_without_data_are_named_not_shown(tmp_path):
    """One with marks is drawn, and one without is in a sentence."""
    render(FEW, ["bandwidth", "roofline"], tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert 'id="figure-bandwidth"' in page and 'id="figure-roofline"' not in page
    assert f'<p id="undrawn">This figure has nothing to show of this run: {FIGURES["roofline"].title}.</p>' in page


STORED = Path(__file__).parents[2] / "results/nvidia-h200/measurements.parquet"


def test_what_auto_chooses(tmp_path, monkeypatch):
    """By a table in which triton is best at T=1024: there, and with the next size's best where the cell is left out."""
    monkeypatch.setattr(section_tables.table_of_choices, "load", lambda: planted)
    ok = rows().query("bench == 'layer' and skew == 0 and status == 'ok'")
    planted = [
        replace(one, times=dict.fromkeys(one.times, 2.0) | {"triton" if one.shape.tokens == 1024 else "cute": 1.0})
        for one in entries(ok, "")
    ]
    found = section_tables.choices(ok)
    assert [[name for name, *_ in line.choices] for line in found.lines] == [
        ["triton", "cute"],
        ["cute", "triton"],
    ]
    times = ok[ok["tokens"] == 1024].set_index("implementation")["median_us"]
    best = min(times[name] for name in (candidate.name for candidate in ranked("layer")))
    (_, own, whole), _ = found.lines[0].choices
    assert (own, whole) == (
        f"{times['triton'] / best - 1:.1%}",
        f"{times['triton'] / times.drop('auto').min() - 1:.1%}",
    )
    assert found.lines[0].auto == f"{times['auto'] / best - 1:.1%}"
    render(ok, {}, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert 'id="choices"' in page and page.count(f'<td class="n">{percent(own)} ({percent(whole)})</td>') >= 1
    assert (
        page.partition('id="regrets"')[2].partition("</ul>")[0].count(" over 2 cells") == 5
        and "2 measured cells" in page
    )
    assert {one.cells for one in section_tables.choices(ok[ok["tokens"] == 1024]).summaries} == {"1 cell"}
    assert section_tables.choices(rows().query("bench == 'gate'")) is None


def test_cells_of_choices_have_names_of_their_own():
    """Also those that differ in their skew alone, which the table of choices does not know."""
    found = section_tables.choices(rows().query("bench == 'layer' and status == 'ok'"))
    names = [line.cell for line in found.lines]
    assert len(names) > 2 and len(set(names)) == len(names) and any("skew" in name for name in names)


def test_quantities_of_claims_stay_on_a_line_with_their_unit():
    found = quantity(1.2741, "x"), quantity(5.1623, "us"), quantity(103.81, "%"), quantity(136.9, "us", "%g")
    assert found == ("1.274x", "5.162\u00a0µs", "103.8\u00a0%", "136.9\u00a0µs")


def test_bars_of_routing():
    """Stored rows give every line; another platform has none."""
    table = records.frame(records.read(STORED))
    found = {line.what: line for line in reached.lines(routing_bars.BARS, {"": table})}
    assert list(found) == [bar.what for bar in routing_bars.BARS]
    assert found["routing, T=64, H=2048, E=128, k=8: time of cute"].verdict == "reached"
    stream = found["pack, T ≥ 16384, H ≥ 2048: cute's share of the stream of its mix"]
    assert stream.cells.endswith(" of 18"), "without the rows that are quantised while they are packed"
    for others in (table.assign(platform="cpu"), table[table["status"] != "ok"]):
        assert not reached.lines(routing_bars.BARS, {"": others})


def test_bars_of_layers_and_of_quantised_experts(tmp_path):
    """With intervals, where there are rows of them; their platform is an H200."""
    render(records.read(STORED.parents[1] / "nvidia-h200.model/measurements.parquet"), {}, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    (line,) = re.findall(r'<table id="bars" class="bars">.*?<tbody>\n(<tr>.*?</tr>)\n</tbody>', page, re.DOTALL)
    assert "model, one token" in line and "x [" in line and 'id="reached"' in page
    render(rows(), {}, tmp_path / "index.html")
    assert 'id="bars"' not in (tmp_path / "index.html").read_text()


def test_commits_and_cards_are_named(tmp_path):
    """Each commit with its version, its days and its cards; of training runs too."""
    pair = [
        one(
            "gate",
            "cute",
            cell=c,
            git_sha=c * 40,
            gpu_name="NVIDIA H200",
            gpu_uuid=f"GPU-{c * 8}-0",
            started_at="2026-11-21",
        )
        for c in "ab"
    ]
    render(frame(*pair), {}, tmp_path / "index.html", versions={"a" * 40: "0.1.0"})
    page = (tmp_path / "index.html").read_text()
    first = "Measured by version 0.1.0, commit aaaaaaa (2026-11-21), on NVIDIA H200 (GPU-aaaaaaaa): 1 row; by commit bbbbbbb"
    assert first in page


def test_comparisons_beside_the_report_are_linked(tmp_path):
    for name in ("compare-old.html", "other.html"):
        (tmp_path / name).touch()
    render(FEW, {}, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert '<a href="compare-old.html">' in page and "other.html" not in page
