"""The folder of static pages: what is copied, what the first page says and where its links lead."""

import re

import pyarrow as pa
import pytest
from rows import rows, some

from moe_routing_bench.cli.publishing import site
from moe_routing_bench.errors import UserError
from moe_routing_bench.report.render import render
from moe_routing_bench.store import paths
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.store.records import SCHEMA


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Two reports, one of a run with a name, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    for folder in ("cpu", "nvidia-h200.layers"):
        table = some(rows(gpu=folder != "cpu")).assign(platform=folder.partition(".")[0])
        paths.results(folder).mkdir(parents=True)
        write_table(paths.measurements(folder), pa.Table.from_pandas(table, SCHEMA, preserve_index=False))
        render(table, {}, paths.report(folder))
        paths.figure(folder, "gate").parent.mkdir()
        paths.figure(folder, "gate").write_text("<svg/>")
    (paths.report("nvidia-h200.layers").parent / "compare-old.html").write_text("old")
    (tmp_path / "reports/empty").mkdir()
    return tmp_path


def test_all_reports_in_one_folder(project, capsys):
    """Reports, comparisons, figures and tables; every link of the first page leads to a file that is there."""
    (project / "pages").mkdir()
    (project / "pages/own.txt").write_text("mine")
    site(project / "pages")
    text = (project / "pages/index.html").read_text()
    links = [link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', text)]
    assert {"cpu/index.html", "nvidia-h200.layers/index.html", "nvidia-h200.layers/compare-old.html", "cpu/measurements.parquet"} <= set(links)  # fmt: skip
    assert all((project / "pages" / link).is_file() for link in links)
    assert (project / "pages/cpu/figures/gate.svg").is_file() and (project / "pages/own.txt").read_text() == "mine"
    assert (
        "NVIDIA H200, 2026-11-21" in text
        and f"{len(some(rows())) - 1} of {len(some(rows()))} rows ok" in text
        and "https:" not in text
    )
    assert "leads to 2 reports" in capsys.readouterr().out


def test_without_a_report_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="moe-routing-bench report"):
        site(tmp_path / "pages")
