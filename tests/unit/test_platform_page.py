"""The page of a platform in a real browser: questions to all published runs, models, figures, and what it says of where rows come from."""

import contextlib
import html
import json
import re
import shutil
import time

import pytest
from PIL import Image
from test_page_parts import FAILED, planted
from test_questions import ASKED as QUESTIONS
from test_questions import arguments

import page_numbers
from browser import CONTRAST, GOOD, asked, loaded
from moe_routing_bench.answers import around, nearest
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.cli import report
from moe_routing_bench.cli.report import rows_of
from moe_routing_bench.figures import palette
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.report import platform, platform_charts, platform_pages, platform_sections
from moe_routing_bench.store import paths
from moe_routing_bench.study import models

pytestmark = pytest.mark.slow

ROOT = PACKAGE.parents[1]
NAME = "nvidia-h200"


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pages of the H200, with one seed document and the training runs of one run twice."""
    out = tmp_path_factory.mktemp("site") / NAME
    out.mkdir()
    (out / "index.html").write_text("the report of the run without a name")
    with contextlib.chdir(ROOT):
        tables = {name: platform_pages.Tables(rows_of("measurements", name)) for name in (NAME, f"{NAME}.seed-004")}
        trained = rows_of("quality", f"{NAME}.quality-formats")
        rows = rows_of("measurements", f"{NAME}.quality-formats")
        for name in (f"{NAME}.quality-formats", f"{NAME}.again"):
            tables[name] = platform_pages.Tables(rows, trained)
        platform_pages.write(NAME, tables, out, models(), former=True)
    return out


DRAWN = "new Promise(done => { const wait = () => typeof drawChart === 'function' ? done() : setTimeout(wait, 50); wait(); })"
SEEN = """const seen = () => ({said: byId("said").innerText, ours: byId("ours")?.innerText, same: byId("same").textContent, shown: byId("shown").innerText, hash: location.hash,
    rows: [...document.querySelectorAll("#shown tbody a")].map(one => one.getAttribute("href"))});
    const set = (name, value) => { const made = document.querySelector(`#question [name=${name}]`); made.value = value;
        made.dispatchEvent(new Event("input", {bubbles: true})); made.dispatchEvent(new Event("change", {bubbles: true})); };"""
ASKED = (
    *([str(word) for word in one["ask"]] for one in QUESTIONS if "--platform" not in one["ask"]),
    ["deepseek-v3", "--tokens", "64"],
    ["qwen3-30b-a3b", "--tokens", "1", "--weights", "int4"],
    ["qwen3-30b-a3b", "--tokens", "16384", "--weights", "fp8"],
    ["deepseek-v3", "--ranks", "8"],
    ["olmoe-1b-7b", "--phase", "training"],
    ["qwen3-30b-a3b", "--bench", "routing", "--tokens", "4096"],
)


def test_a_form_and_an_address_ask_all_runs(folder):
    """What the page shows is what `ask` says: sentence, pair, distance; the cell's rows are links into the report of its run."""
    values = [arguments(words) for words in ASKED]
    assert len(values) > 40
    parts = []
    for model, axes in values:
        given = ({"model": model} if model else {}) | axes
        parts.append(
            f"restore(new URLSearchParams({json.dumps({k: str(v) for k, v in given.items()})})); found.push(seen());"
        )
    found = asked(folder / "index.html", f"{SEEN} const found = []; {' '.join(parts)} return found;")
    for (model, axes), got in zip(values, found, strict=True):
        answer = ask(model, platform=NAME, **axes)
        if answer["kind"] == "refused":
            assert got["said"].startswith("Not measured.") and all(text in got["said"] for text in answer["missing"])
            assert got["same"].startswith(f"moe-routing-bench ask {model} ")
            continue
        assert answer["sentence"] in got["said"] and all(
            gap["text"] in got["said"] for gap in answer["nearest"]["gaps"]
        )
        assert answer["against"] is None or answer["against"]["text"] in got["ours"]
        assert answer["ours"] is None or f"Ours, {answer['ours']['implementation']}" in got["ours"]
        assert answer["command"] in got["shown"] and answer["nearest"]["run"] in got["shown"]
        assert any(link.startswith(f"{platform.address(answer['nearest']['run'])}#row-") for link in got["rows"])


def test_the_form_keeps_its_question_in_the_address(folder):
    found = asked(
        folder / "index.html",
        f'{SEEN} set("model", "deepseek-v3"); set("tokens", "8"); set("tokens", "-1"); const wrong = seen(); set("tokens", "64"); return [wrong, seen()];',
    )
    assert found[0]["said"] == "T cannot be -1." and found[1]["hash"] == "#ask?model=deepseek-v3&tokens=64"
    assert found[1]["same"] == f"moe-routing-bench ask deepseek-v3 --tokens 64 --platform {NAME}"
    again = asked(folder / "index.html", f"{SEEN} return seen()", part="ask?model=deepseek-v3&tokens=64&vibes=good")
    assert (
        again["said"] == found[1]["said"] + " Left out of the question, because this page does not know it: vibes good."
    )


def test_formats_phase_and_ranks_are_in_sight(folder):
    """They decide which kernels can answer at all: a reader overlooked the format of weights below "more"."""
    script = """return [...document.querySelectorAll("#question select, #question input")].filter(one => one.checkVisibility()).map(one => one.name)"""
    assert {"model", "tokens", "phase", "weights", "dtype", "skew", "top_k", "tp", "ep", "ranks"} <= set(
        asked(folder / "index.html", script)
    )


def test_addresses_of_the_former_report_lead_to_it(folder):
    """Rows of the run without a name had their addresses here."""
    assert (folder / platform.FORMER).read_text() == "the report of the run without a name"
    with loaded(folder / "index.html") as shown:
        shown.value("setTimeout(() => { location.hash = '#row-0123456789'; }, 10); 0")
        deadline, place = time.monotonic() + 60, ""
        while not place.endswith(f"/{platform.FORMER}#row-0123456789") and time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # the page that is asked may be leaving
                place = shown.value("location.pathname + location.hash")
        assert place.endswith(f"/{platform.FORMER}#row-0123456789")


@pytest.mark.parametrize("width", [1440, 768, 390])
def test_figures_have_six_series_and_equal_scales(folder, width):
    """Hollow where a time is suspect, in both themes; no page is wider than its window; the answer is there before the figures."""
    script = """%s const charts_ = Object.keys(page.charts).filter(name => name !== "asked"); charts_.forEach(drawChart);
        const ends = name => [...new Set([...document.querySelectorAll(`#chart-${name} svg[aria-label$=marks]`)].map(svg => { const y = svg.querySelectorAll("[aria-label='y-axis tick label'] text"); return [...y].map(one => one.textContent).join(); }))];
        const marks = performance.getEntriesByType("mark").map(one => one.name), boxes = svg => [...svg.querySelectorAll("[aria-label='x-axis tick label'] text")].map(one => one.getBoundingClientRect()).sort((a, b) => a.left - b.left);
        const meet = charts_.filter(name => [...document.querySelectorAll(`#chart-${name} svg[aria-label$=marks]`)].some(svg => boxes(svg).some((one, i, all) => all[i + 1] && one.right > all[i + 1].left)));
        return {meet, poor: poor(), names: charts_, series: charts_.map(name => page.charts[name].legend.length), scales: charts_.filter(name => page.charts[name].level).map(name => ends(name).length), kinds: charts_.map(name => page.charts[name].kind), hollow: charts_.map(name => document.querySelectorAll(`#chart-${name} svg[aria-label$=marks] [aria-label=dot] [fill="var(--page)"]`).length), doubted: charts_.map(name => marksOf(page.charts[name]).filter(isDoubtful).length),
            order: [marks.indexOf("answered"), marks.indexOf("drawn")], wide: document.documentElement.scrollWidth, inner: innerWidth};"""
    with loaded(folder / "index.html", width=width) as shown:
        shown.value(DRAWN)
        found = json.loads(shown.value(f"JSON.stringify((() => {{ {script % CONTRAST} }})())"))
        assert not shown.console()
    assert {"layers", "quantised", "routing"} <= set(found["names"])
    assert max(found["series"]) <= platform_charts.MOST_SERIES and set(found["scales"]) == {1}
    assert dict(zip(found["names"], found["kinds"], strict=True))["training"] == "dots", (
        "one number of tokens is no line"
    )
    assert found["hollow"] == found["doubted"] and sum(found["hollow"]) > 10
    assert 0 <= found["order"][0] < found["order"][1] and found["wide"] <= found["inner"]
    assert found["poor"] == GOOD and found["meet"] == [], "panels of one scale share its ends, and have ticks for them"


def test_captions_say_what_the_axis_is():
    """Figures of one number of tokens have no axis of tokens."""
    found = {one.name: one for one in platform_sections.sections(platform.read(NAME))}
    kinds = {name: one.chart["kind"] for name, one in found.items() if one.chart}
    assert {"lines", "dots"} == set(kinds.values())
    for name, kind in kinds.items():
        assert ("over tokens of the batch" in found[name].caption) is (kind == "lines"), name


def test_a_series_has_one_colour_and_symbol_on_all_figures_of_a_platform():
    """Also a format, which was orange here and blue there; and an implementation has that of the reports, unless ours has it."""
    cells, seen, symbols = platform.read(NAME), {}, {}
    sized = [
        platform_sections.of_model(cells, {name: getattr(one, name) for name in platform_sections.SIZES})
        for one in models().values()
        if not one.unsupported
    ]
    parts = [
        *platform_sections.sections(cells),
        *(part for mine in sized for part in platform_sections.model_sections(mine)),
    ]
    for chart in (one.chart for one in parts if one.chart):
        tints = {one["name"]: one["light"] for one in chart["legend"]}
        assert len(set(tints.values())) == len(tints)
        for one in chart["legend"]:
            seen.setdefault(one["name"], set()).add(one["light"])
            symbols.setdefault(one["name"], set()).add(one["symbol"])
    assert all(len(symbols[name]) == 1 for name in {"ours", "fastest other", *palette.FORMATS} & set(seen))
    assert len(seen) > 12 and {name: tints for name, tints in seen.items() if len(tints) > 1} == {}
    shared = {name for name in set(palette.COLORS) & set(seen) if {palette.COLORS[name]} != seen[platform_charts.OURS]}
    assert len(shared) > 5 and all(seen[name] == {palette.COLORS[name]} for name in shared)


def test_an_answer_draws_ours_and_the_fastest_other_over_tokens(folder):
    """The points of the table over T; another answer draws another figure, or none where one number of tokens was measured."""
    script = """restore(new URLSearchParams({model: "deepseek-v3", tokens: "64"}));
        const seen = () => [...document.querySelectorAll("#chart-asked svg[aria-label$=marks] [aria-label=dot] path")].length;
        const marks = marksOf(page.charts.asked), first = seen(), times = marks.map(one => [one.series, one.x, one.y, one.panel]);
        restore(new URLSearchParams({model: "olmoe-1b-7b", phase: "training"}));
        return {first, times, after: seen()};"""
    with loaded(folder / "index.html") as shown:
        shown.value(DRAWN)
        found = json.loads(shown.value(f"JSON.stringify((() => {{ {script} }})())"))
        assert not shown.console()
    answer = ask("deepseek-v3", tokens=64, platform=NAME)
    tokens = {step["tokens"] for step in answer["over_tokens"]}
    over = [mark[:3] for mark in found["times"] if mark[3] == "over tokens"]
    assert {x for _, x, _ in over} == tokens and found["first"] == len(found["times"]) > len(tokens)
    assert ["ours", 64, answer["ours"]["median_us"]] in over
    assert ["fastest other", 64, answer["other"]["median_us"]] in over and found["after"] == 0


@pytest.mark.parametrize("width", [1440, 390])
def test_an_answer_draws_what_would_change(folder, width):
    """A panel for each axis along which other cells were measured, with the points of `ask` and the one asked; equal heights; no name over another."""
    script = """restore(new URLSearchParams({bench: "permute", tokens: "16384", experts: "128"}));
        const panels = document.querySelectorAll("#chart-asked svg[aria-label$=marks]"), heights = new Set([...panels].map(svg => [...svg.querySelectorAll("[aria-label='y-axis tick label'] text")].map(one => one.textContent).join()));
        const ticks = [...panels].map(svg => [...svg.querySelectorAll("[aria-label='x-axis tick label'] text")].map(one => one.textContent));
        const points = marksOf(page.charts.asked).map(one => [one.panel, one.series, one.x, one.y]), over = Object.keys(VARIED).map(name => byId(`over-${name}`)?.innerText ?? "");
        restore(new URLSearchParams({model: "qwen3-30b-a3b", tokens: "16384", bench: "layer"}));
        const names = [...[...document.querySelectorAll("#chart-asked svg[aria-label$=marks]")].at(-1).querySelectorAll("[aria-label='x-axis tick label'] text")].map(one => one.getBoundingClientRect());
        return {points, over, ticks, heights: heights.size, panels: panels.length, formats: names.length, meet: names.some((one, i) => names[i + 1] && one.right > names[i + 1].left + 2 && one.bottom === names[i + 1].bottom)};"""
    with loaded(folder / "index.html", width=width) as shown:
        shown.value(DRAWN)
        found = json.loads(shown.value(f"JSON.stringify((() => {{ {script} }})())"))
        assert not shown.console()
    answer = ask(bench="permute", tokens=16384, experts=128, platform=NAME)
    varied = {axis: {step[axis] for step in answer[f"over_{axis}"]} for axis in around.VARIED}
    shown_at = {"top_k": "over k", "skew": "over skew", "experts": "over E"}
    assert sum(map(bool, varied.values())) >= 2 and found["heights"] == 1
    measured = {str(x) for _, _, x, _ in found["points"]}
    assert all(set(ticks) <= measured for ticks in found["ticks"]), "an axis of counts names those that were measured"
    for (axis, values), text in zip(varied.items(), found["over"], strict=True):
        there = {x for panel, _, x, _ in found["points"] if panel == shown_at[axis]}
        assert there == (values | {answer["nearest"]["axes"][axis]} if values else set())
        assert bool(text) is bool(values) and all(f"{value:g}: " in text for value in values)
    stored_times = {row["median_us"] for cell in platform.read(NAME) if cell.bench == "permute" for row in cell.timed}
    assert {y for *_, y in found["points"]} <= stored_times
    assert found["formats"] >= 3 and not found["meet"]


def test_a_drag_zooms_into_a_figure(folder):
    script = """drawChart("layers"); const svg = document.querySelector("#chart-layers svg[aria-label$=marks]"), m = svg.getScreenCTM(), [low, high] = svg.scale("x").range;
        const at_ = x => ({clientX: m.a * x + m.e, clientY: m.d * 60 + m.f, bubbles: true, pointerType: "mouse"}), before = svg.scale("x").domain;
        for (const [name, x] of [["down", (low + high) / 2], ["move", high], ["up", high]]) svg.dispatchEvent(new PointerEvent(`pointer${name}`, at_(x)));
        return [before, document.querySelector("#chart-layers svg[aria-label$=marks]").scale("x").domain];"""
    with loaded(folder / "index.html") as shown:
        shown.value(DRAWN)
        before, after = shown.value(f"(() => {{ {script} }})()")
        assert not shown.console()
    assert before[0] < after[0] and after[1] == pytest.approx(before[1])


@pytest.mark.parametrize(
    ("fault", "cells"),
    [(lambda data: data["rules"].update(known=None), True), (lambda data: data["rules"].update(reads=None), False)],
    ids=["in the form", "in the cells"],
)
def test_figures_are_there_whatever_ask_does(folder, fault, cells):
    """And the tables of cells, unless it is the cells that fail."""
    seen = """(() => { const names = Object.keys(page.charts).filter(name => name !== "asked"), box = document.querySelector("details[data-section=layers]"); names.forEach(drawChart); box.open = true; box.dispatchEvent(new Event("toggle"));
        return {said: byId("said").innerText, figures: names.length, drawn: names.filter(name => document.querySelector(`#chart-${name} svg[aria-label$=marks]`)).length, cells: box.querySelectorAll("tbody tr").length, box: box.innerText}; })()"""
    with loaded(planted(folder / "index.html", fault)) as shown:
        shown.value(DRAWN)
        found = shown.value(seen)
        assert any("TypeError" in line for line in shown.console())
    assert found["said"].startswith(f"{FAILED}TypeError: ") and found["drawn"] == found["figures"] >= 5
    assert (found["cells"] > 10, FAILED in found["box"]) == (cells, not cells)


def test_a_section_opens_to_its_cells(folder):
    """As many as it says, each with ours, the fastest other and their ratio; a cell's name is its own question, which is answered as asked."""
    script = """const box = document.querySelector("details[data-section=layers]"); box.open = true; box.dispatchEvent(new Event("toggle"));
        const lines = [...box.querySelectorAll("tbody tr")], links = lines.map(one => one.cells[2].querySelector("a").getAttribute("href"));
        const said = links.map(link => { restore(new URLSearchParams(link.slice("#ask?".length))); return byId("near").innerText; });
        return {said, summary: box.querySelector("summary").innerText, ratio: lines.map(one => one.cells[5].innerText)};"""
    found = asked(folder / "index.html", script)
    assert f"All {len(found['said'])} cells" in found["summary"] and len(found["said"]) > 10
    assert [text for text in found["said"] if "measured as asked" not in text] == []
    assert sum("x as fast as" in text or " as fast as " in text for text in found["ratio"]) > 10


def test_a_page_per_measured_model(folder):
    """Lines per format and the fastest other; every cell of its sizes in the table, which leads to rows; the page leads back to Ask."""
    page = folder / "deepseek-v3/index.html"
    text = page.read_text()
    cells = platform_sections.of_model(
        platform.read(NAME), {name: getattr(models()["deepseek-v3"], name) for name in platform_sections.SIZES}
    )
    table = text[text.index('id="model-cells"') : text.index("</table>", text.index('id="model-cells"'))]
    assert table.count("<tr>") == len(cells) + 1 and 'href="../index.html#ask?model=deepseek-v3"' in text
    assert {"../../nvidia-h200.decode/index.html", "../../nvidia-h200.layers/index.html"} <= {
        link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', table)
    }
    with loaded(page) as shown:
        shown.value(DRAWN)
        series = shown.value("Object.values(page.charts).map(one => one.legend.map(entry => entry.name))")
        assert not shown.console()
    assert any({"bf16", platform_charts.OTHER} <= set(names) for names in series)


def test_quality_and_seeds_are_tabs(folder):
    """Two runs with training runs have ids and figures of their own; each tab leads to the others."""
    for name, tab in (("quality.html", "Quality"), ("seeds.html", "Seeds")):
        with loaded(folder / name) as shown:
            if tab == "Quality":
                shown.value(DRAWN)
                shown.value("Object.keys(page.charts).forEach(drawChart)")
            found = json.loads(
                shown.value(
                    """JSON.stringify({ids: [...document.querySelectorAll("[id]")].map(one => one.id), tab: document.querySelector("[aria-current]").innerText, heads: [...document.querySelectorAll("h2")].map(one => one.innerText),
                    links: [...document.querySelectorAll(".tabs a")].map(one => one.getAttribute("href")), drawn: document.querySelectorAll(".chart svg[aria-label$=marks]").length, charts: document.querySelectorAll(".chart").length, wide: document.documentElement.scrollWidth <= innerWidth})"""
                )
            )
            assert not shown.console()
        assert found["tab"] == tab and found["wide"] and len(found["ids"]) == len(set(found["ids"]))
        assert found["links"] == ["index.html", "quality.html", "seeds.html", "history.html", "../index.html"]
        if tab == "Quality":
            assert found["heads"] == ["Quality", "Quality"] and found["drawn"] >= found["charts"] >= 4
        else:
            assert found["heads"] == ["Seed document 004, replayed"] and found["charts"] == 0


def test_numbers_of_the_pages_are_those_of_the_rows(folder):
    """Computed anew from Parquet (page_numbers.py): sections, and of every third model its answers and each line of its table."""
    held = {
        key: cell
        for cell in page_numbers.cells(NAME)
        for key in [tuple(cell.iloc[0][["run", "bench", "cell", "card"]])]
    }
    known = platform.read(NAME)
    sections = {one.name: [known[place] for place in one.cells] for one in platform_sections.sections(known)}
    text = visible(folder / "index.html")
    wrong, count = [], 0
    listed = re.findall(r"<tr>(<td>.*?)</tr>", text.partition('id="run-list"')[2])
    runs = [[plain(one) for one in re.findall(r"<td[^>]*>(.*?)</td>", line)] for line in listed]
    wrong += page_numbers.first_page(plain(text), runs, NAME)
    for digit in re.findall(r"\d+", re.search(r'id="scope">(.*?) on ', text)[1]):
        assert page_numbers.first_page(plain(text).replace(f"{digit} ", f"{int(digit) + 1} ", 1), runs, NAME), digit
    assert page_numbers.first_page(plain(text), [[*runs[0][:3], str(int(runs[0][3]) + 1)], *runs[1:]], NAME)
    for name, mine in sections.items():
        part = text.partition(f'<h2 id="{name}">')[2].partition("<h2")[0] if mine else ""
        wrong += (
            page_numbers.tally(plain(part), [held[one.run, one.bench, one.key, one.card] for one in mine])
            if mine
            else []
        )
        count += bool(mine)
    for model in sorted(models())[::3]:
        text = visible(folder / model / "index.html")
        for said in re.findall(r"<dt>T=\d+</dt><dd>(.*?)</dd>", text):
            measured = page_numbers.ANSWER.search(plain(said))
            wrong += page_numbers.answer(plain(said), NAME) if measured or "Not measured: " not in said else []
            count += 1
        for line in re.findall(r"<tr>(<td>.*?)</tr>", text.partition('id="model-cells"')[2]):
            wrong += page_numbers.line(
                [(plain(one), re.findall('href="([^"]*)"', one)) for one in re.findall("<td>(.*?)</td>", line)], NAME
            )
            count += 1
    assert not wrong and count > 100, count


def visible(page):
    return page.read_text().partition("<main")[2].partition("</main>")[0]


def plain(markup):
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", markup)).split())


def test_every_preset_has_an_address(folder):
    """What `ask` says of it, also where its sizes were not measured or cannot be; the first page leads to all."""
    first = (folder / "index.html").read_text()
    assert all(f'href="{name}/index.html"' in first and (folder / name / "index.html").is_file() for name in models())
    for model, tokens in (("kimi-k2", 64), ("qwen3-30b-a3b", 64), ("glm-4.5", 4096)):
        text = html.unescape((folder / model / "index.html").read_text())
        answer = ask(model, tokens=tokens, platform=NAME)
        wanted = [answer["sentence"]] if answer["kind"] == "measured" else answer["missing"]
        assert all(one in text for one in wanted)
        assert ("was measured here: the nearest cell answers" in text) is (model != "qwen3-30b-a3b")
    none = next(name for name, one in models().items() if one.unsupported)
    assert models()[none].unsupported in html.unescape((folder / none / "index.html").read_text())


def test_pages_are_light(folder):
    """The first answer needs the rows alone: a laptop unpacks them in a fraction of a second."""
    assert (folder / "index.html").stat().st_size < 1e6
    assert all(path.stat().st_size < 5e6 for path in folder.glob("**/*.html"))


def test_equal_rows_give_equal_pages():
    """The formats of a set had another order in each process."""
    data = platform.page_data(NAME, platform.read(NAME), {})
    names = list(data["rules"]["rule"]["families"])[len(nearest.FAMILIES) :]
    assert len(names) > 3 and names == sorted(names)


def test_next_to_the_report_of_a_laptop_the_page_stands_alone(tmp_path, monkeypatch, capsys):
    """It answers as the others do, and leads to no page that is not there; a GPU has none next to its report."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    report._write_published("nvidia-h100-80gb-hbm3")
    assert not (tmp_path / "reports").exists()
    page = paths.published_page("cpu")
    page.parent.mkdir(parents=True)
    report._write_published("cpu")
    assert capsys.readouterr().out == f"wrote {page}: published rows of {NAME}\n"
    script = """restore(new URLSearchParams({model: "deepseek-v3", tokens: "64"})); drawChart("layers"); const box = document.querySelector("details[data-section=layers]"); box.open = true; box.dispatchEvent(new Event("toggle"));
        return [byId("said").innerText, byId("ours").innerText, [...document.querySelectorAll("a")].map(one => one.getAttribute("href") ?? one.getAttribute("xlink:href")), document.querySelectorAll("#chart-asked svg[aria-label$=marks]").length];"""
    with loaded(tmp_path / page) as shown:
        shown.value(DRAWN)
        said, mine, links, drawn = shown.value(f"(() => {{ {script} }})()")
        assert not shown.console()
    answer = ask("deepseek-v3", tokens=64, platform=NAME)
    assert answer["sentence"] in said and answer["against"]["text"] in mine and drawn
    assert {link for link in links if not link.startswith("#")} == {page.name, "index.html"} and len(links) > 100


def test_a_platform_of_named_runs_alone(tmp_path, monkeypatch):
    """Routing alone was measured on it, so that its page opens with routing; it has no page of another run."""
    shutil.copytree(ROOT / "results/nvidia-h100-80gb-hbm3", tmp_path / "results/other.mine")
    monkeypatch.chdir(tmp_path)
    cells = platform.read("other")
    assert cells and platform.opening(cells) == {"bench": "routing"}
    kinds = {one.name: one for one in platform_sections.sections(cells)}
    assert kinds["routing"].cells and not kinds["layers"].cells and kinds["layers"].chart is None
    assert kinds["ranks"].text.startswith("No published row of")


def test_a_model_has_a_picture_for_links(folder, tmp_path):
    """1200 by 630 pixels of the measured models; a page names it only by a whole address, as previews need one."""
    with Image.open(folder / "deepseek-v3/preview.png") as shown:
        assert shown.size == (1200, 630) and len(shown.convert("RGB").getcolors(300)) > 20
    assert (folder / "deepseek-v3/preview.png").stat().st_size < 100_000
    assert "og:image" not in (folder / "deepseek-v3/index.html").read_text()
    assert not (folder / "kimi-k2/preview.png").exists(), "nothing was measured of it"
    cells = platform_sections.of_model(
        platform.read(NAME), {name: getattr(models()["deepseek-v3"], name) for name in platform_sections.SIZES}
    )
    shared = {"heading": "h", "title": "t: u", "about": "", "tabs": [], "root": "../"}
    platform_pages._write_model("deepseek-v3", cells, tmp_path / "index.html", shared, [], "https://example.org/a/")
    named = re.findall('<meta property="og:image" content="([^"]+)">', (tmp_path / "index.html").read_text())
    assert named == ["https://example.org/a/preview.png"]
    platform_pages._write_model("deepseek-v3", [], tmp_path / "none/index.html", shared, [], "https://example.org/a/")
    assert "og:image" not in (tmp_path / "none/index.html").read_text()
