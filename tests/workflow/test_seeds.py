"""A seed document's config from the command that replays it to its tables, on a CPU: sizes, profiles, and both sides of the tables.

Figures are left out: they take longest, and `make report` draws them.
"""

import json

import pytest

from moe_routing_bench.cli.asked import LAST
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.store import records
from project import Project

pytestmark = pytest.mark.slow


def test_the_qwen_block_is_replayed_at_a_reduced_size(tmp_path):
    project = Project.create(tmp_path)
    config = ("--configfile", "config/seeds/004.yaml", "--config", "device=cpu")
    project.snakemake(*config, "--until", "collect", "profile")
    results = project.folder / "results/cpu.seed-004"
    (cell,) = results.glob("cells/layer/*.parquet")
    (profiled,) = results.glob("profiles/*")
    assert profiled.name == cell.stem and (profiled / "operators.csv").is_file()
    assert json.loads((profiled / "torch_loop.json").read_text())["traceEvents"]
    assert '"cpu":' not in (results / LAST).read_text(), "what was asked for on this platform, and no more"
    rows = records.read(results / "measurements.parquet").to_pandas()
    totals, *operators = section(rows, "seed-004", [json.loads((profiled / "profile.json").read_text())])["tables"]
    manual = next(row for row in totals.rows if row[0] == "manual")
    assert manual[1:3] == ["829,292", "849,695"] and manual[4] == "torch_loop" and "divided by 8" in totals.note
    assert all(float(manual[i].replace(",", "")) > 0 for i in (5, 8)), manual
    assert len(operators) == 3
    remaining = project.jobs(*config)
    assert "html" in remaining and not remaining.keys() & {"measure", "profile", "collect"}
