"""What the workflow promises besides measuring what changed: one measurement at a time, and Snakemake's own report."""

import html
import json
from datetime import datetime
from itertools import pairwise

import pyarrow.parquet as pq
from project import CELLS, Project

from moe_routing_bench.figures import FIGURES


def test_one_measurement_at_a_time_whatever_the_cores(done: Project) -> None:
    """The first run had two cores and the default profile, whose `gpu` resource keeps measurements apart."""
    rows = pq.read_table(
        done.folder / "results/cpu/measurements.parquet", columns=["started_at", "ended_at"]
    ).to_pylist()
    spans = sorted((datetime.fromisoformat(row["started_at"]), datetime.fromisoformat(row["ended_at"])) for row in rows)
    assert len(spans) == sum(CELLS.values()) and all(start < end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), spans


def test_snakemake_report_holds_every_figure_with_its_caption(project: Project) -> None:
    """One file to hand on."""
    project.run("snakemake", "--report", "report.html")
    text = (project.folder / "report.html").read_text()
    _, _, embedded = text.partition('<script id="results">\n    var results = ')
    results, _ = json.JSONDecoder().raw_decode(embedded)
    measured = [figure for figure in FIGURES.values() if figure.source == "measurements"]
    assert set(results) == {f"reports/cpu/figures/{figure.name}.svg" for figure in measured}
    for figure in measured:
        shown = results[f"reports/cpu/figures/{figure.name}.svg"]
        assert figure.caption in html.unescape(shown["caption"]) and shown["labels"] == {"figure": figure.title}
        assert shown["data_uri"].startswith("data:image/svg+xml")
