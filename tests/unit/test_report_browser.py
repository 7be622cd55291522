"""The table of rows in a real browser: what is in sight, filters, links, details, download; and that nothing sticks out."""

import csv
import io
from urllib.parse import urlencode

import pytest
from rows import frame, one

from browser import asked
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import row_id

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title=1>"
CELL = {
    "hidden": 2048,
    "experts": 64,
    "top_k": 8,
    "dtype": "bf16",
    "median_us": 12.3456,
    "ci_low_us": 12.3,
    "ci_high_us": 12.4,
}
TIMED = CELL | {
    "best_verdict": "faster",
    "best_other": "torch",
    "best_speedup": 1.5,
    "best_speedup_ci_low": 1.4,
    "best_speedup_ci_high": 1.6,
    "share_of_roofline": 0.75,
}
TABLE = frame(
    one(
        "gate",
        "cute",
        tokens=4096,
        **TIMED,
        started_at="2026-11-21T06:55:00+00:00",
        ended_at="2026-11-21T06:56:00+00:00",
    ),
    one("gate", "torch", tokens=14096, **TIMED | {"median_us": 40.96, "best_verdict": "slower"}),
    one("pack", "cute", tokens=512, **TIMED, trace="config/traces/one.parquet", sampler="trace"),
    one(
        "pack",
        "cute",
        tokens=512,
        **TIMED,
        trace="config/traces/two.parquet",
        sampler="trace",
        suspect=True,
        suspect_reason="ceilings drifted 3 %",
    ),
    one(
        "experts",
        "cute_gather",
        tokens=8192,
        **TIMED,
        model="qwen3-30b-a3b",
        stage_us=[("router", 4.0), ("pack", 8.0)],
        energy_mj=3.5,
        git_sha="abc123",
        driver="580",
        tolerance=0.01,
    ),
    one("experts", "triton", tokens=64, model=EVIL, status="crashed", reason=f'{EVIL}, "quoted"'),
)
SHOWN = "[...document.querySelectorAll('#rows tbody tr[id]')].map(line => line.id.slice(4))"
IDS = [row_id(record) for record in TABLE.to_dict("records")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    svg = folder / "f.svg"
    svg.write_text('<svg xmlns="http://www.w3.org/2000/svg" width="900" height="400"><path d="M0 0H9"/></svg>')
    render(TABLE, {"bandwidth": svg}, folder / "index.html")
    return folder / "index.html"


@pytest.fixture
def ask(page, tmp_path):
    return lambda script, **options: asked(page, script, **options)


FILTERS = {
    "tokens>=4096": [0, 1, 4],
    "tokens:4096": [0],
    "T=4,096": [0],
    "4096": [0],
    "tokens<600 bench:pack": [2, 3],
    "-bench:gate tokens>64": [2, 3, 4],
    "implementation=cute": [0, 2, 3],
    "implementation:cute": [0, 2, 3, 4],
    "model:QWEN3 status:ok": [4],
    "trace:two": [3],
    "trace:none tokens<100": [5],
    "suspect:true": [3],
    'reason:"quoted"': [5],
    'suspect_reason:"drifted 3"': [3],
    "drifted": [3],
    "median_us>40": [1],
    "energy_mj>3": [4],
    "intermediate>=0": [],
    "": [0, 1, 2, 3, 4, 5],
}
PROBLEMS = {
    "toknes>1": "no field is called toknes; fields are bench, implementation,",
    "constructor:x": "no field is called constructor",
    "tokens>=many": "tokens holds numbers, and many is none",
    "bench>gate": "bench holds words, which have no order: bench:gate finds those that contain it",
    "tokens>=": "tokens>= lacks a value",
}


def test_filters(ask):
    """Numbers are compared as numbers, texts contain or equal, terms hold together; what means nothing is said in one line."""
    texts = [*FILTERS, *(f"{term} bench:gate" for term in PROBLEMS)]
    script = f"""const box = document.querySelector("#filter");
        return {texts!r}.map(text => {{
            box.value = text; box.dispatchEvent(new Event("input")); box.dispatchEvent(new Event("change"));
            return [{SHOWN}, document.querySelector("#problem").textContent, decodeURIComponent(location.hash), document.querySelector("#count").textContent];
        }});"""
    found = dict(zip(texts, ask(script), strict=True))
    for text, wanted in FILTERS.items():
        ids, problem, hash_, count = found[text]
        assert ids == [IDS[place] for place in wanted] and not problem, text
        assert count == f"{len(wanted)} of 6 rows"
        assert hash_ == "#rows?" + ("filter=" + text.replace(" ", "+") if text else "")
    for term, wanted in PROBLEMS.items():
        ids, problem, *_ = found[f"{term} bench:gate"]
        assert ids == IDS[:2] and wanted in problem and "\n" not in problem, term


def test_the_address_keeps_filter_and_order(ask):
    part = "rows?" + urlencode({"filter": "status:ok tokens>=4096", "sort": "-median_us"})
    script = f'return [{SHOWN}, document.querySelector("#filter").value, document.querySelector("[aria-sort=descending]").textContent]'
    ids, box, head = ask(script, part=part)
    assert (box, head) == ("status:ok tokens>=4096", "median_us") and ids == [IDS[1], IDS[0], IDS[4]]


def test_a_link_opens_its_row(ask):
    """With the command, the code, the stages, the energy; the row's own button closes it. An unknown link says so."""
    script = """const line = document.querySelector("#rows tr.detail"), opener = line.previousElementSibling.querySelector("button");
        const found = [line.previousElementSibling.id, line.innerText, line.querySelector("code").textContent, line.querySelector("a").getAttribute("href"), opener.getAttribute("aria-expanded")];
        opener.click();
        return [...found, document.querySelectorAll("tr.detail").length];"""
    name, words, command, link, expanded, left = ask(script, part=f"row-{IDS[4]}")
    assert (name, link, expanded, left) == (f"row-{IDS[4]}", f"#row-{IDS[4]}", "true", 0)
    assert (
        command
        == "moe-routing-bench measure experts --implementations cute_gather,torch --model qwen3-30b-a3b --tokens 8192"
    )
    for text in ("router 4, pack 8", "energy_mj", "abc123", "580", "tolerance", "best_other"):
        assert text in words
    assert "no row of that link" in ask('return document.querySelector("#problem").textContent', part="row-0123456789")


def test_what_is_not_ok_leads_to_its_row(ask):
    script = f"""const links = [...document.querySelectorAll("#bad a")], box = document.querySelector("#filter");
        box.value = "status:ok"; box.dispatchEvent(new Event("input"));
        location.hash = links[0].hash; onhashchange();
        const found = [links.map(link => link.hash), {SHOWN}.length, document.querySelector("tr.detail").previousElementSibling.id];
        found.push(["", "-"].map(way => {{ window.ask("", way + "median_us"); return {SHOWN}.at(-1); }}), [...document.querySelectorAll("#rows tr.bad")].map(line => line.id));
        return found;"""
    links, count, opened_, last, bad = ask(script)
    assert (links, count, opened_) == ([f"#row-{IDS[5]}"], 6, f"row-{IDS[5]}")
    assert last == [IDS[5]] * 2, "a row without a time is last, whichever way they are sorted"
    assert bad == [f"row-{IDS[5]}"], "and is told apart"


def test_rows_that_differ_in_a_trace_look_different(ask):
    """By its name, without the folder; beside them stands why one is suspect."""
    one, two = ask(f'return {IDS[2:4]!r}.map(id => document.querySelector("#row-" + id).innerText.split("\\t"))')
    assert "one" in one and "two" in two and "ceilings drifted 3 %" in two and "ceilings drifted 3 %" not in one


def test_an_interval_is_told_from_its_middle(ask):
    """By five digits where four make them equal; equal ones and missing ones have no more than four."""
    found = ask(
        "return [[1.0098, 1.0095, 1.0101], [8.136, 8.131, 8.14], [9.9996, 9.9996, 9.9996], [1.0098, null, null], [1989, 1988, 1990]].map(alike);"
    )
    assert found == [
        ["1.0098", "1.0095", "1.0101"],
        ["8.136", "8.131", "8.140"],
        ["10", "10", "10"],
        ["1.01", "–", "–"],
        ["1989", "1988", "1990"],
    ]


def test_a_finding_leads_to_its_rows(ask):
    script = f"""location.hash = document.querySelector("#findings a").hash; onhashchange();
        const first = [document.querySelector("#findings li").textContent, {SHOWN}];
        location.hash = document.querySelector("#notes a").hash; onhashchange();
        return [...first, document.querySelector("#notes li").textContent, {SHOWN}];"""
    text, ids, note, of_bench = ask(script)
    assert (
        text.startswith(
            "experts: cute_gather is faster than the best other implementation, beyond noise, in 1 of 1 cell; there it is 1.50x [1.40, 1.60] as fast as torch, at "
        )
        and ids == IDS[4:5]
    )
    assert note.startswith("gate: ") and of_bench == IDS[:2]


def test_values_are_text(ask):
    """A name that is markup stays text, in the table, in its details and in the download."""
    script = 'return [document.querySelectorAll("#rows img, tr.detail img").length, document.title, document.querySelector("tr.detail").innerText]'
    images, title, words = ask(script, part=f"row-{IDS[5]}")
    assert images == 0 and title != "1" and EVIL in words


def test_download_holds_the_filtered_rows(ask):
    part = "rows?" + urlencode({"filter": "bench:experts", "sort": "tokens"})
    script = """const made = []; URL.createObjectURL = blob => { made.push(blob.size); return "#"; }; HTMLAnchorElement.prototype.click = () => {};
        byId("csv").click(); return [csv(shown), made[0], new Blob([csv(shown)]).size];"""
    text, saved, wanted = ask(script, part=part)
    assert saved == wanted, "the button saves these rows"
    crashed, ok = csv.DictReader(io.StringIO(text))
    assert (crashed["id"], ok["id"]) == (IDS[5], IDS[4]) and crashed["reason"] == f'{EVIL}, "quoted"'
    assert ok["stage_us"] == '{"router":4,"pack":8}' and ok["median_us"] == "12.346" and crashed["median_us"] == ""
    assert ok["command"].startswith("moe-routing-bench measure experts ")


def test_results_are_in_sight(ask):
    """At 1440 px without scrolling: keys, time with interval, verdict, share of the limit. Keys stay while the others scroll."""
    script = """const heads = [...document.querySelectorAll("#rows thead th")], box = document.querySelector(".scroll:has(#rows)");
        const places = () => Object.fromEntries(heads.map(head => [head.textContent, head.getBoundingClientRect()]).map(([name, r]) => [name, [r.left, r.right]]));
        const before = places(), edge = box.getBoundingClientRect().right, cells = [...document.querySelector("#rows tbody tr").cells].map(cell => cell.textContent);
        box.scrollLeft = 400;
        return [before, places(), edge, cells];"""
    before, after, edge, cells = ask(script)
    for name in ("bench", "implementation", "trace", "median_us", "best_verdict", "best_speedup", "share_of_roofline"):
        assert before[name][1] <= edge, name
    assert after["bench"] == before["bench"] and after["implementation"] == before["implementation"]
    assert after["median_us"][0] == pytest.approx(before["median_us"][0] - 400)
    assert {"12.35 [12.30, 12.40]", "faster", "0.75"} <= set(cells)


@pytest.mark.parametrize("width", [1440, 768, 390])
def test_nothing_sticks_out(ask, width):
    """No element is wider than the window but in a scroller of its own, with a row open."""
    script = """const wide = document.documentElement.clientWidth, out = [...document.body.querySelectorAll("*")].filter(e =>
            e.getBoundingClientRect().right > wide + 1 && !e.closest(".scroll"));
        const scrollers = [...document.querySelectorAll(".scroll")].filter(e => e.getBoundingClientRect().right > wide + 1);
        return [wide, document.documentElement.scrollWidth, [...out, ...scrollers].map(e => e.outerHTML.slice(0, 80))];"""
    wide, scrolled, out = ask(script, width=width, part=f"row-{IDS[4]}")
    assert width - 20 <= wide <= width and scrolled <= wide and not out


def test_every_section_is_in_the_contents(ask):
    """A link of the list leads to each, the list and the main part are landmarks, the first link skips to the latter; every picture has a text."""
    script = """const all = selector => [...document.querySelectorAll(selector)];
        return {heads: all("main h2").map(h => [h.id, h.textContent]), links: all("nav a").map(a => [a.hash.slice(1), a.textContent]),
            first: document.querySelector("a").getAttribute("href"), outside: all("h2").length - all("main h2").length,
            dumb: all("img").filter(i => !i.alt).length, twice: all("[id]").map(e => e.id).filter((id, i, ids) => ids.indexOf(id) !== i)};"""
    found = ask(script)
    assert found["links"] == found["heads"] and len(found["heads"]) > 5 and ["all-rows", "All rows"] in found["heads"]
    assert (found["first"], found["outside"], found["dumb"], found["twice"]) == ("#main", 0, 0, [])


def test_paper_clips_nothing(page, tmp_path):
    """With the rules for paper, as wide as A4 lies: nothing scrolls, and nothing is cut off on the right."""
    paper = tmp_path / "paper.html"
    text = page.read_text()
    assert text.count("@media print") == 1
    paper.write_text(text.replace("@media print", "@media all"))
    script = """const wide = document.documentElement.clientWidth;
        return [[...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > wide + 1).map(e => e.outerHTML.slice(0, 80)),
            document.querySelector("#rows tbody tr").innerText, getComputedStyle(document.querySelector("nav")).display];"""
    out, row, nav = asked(paper, script, width=1030)
    assert not out and nav == "none"
    for text in ("gate", "cute", "12.35", "faster", "0.75"):
        assert text in row


def test_long_tables_show_what_is_asked_first(tmp_path):
    """Not all lines at once; filter and download reach all rows, a link shows one of the last."""
    table = frame(*[one("gate", "cute", cell=f"c{i}", tokens=i + 1, **TIMED) for i in range(400)])
    render(table, {}, tmp_path / "index.html")
    last = row_id(table.to_dict("records")[-1])
    lines = 'document.querySelectorAll("#rows tbody tr[id]").length'
    script = f"""const found = [{lines} < 150, csv(shown).split("\\n").length - 2];
        ask("tokens=400"); found.push({SHOWN}.join()); ask("tokens>300"); found.push({lines}); ask("");
        return [...found, table.getAttribute("aria-rowcount")];"""
    found = asked(tmp_path / "index.html", script)
    assert found == [True, 400, last, 100, "401"]
    linked = f"""const line = document.querySelector("tr.detail").previousElementSibling, box = scroller.getBoundingClientRect(), at = line.getBoundingClientRect();
        return [{lines} < 150, line.id, at.top >= box.top && at.bottom <= box.bottom];"""
    assert asked(tmp_path / "index.html", linked, part=f"row-{last}") == [True, f"row-{last}", True]
