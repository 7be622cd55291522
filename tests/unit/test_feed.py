"""The Atom file and the badge of a site, from listed runs, manifests and rows that are planted."""

import json
import re
from xml.etree import ElementTree

import pandas as pd
import pytest
from rows import one as row

from moe_routing_bench.cli.published import site
from moe_routing_bench.cli.report import rows_of
from moe_routing_bench.comparison import origins, regret
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.report import site as report_site
from moe_routing_bench.report.document import Sentence
from moe_routing_kernels import choices
from moe_routing_kernels.errors import UserError

ATOM = "{http://www.w3.org/2005/Atom}"
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)")


def listed(folder, **values):
    known = {
        "machine": "NVIDIA H200",
        "days": "2026-11-21",
        "commit": "abc",
        "benches": "gate",
        "rows": "1 of 1 row ok",
    }
    known |= {"findings": [], "unfound": "nothing was entered twice.", "comparisons": [], "tables": []}
    return report_site.Listed(folder=folder, **known | values)


def manifest(last="2026-11-21T06:55:00.5+00:00", **values):
    group = {
        "version": "0.1.0",
        "commit": "a" * 40,
        "dirty": False,
        "cards": ["H (1)", "H (2)"],
        "first": last,
        "last": last,
    }
    return {"tables": {"measurements": {"measured": [group | values]}}}


def check(path):
    """The entries of an Atom file that has all that RFC 4287 asks for (4.1.1, 4.1.2), by address."""
    feed = ElementTree.parse(path).getroot()
    assert feed.tag == f"{ATOM}feed" and feed.find(f"{ATOM}author/{ATOM}name").text
    entries = feed.findall(f"{ATOM}entry")
    for part in (feed, *entries):
        for name in ("id", "title", "updated"):
            (found,) = part.findall(f"{ATOM}{name}")
            assert found.text.strip()
        assert STAMP.fullmatch(part.find(f"{ATOM}updated").text)
        assert re.match(r"[a-z]+:", part.find(f"{ATOM}id").text), "an absolute IRI"
        links = part.findall(f"{ATOM}link")
        assert len([link for link in links if link.get("rel") == "alternate"]) == 1
    ids = [part.find(f"{ATOM}id").text for part in (feed, *entries)]
    assert len(set(ids)) == len(ids)
    assert feed.find(f"{ATOM}updated").text >= max((one.find(f"{ATOM}updated").text for one in entries), default="")
    return {one.find(f"{ATOM}link").get("href"): one for one in entries}


def text(entry):
    return entry.find(f"{ATOM}content").text


def test_an_entry_per_run_of_its_manifest_and_findings(tmp_path):
    """The latest first; markup in a finding or a name is text; rows of others name who sent them."""
    sent = listed("nvidia-h200.b", findings=[Sentence("a < b & c is the fastest.", "rows")], by="<A & B>")
    later = manifest("2026-11-23T01:00:00+00:00", version=None)
    report_site.write_feed([(listed("nvidia-h200"), manifest()), (sent, later)], tmp_path, platforms=["nvidia-h200"])
    found = check(tmp_path / "feed.xml")
    assert list(found) == ["nvidia-h200.b/index.html", "nvidia-h200/report.html"]
    second, first = found.values()
    assert "a < b & c is the fastest." in text(second) and "unknown version, commit aaaaaaa, on 2 cards" in text(second)
    assert second.find(f"{ATOM}author/{ATOM}name").text == "<A & B>" and first.find(f"{ATOM}author") is None
    assert "No finding: nothing was entered twice." in text(first) and "moe-routing-bench 0.1.0" in text(first)
    before = {link: one.find(f"{ATOM}id").text for link, one in found.items()}
    report_site.write_feed([(listed("nvidia-h200"), manifest())], tmp_path, platforms=["nvidia-h200"])
    (again,) = check(tmp_path / "feed.xml").values()
    assert again.find(f"{ATOM}id").text == before["nvidia-h200/report.html"], "a reader knows an entry by its id"


def test_addresses_are_absolute_where_the_site_has_one(tmp_path):
    for url in ("https://example.org/bench", "https://example.org/bench/"):
        report_site.write_feed([(listed("a"), manifest())], tmp_path, url)
        assert list(check(tmp_path / "feed.xml")) == ["https://example.org/bench/a/index.html"]
        feed = ElementTree.parse(tmp_path / "feed.xml").getroot()
        (own,) = [link.get("href") for link in feed.findall(f"{ATOM}link") if link.get("rel") == "self"]
        assert own == "https://example.org/bench/feed.xml"


def test_no_runs_and_runs_without_dates(tmp_path):
    """A time without a zone is UTC; a run without times cannot be an entry."""
    report_site.write_feed([], tmp_path)
    assert check(tmp_path / "feed.xml") == {}
    report_site.write_feed([(listed("a"), manifest("2026-11-21T06:55"))], tmp_path)
    assert check(tmp_path / "feed.xml")
    with pytest.raises(UserError, match="dates of run a: got 'none'"):
        report_site.write_feed([(listed("a"), manifest(None))], tmp_path)


@pytest.mark.parametrize("url", ["example.org", "ftp://example.org", "https://", "https://a b", "https://a/?q", ""])
def test_a_wrong_address_is_refused(url, tmp_path):
    with pytest.raises(UserError, match="--url: got"):
        site(tmp_path, url=url)


SIZES = {"tokens": 4096, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "skew": 0.0}
KNOWN = {"phase": "prefill", "dtype": "bf16", "packed": "bf16", "weights": "bf16", "gpu_name": "NVIDIA H200"}


def cell(name, times, **values):
    """Rows of a layer with these times by implementation."""
    known = SIZES | KNOWN | {"cell": name, "started_at": "2026-11-21T06:55", "router": "softmax_topk_renorm"} | values
    return [row("layer", implementation, median_us=us, **known) for implementation, us in times.items()]


def lead(*cells):
    return report_site.lead([pd.DataFrame([one for found in cells for one in found]).pipe(whole)], choices.load())


def whole(table):
    return table.reindex(columns=list(dict.fromkeys([*table.columns, *regret.NEEDED, "weights", "dtype"])))


def test_the_lead_is_over_the_fastest_rival():
    """2x and 8x are 4x. Left out: cells without a kernel that serves models, with uneven loads, of decoding and of quantised weights."""
    found = lead(
        cell("a", {"cute": 10.0, "vllm_triton": 20.0, "torch_grouped_mm": 30.0}),
        cell("b", {"cute": 10.0, "vllm_triton": 90.0, "torch_grouped_mm": 80.0}),
        cell("c", {"cute": 10.0, "torch_grouped_mm": 80.0}),
        cell("d", {"cute": 10.0, "vllm_triton": 80.0}, skew=1.0),
        cell("e", {"cute": 10.0, "vllm_triton": 80.0}, phase="decode"),
        cell("f", {"cute": 10.0, "vllm_triton": 80.0}, weights="int4_g128"),
        cell("g", {"vllm_triton": 80.0}),
    )
    assert found.ratio == pytest.approx(4.0) and found.cells == 2 and found.rivals == ["torch", "vllm"]
    shown = report_site.badge(found)
    assert shown["message"] == "4.00x in 2 cells" and shown["schemaVersion"] == 1
    assert all(word in shown["label"] for word in ("torch", "vllm", "NVIDIA H200"))
    assert lead(cell("c", {"cute": 10.0, "torch_grouped_mm": 80.0})) is None


def test_of_a_cell_in_two_runs_the_last_counts():
    old = cell("a", {"cute": 10.0, "vllm_triton": 90.0})
    new = cell("a", {"cute": 10.0, "vllm_triton": 20.0}, started_at="2026-11-22T06:55")
    for order in ((old, new), (new, old)):
        tables = [whole(pd.DataFrame(rows)) for rows in order]
        found = report_site.lead(tables, choices.load())
        assert found.ratio == pytest.approx(2.0) and found.cells == 1


def test_the_badge_of_published_rows(monkeypatch):
    """Recomputed from the rows of one run: the lowest time of others over that of the fastest of ours, which its own table of choices picks."""
    monkeypatch.chdir(PACKAGE.parents[1])
    rows = rows_of("measurements", "nvidia-h200.published")
    rows = rows[(rows["status"] == "ok") & (rows["weights"] == rows["dtype"]) & (rows["phase"] == "prefill")]
    ratios = []
    for _, same in rows.groupby("cell"):
        mine = same["implementation"].isin(origins.ours("layer"))
        ratios.append(same[~mine]["median_us"].min() / same[mine]["median_us"].min())
    found = report_site.lead([rows_of("measurements", "nvidia-h200.published")], choices.load())
    assert found.cells == len(ratios) and found.ratio == pytest.approx(pd.Series(ratios).prod() ** (1 / len(ratios)))
    assert json.loads(json.dumps(report_site.badge(found)))["message"].startswith(f"{found.ratio:.3g}x")
