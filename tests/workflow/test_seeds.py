"""A seed document's config from the command that replays it to its report, on a CPU: sizes, profiles, and both sides of the tables."""

import re

from moe_routing_bench.cli.asked import LAST
from project import Project


def test_the_qwen_block_is_replayed_at_a_reduced_size(done: Project, tmp_path):
    project = done.copy(tmp_path / "project")
    project.snakemake("--configfile", "config/seeds/004.yaml", "--config", "device=cpu")
    results = project.folder / "results/cpu.seed-004"
    (cell,) = results.glob("cells/layer/*.parquet")
    (profiled,) = results.glob("profiles/*")
    assert (
        profiled.name == cell.stem
        and (profiled / "operators.csv").is_file()
        and (profiled / "torch_loop.json").is_file()
    )
    assert '"cpu":' not in (results / LAST).read_text(), "what was asked for on this platform, and no more"
    page = (project.folder / "reports/cpu.seed-004/index.html").read_text()
    section = page[page.index('id="seeds"') : page.index('id="figures"')]
    assert "divided by 8" in section and "published (NVIDIA GPU, fp32)" in section
    (line,) = re.findall(r"<tr><td class=\"n\">manual</td>.*?</tr>", section)
    values = re.findall(r">([^<>]+)</td>", line)
    assert values[1:3] == ["829,292", "849,695"] and values[4] == "torch_loop"
    assert all(float(values[i].replace(",", "")) > 0 for i in (5, 8)), values
    assert not project.jobs("--configfile", "config/seeds/004.yaml", "--config", "device=cpu")
