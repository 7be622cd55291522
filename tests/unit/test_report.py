"""The report is one offline file that holds every finding, figure and reason, and escapes what it shows."""

import html
import re
from pathlib import Path

import pandas as pd
import pytest
from rows import BAD, rows

from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import FIGURES, grouping
from moe_routing_bench.report.columns import COLUMNS
from moe_routing_bench.report.costs import cost_of_capacity, cost_of_skew, pairs
from moe_routing_bench.report.findings import findings
from moe_routing_bench.report.render import render, small
from moe_routing_bench.report.targets import APART, targets


def test_report(tmp_path):
    """Findings, figures, reasons; no markup from a value; nothing fetched. Failed and empty tables too."""
    svg, out = tmp_path / "f.svg", tmp_path / "index.html"
    svg.write_text("<svg/>")
    for table in (rows(), rows(gpu=False), rows(status="crashed"), rows().iloc[:0]):
        render(table, dict.fromkeys(FIGURES, svg), out)
        page = out.read_text()
        assert all(text in html.unescape(page) for text in findings(table))
        measured = [figure for figure in FIGURES.values() if figure.source == "measurements"]
        assert page.count("data:image/svg+xml") == len(measured) and not re.search("https?://|<script>alert", page)
        assert table.empty or html.escape(BAD) in page


def test_findings():
    """The winner is named; nothing is claimed without a row or when no interval excludes 1."""
    table = rows()
    assert any(t.startswith("pack: cute has the largest speed-up, 2.50x torch") for t in findings(table))
    unsure = table.assign(speedup_ci_low=0.9, speedup_ci_high=9.0)
    assert any(t.startswith("pack: no implementation is shown to be faster than torch") for t in findings(unsure))
    assert "pack: not measured." in findings(rows(status="crashed"))


def test_a_fused_part_is_named_in_the_finding():
    """Where the implementation that fuses stages is the fastest."""
    table = rows()
    table.loc[table["implementation"] == "torch_gather_loop", "median_us"] = 0.1
    (text,) = [text for text in findings(table) if text.startswith("Where the time of layer goes")]
    assert "torch_gather_loop has the lowest median in 6 of 6 cells" in text and "pack+experts (fused) 25%" in text


def test_every_axis_is_a_column():
    """Rows that differ in an axis look different in the table."""
    assert set(AXES) < {column.name for column in COLUMNS}


@pytest.mark.parametrize(("axis", "value"), [("weights", "int4"), ("packed", "fp8_row")])
def test_no_finding_pools_a_format_in_silence(axis, value):
    """Rows that differ only in it form no pair, and a finding over both names the axis."""
    table = rows()
    mine = table[table["bench"].isin(grouping.reading(axis))]
    both = pd.concat([table, mine.assign(**{axis: value}, cell=mine["cell"] + value)], ignore_index=True)
    before, after = findings(table), findings(both)
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
    assert "layer 14 pairs not comparable: measured on different cards" in cost_of_skew(apart)
    some = ok.assign(gpu_uuid=ok["gpu_uuid"].where(ok["skew"] < 1, "GPU-2"))
    assert "pack at skew 0.7 over 0" in cost_of_skew(some) and "and 8 pairs not comparable" in cost_of_skew(some)
    cpu = rows(gpu=False).query(some_benches)
    assert "at skew 1.4 over 0" in cost_of_skew(cpu)
    assert "over 0" not in cost_of_skew(cpu.assign(host="h" + cpu["skew"].astype(str)))
    tight = pd.concat([ok, ok.assign(capacity_factor=1.25, median_us=ok["median_us"] / 2)], ignore_index=True)
    costs = cost_of_capacity(tight)
    assert all(f"at factor 1.25 and skew {skew} 0.50x" in costs for skew in (0, 0.7, 1.4)), "skews are not pooled"
    assert "differ in tokens and skew" not in costs and "pack at factor 1.25 and skew 0 0.50x" in costs
    cards = tight["capacity_factor"].notna().map({True: "GPU-1", False: "GPU-2"})
    refused = cost_of_capacity(tight.assign(gpu_uuid=cards))
    assert "0.50x" not in refused and "pack 24 pairs not comparable: measured on different cards" in refused


def test_small_svg_keeps_scales():
    """Coordinates are shortened, transforms are not."""
    assert small('<use x="0.98765" transform="scale(0.015625)"/>') == '<use x="0.98" transform="scale(0.015625)"/>'


STORED = Path(__file__).parents[2] / "results/nvidia-h200/measurements.parquet"


def test_targets():
    """Stored rows give every line; faster or slower rows turn the verdicts; another platform has none."""
    table = pd.read_parquet(STORED)
    lines = {line.what: line for line in targets(table)}
    assert len(lines) == 16 and lines["routing, T=64, H=2048, E=128, k=8"].met
    slow = table.assign(median_us=table["median_us"] * 10, speedup=table["speedup"] / 10)
    slow["share_of_stream"] = 0.5
    missed = {line.what for line in targets(slow) if not line.met}
    assert {
        "gate, T=16384, E=128, k=8, fp32",
        "permute, 131,072 assignments, E=128",
        "pack, T ≥ 16384, H ≥ 2048",
    } <= missed
    mine = table["implementation"] == "cute"
    quick = table.assign(median_us=table["median_us"].where(~mine, table["median_us"] / 10))
    assert all(line.met for line in targets(quick) if "over triton" in line.what or "QuACK" in line.what)
    short = {line.what: line.measured for line in targets(table.assign(share_of_short_stream=0.987))}
    assert "(of a stream as short: 98.7%)" in short["pack, T ≥ 16384, H ≥ 2048"]
    one, apart = table.assign(gpu_uuid="GPU-1"), table.assign(gpu_uuid=table["cell"])
    for what in ("routing, T=16384, over the sum of its floors", "routing, T=16384, skewed over balanced"):
        (same,), (other,) = ([line for line in targets(rows) if line.what == what] for rows in (one, apart))
        assert same.met and (other.met, other.measured) == (None, APART)
    assert lines["pack, T ≥ 16384, H ≥ 2048"].cells == 19  # without the rows that are quantised while they are packed
    assert not targets(table.assign(platform="cpu")) and not targets(table[table["status"] != "ok"])


def judged(table: pd.DataFrame, verdict: str, floor: float = 0.006) -> pd.DataFrame:
    """Every row that is not the baseline has this verdict."""
    rival = table["implementation"] != table["baseline"]
    return table.assign(verdict=rival.map({True: verdict, False: None}), noise_floor=floor)


def test_verdicts_decide_where_there_are_any():
    """Not the intervals, which see differences that equals have too."""
    told, unsure = (findings(judged(rows(), verdict)) for verdict in ("faster", "same"))
    (text,) = [one for one in told if one.startswith("pack: cute has the largest speed-up")]
    assert "faster in 6 of 6 cells that differ in tokens and skew, slower in 0, same in 0, undecided in 0, beyond noise of 0.6%" in text  # fmt: skip
    assert any(one.startswith("pack: no implementation is shown to be faster than torch") for one in unsure)
    open_ended = findings(rows().assign(converged=False))
    assert any("in 6 the interval of the time stayed wider than asked" in one for one in open_ended)


def test_noise_is_said_or_missed():
    table = rows()
    assert any(one.startswith("Noise: not measured, so this run has no verdicts") for one in findings(table))
    pack = (table["bench"] == "pack") & (table["implementation"] == "torch")
    table.loc[pack, ["twin_speedup", "twin_speedup_ci_low", "twin_speedup_ci_high", "twin_speedup_p"]] = (1.002, 1.001, 1.003, 0.001)  # fmt: skip
    table.loc[table[pack].index[0], "twin_speedup"] = 1.09
    (text,) = [one for one in findings(table) if one.startswith("Noise")]
    assert "by pack 0.20% (at most 8.6%, 6 twins); of 6, each held against the floor of the others, the verdict would tell 1 apart" in text  # fmt: skip


def test_the_paired_ratio_against_the_best_other_is_used_where_rows_hold_it():
    text = next(one for one in findings(rows().assign(best_speedup=1.25)) if one.startswith("pack: cute"))
    assert "against the fastest other implementation of each cell 1.25x (1.25x to 1.25x)" in text


def test_rows_of_other_code_say_so(tmp_path):
    render(rows(), {}, tmp_path / "index.html", stale={"gate": "old <b>", "pack": "old <b>", "layer": "older"})
    page = (tmp_path / "index.html").read_text()
    assert "this report's: gate, pack.</strong> They are shown all the same: old &lt;b&gt;." in page
    assert "this report's: layer." in page and page.count('class="stale"') == 2


def test_comparisons_beside_the_report_are_linked(tmp_path):
    for name in ("compare-old.html", "other.html"):
        (tmp_path / name).touch()
    render(rows(), {}, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert '<a href="compare-old.html">' in page and "other.html" not in page
