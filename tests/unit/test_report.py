"""The report is one offline file that holds every finding, figure and reason, and escapes what it shows."""

import html
import re
from pathlib import Path

import pandas as pd
from rows import BAD, rows

from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.findings import findings
from moe_routing_bench.report.render import render, small
from moe_routing_bench.report.targets import targets


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
    assert not targets(table.assign(platform="cpu")) and not targets(table[table["status"] != "ok"])
