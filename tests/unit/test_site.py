"""The folder of static pages: what is copied, what the first page says and where its links lead."""

import contextlib
import dataclasses
import html
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from rows import rows, some
from test_feed import check

from moe_routing_bench.cli import published as published_commands
from moe_routing_bench.cli import report
from moe_routing_bench.cli.published import site
from moe_routing_bench.comparison.claim_verdicts import Held
from moe_routing_bench.config import claims
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report import site as report_site
from moe_routing_bench.report.document import Dot, Sentence, pictured
from moe_routing_bench.report.page import quantity
from moe_routing_bench.report.render import render
from moe_routing_bench.store import paths
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.store.records import SCHEMA
from moe_routing_bench.study import models
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A folder with two reports, one of a run with a name, and a folder that is none."""
    folder = tmp_path_factory.mktemp("reported")
    with contextlib.chdir(folder):
        for name in ("cpu", "nvidia-h200.layers"):
            table = some(rows(gpu=name != "cpu")).assign(platform=name.partition(".")[0])
            paths.results(name).mkdir(parents=True)
            write_table(paths.measurements(name), pa.Table.from_pandas(table, SCHEMA, preserve_index=False))
            render(table, {}, paths.report(name))
            paths.figure(name, "gate").parent.mkdir()
            paths.figure(name, "gate").write_text("<svg/>")
        (paths.report("nvidia-h200.layers").parent / "compare-old.html").write_text("old")
        Path("reports/empty").mkdir()
    return folder


@pytest.fixture
def project(reported, tmp_path, monkeypatch):
    """A copy of it, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(reported, tmp_path / "project"))
    return tmp_path / "project"


def test_all_reports_in_one_folder(project, capsys):
    """Reports, comparisons, figures and tables; every link of the first page leads to a file that is there."""
    (project / "pages").mkdir()
    (project / "pages/own.txt").write_text("mine")
    site(project / "pages")
    text = (project / "pages/index.html").read_text()
    links = [link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', text)]
    assert {
        "cpu/index.html",
        "nvidia-h200.layers/index.html",
        "nvidia-h200.layers/compare-old.html",
        "cpu/measurements.parquet",
    } <= set(links)
    assert all((project / "pages" / link).is_file() for link in links if link)
    assert (project / "pages/cpu/figures/gate.svg").is_file() and (project / "pages/own.txt").read_text() == "mine"
    assert (
        "NVIDIA H200, 2026-11-21" in text
        and f"{len(some(rows())) - 1} of {len(some(rows()))} rows ok" in text
        and not re.search('(?:href|src)="https?:', text)
    )
    assert "leads to 2 reports" in capsys.readouterr().out
    report = (project / "pages/cpu/index.html").read_text()
    assert 'id="parquet" href="measurements.parquet"' in report, "the rows lie beside the copy"
    assert 'href="../../results/cpu/measurements.parquet"' in paths.report("cpu").read_text()


def test_the_first_page_has_claims_models_and_method(project):
    """Every preset; the method; all in the contents. Claims are those of others alone: these rows show none but figures of our own."""
    site(project / "pages")
    text = html.unescape((project / "pages/index.html").read_text())
    contents = re.findall(r'<li><a href="#([^"]+)">', text)
    assert "published" not in contents
    assert contents[-2:] == ["presets", "method"] and all(f'id="{name}"' in text for name in contents)
    assert all(f'<th scope="row">{name}</th>' in text for name in models())
    assert "measured together in one supervised process" in text


def test_what_the_first_page_says_of_a_report(tmp_path):
    """Its findings, or that it has none; other runs where it was held against some; claims of another GPU; how many claims no report is about."""
    one, other = (claims.load(paths.CLAIMS)[0].model_copy(update={"id": name}) for name in ("one", "other"))
    plain = {
        "machine": "NVIDIA H200",
        "days": "2026-11-21",
        "commit": "abc",
        "benches": "gate",
        "rows": "1 of 1 row ok, 1 cell",
        "findings": [],
        "unfound": "no implementation was entered twice.",
        "comparisons": [],
        "tables": [],
    }
    found = report_site.Listed(
        folder="a", **plain | {"findings": [Sentence("cute is fast.", "rows")], "comparisons": ["compare-old.html"]}
    )
    reports = [(found, tmp_path / "a", []), (report_site.Listed(folder="b", **plain), tmp_path / "b", [])]
    held = {
        "a": [Held(one, "reproduced", 2.0, 1, "the claim is of H100, the rows are of H200"), Held(other, "no rows")]
    }
    report_site.write(reports, tmp_path / "pages", held=held)
    first, second = re.findall(
        r'<section aria-labelledby="[ab]">.*?</section>', text := (tmp_path / "pages/index.html").read_text(), re.DOTALL
    )
    none, against = "No finding: no implementation was entered twice.", "Against other runs:"
    assert "In the pictures" not in text
    drawn = dataclasses.replace(
        found,
        findings=[
            Sentence("cute is fast.", "rows", pictured([Dot("a", 1.0, 0.9, 1.1), Dot("b", 2.0, 1.9, 2.1)], "times"))
        ],
    )
    report_site.write([(drawn, tmp_path / "a", []), reports[1]], tmp_path / "drawn")
    assert (tmp_path / "drawn/index.html").read_text().count("In the pictures: what each sentence chose from") == 1
    assert "cute is fast." in first and none not in first and against in first
    assert none in second and against not in second
    assert f"reproduced, {quantity(2.0, one.unit)} (the claim is of H100, the rows are of H200)" in text
    assert " 1 more is about cells that none of them measured" in text
    report_site.write(reports, tmp_path / "pages", held={"a": held["a"][:1]})
    assert "about cells that none" not in (tmp_path / "pages/index.html").read_text()


def test_claims_of_several_reports():
    """A claim with rows in two of three, one with rows in none."""
    one, other = (
        claim.model_copy(update={"id": name}) for claim in claims.load(paths.CLAIMS)[:1] for name in ("one", "other")
    )
    held = {
        "a": [Held(one, "reproduced", 2.0, 1), Held(other, "no rows")],
        "b": [Held(one, "not reproduced", 3.0, 1), Held(other, "no rows")],
    }
    ((claim, found),) = report_site.claimed(held | {"c": [Held(one, "no rows", cells=2)]})
    assert claim.id == "one" and [(folder, one.verdict) for folder, one in found] == [
        ("a", "reproduced"),
        ("b", "not reproduced"),
    ]
    assert report_site.claimed({}) == []


def test_without_a_report_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="moe-routing-bench report"):
        site(tmp_path / "pages")


def draw_few(patch):
    """Leave two of the figures of a report that is built: test_foreign has a command that draws all."""
    patch.setattr(report, "_figures", lambda: {name: FIGURES[name] for name in ("load_cv", "speedup")})


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A folder with a published run without a report, and the site that is built of it."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copytree(ROOT / "results/nvidia-h200.seed-004", folder / "results/nvidia-h200.seed-004")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        draw_few(patch)
        site(Path("site"))
    return folder


def test_a_missing_report_of_a_published_run_is_built(published, monkeypatch):
    """It is light, names version, commit and card, and is kept: only --rebuild builds it again."""
    page = published / "reports/nvidia-h200.seed-004/index.html"
    text = page.read_text()
    assert len(text) < 5e6 and "Measured by version 0.1.0, commit 5837119 (2026-11-27), on NVIDIA H200" in text
    assert (published / "site/nvidia-h200.seed-004/index.html").is_file() and list(page.parent.glob("figures/*.png"))
    first, platform = ((published / "site" / name).read_text() for name in ("index.html", "nvidia-h200/index.html"))
    assert 'href="nvidia-h200/index.html"' in first and 'href="../nvidia-h200.seed-004/index.html"' in platform
    assert 'href="feed.xml"' in first and 'href="history.html"' in platform
    links = check(published / "site/feed.xml")
    assert "nvidia-h200.seed-004/index.html" in links and all((published / "site" / link).is_file() for link in links)
    assert (published / "site/nvidia-h200/history.html").is_file()
    monkeypatch.chdir(published)
    draw_few(monkeypatch)
    page.write_text("kept")
    site(Path("site"), url="https://example.org/b/")
    assert set(check(published / "site/feed.xml")) == {f"https://example.org/b/{link}" for link in links}
    assert page.read_text() == "kept"
    page.write_text("")
    site(Path("site"))
    assert page.read_text() == text, "an empty file is no report"


def test_rebuild_builds_what_is_there(published, monkeypatch):
    """Every published run, and none without it."""
    monkeypatch.chdir(published)
    built = []
    monkeypatch.setattr(published_commands, "_build", built.append)
    for rebuild in (False, True):
        site(Path("site"), rebuild=rebuild)
    assert built == [[], ["nvidia-h200.seed-004"]]


def test_a_contradicting_manifest_stops_the_site(published, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(published, tmp_path / "project"))
    path = paths.manifest("nvidia-h200.seed-004")
    path.write_text(path.read_text().replace("rows: 9", "rows: 8"))
    with pytest.raises(UserError, match=r"measurements\.rows of .*manifest\.yaml: got 8; allowed: 9"):
        site(Path("site"))


@pytest.mark.parametrize("name", ["index.html", "cpu", "nvidia-h200.layers"])
def test_a_page_of_somebody_else_is_not_overwritten(project, name):
    """A folder of the user's, such as the root of a web server; an earlier site is overwritten, and --force overwrites all."""
    pages = project / "pages"
    pages.mkdir()
    (pages / name).write_text("mine") if name.endswith(".html") else (pages / name).mkdir()
    before = [(path.name, path.is_file() and path.read_text()) for path in pages.iterdir()]
    with pytest.raises(UserError, match=f"{name} would be overwritten; --force"):
        site(pages)
    assert [(path.name, path.is_file() and path.read_text()) for path in pages.iterdir()] == before
    site(pages, force=True)
    made = (pages / "index.html").read_text()
    (pages / "index.html").write_text(made + "<!-- earlier -->")
    site(pages)
    assert (pages / "index.html").read_text() == made
