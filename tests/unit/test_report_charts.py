"""Figures that the page draws itself, in a real browser: marks, switches, links, numbers; at three widths, by day and by night."""

import re

import pytest
from rows import frame, one, rows

from browser import CONTRAST, GOOD, asked
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report import page
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import row_id

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title=1>"
TIMED = {
    "experts": 8,
    "ci_low_us": 1.0,
    "ci_high_us": 9.0,
    "best_verdict": "faster",
    "best_speedup": 1.5,
    "gpu_uuid": "GPU-1",
    "compulsory_bytes": 4_000_000,
    "copy_gb_per_s": 4000.0,
}
TABLE = frame(
    *(
        one(
            "routing",
            name,
            cell=f"{tokens}",
            tokens=tokens,
            median_us=us,
            model=EVIL,
            stage_us=[("router", 1.0), ("pack", 2.0)],
            **TIMED,
        )
        for tokens in (64, 512)
        for name, us in (("cute", 3.0), ("triton", 5.0))
    ),
    *(one("gate", name, cell="g", tokens=64, median_us=2.0, speedup=2.0, **TIMED) for name in ("cute", "quack")),
)
DRAWN = ["over_tokens", "crossover", "decode", "limits", "verdict_matrix", "stage_share", "speedup"]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    out = (folder := tmp_path_factory.mktemp("page")) / "index.html"
    render(TABLE, {name: folder / f"{name}.svg" for name in FIGURES}, out)
    return lambda script, **options: asked(out, f"{ALL} {script}", **options)


ALL = "Object.keys(charts).forEach(drawChart); const all = (selector, from = document) => [...from.querySelectorAll(selector)], of = name => document.querySelector('#chart-' + name);"


def test_every_figure_with_marks_is_drawn(ask):
    """A mark of each kind, its row one click away, its numbers as a table; no markup from a value."""
    found = ask("""all(".numbers").forEach(one => one.open = true); all(".numbers").forEach(one => one.ontoggle());
        return {drawn: Object.keys(charts), empty: Object.keys(charts).filter(name => !of(name).querySelector(".panels svg path, .panels svg rect")), images: all(".chart img").length,
            links: all(".panels a", of("over_tokens")).map(a => a.getAttribute("href") ?? a.href.baseVal), lines: all("[aria-label=line] path", of("over_tokens")).length, cells: all("[aria-label=cell] rect", of("verdict_matrix")).length,
            bars: all("[aria-label=bar] rect", of("stage_share")).length, rows: all(".numbers tbody tr", of("over_tokens")).length, label: of("over_tokens").querySelector(".panels svg").getAttribute("aria-label"),
            numbers: [...of("over_tokens").querySelector(".numbers tbody tr").cells].map(cell => cell.textContent.trim())};""")
    assert sorted(found["drawn"]) == sorted(DRAWN) and not found["empty"] and not found["images"]
    assert (found["lines"], found["cells"], found["bars"], found["rows"]) == (2, 6, 8, 4)
    assert set(found["links"]) == {f"#row-{row_id(one)}" for one in TABLE.to_dict("records")[:4]}
    assert EVIL in found["label"] and found["numbers"][1:5] == ["cute", "64", "3", "[1, 9]"]


def test_a_matrix_of_many_columns_scrolls_on_a_phone(tmp_path):
    """Its headings keep apart and every number is written; the page is no wider than the window, and one of few columns does not scroll."""
    names = [
        "torch",
        "torch_compile",
        "triton",
        "cute",
        "quack",
        "vllm",
        "sglang",
        "vllm_align",
        "sglang_align",
        "transformers_grouped_mm",
        "matmul_cute",
    ]
    table = frame(
        *(one("gate", name, cell="g", tokens=64, median_us=2.0, speedup=2.0, **TIMED) for name in names),
        *(one("pack", name, cell="p", tokens=64, median_us=2.0, speedup=2.0, **TIMED) for name in names[:3]),
    )
    render(table, {"verdict_matrix": tmp_path / "verdict_matrix.svg"}, tmp_path / "index.html")
    found = asked(
        tmp_path / "index.html",
        ALL
        + """return {panels: all(".panels > div", of("verdict_matrix")).map(panel => {
        const places = all("[aria-label=cell] rect", panel).map(one => one.getBoundingClientRect().left).sort((a, b) => a - b), box = panel.querySelector(".scroll");
        const top = panel.querySelector("svg").getBoundingClientRect().top;
        const said = all("text", panel).find(one => one.textContent.startsWith("T64")).getBoundingClientRect(), cell = panel.querySelector("[aria-label=cell] rect").getBoundingClientRect();
        return {above: said.bottom <= cell.top + 2, inside: all("[aria-label*=tick] text", panel).every(one => one.getBoundingClientRect().top >= top - 1), apart: Math.min(...places.slice(1).map((place, i) => place - places[i])), said: all("[aria-label=text] text", panel).filter(one => one.textContent === "1.50x").length,
            scrolls: Boolean(box && box.scrollWidth > box.clientWidth && box.tabIndex === 0 && box.getAttribute("aria-label"))}; }),
        wide: document.documentElement.scrollWidth <= innerWidth};""",
        width=390,
    )
    gate, pack = found["panels"]
    assert found["wide"] and (gate["said"], gate["scrolls"], pack["said"], pack["scrolls"]) == (11, True, 3, False)
    assert gate["apart"] >= 30 and pack["apart"] >= 30 and gate["inside"], "nor is a heading cut off above"
    assert gate["above"], "the only line's name stands above its cells"


def test_what_a_cell_of_a_matrix_says_is_within_it(ask):
    """With the mark of a warm cache, for any number of columns: letters have the colour of the page, and are invisible outside of their cell."""
    found = ask("""const looks = new Map([["same", {light: "#000", dark: "#fff"}]]), chart = {kind: "matrix", x: {kind: "names"}, y: {kind: "names"}, marks: {}};
        const out = (room, count, says, doubt) => { const marks = Array.from({length: count}, (_, i) => ({panel: "gate", series: "same", x: `kernel${i}`, y: "T16384 E128 k2", says, doubt})), svg = panelOf(chart, marks, room, looks); document.body.append(svg);
            const [cells, texts] = ["cell] rect", "text] text"].map(name => all(`[aria-label=${name}`, svg).filter(one => name[0] === "c" || one.textContent.startsWith(says)).map(one => one.getBoundingClientRect()).sort((a, b) => a.left - b.left));
            return texts.length === count && cells.length === count && texts.every((one, i) => one.left >= cells[i].left && one.right <= cells[i].right); };
        return [[343, 8, "0.05x", "L2 may be warm"], [343, 11, "12.3x", "L2 may be warm"], [343, 8, "5.03x", null], [343, 2, "5.03x", "L2 may be warm"], [700, 12, "0.79x", "L2 may be warm"]].map(one => out(...one));""")
    assert found == [True] * 5


def test_no_heading_of_a_matrix_is_cut_off_beside_it(ask):
    """However long the name over the last column is, and however narrow the panel."""
    found = ask("""const marks = ["torch_loop", "torch_grouped_mm"].map(x => ({panel: "experts", series: "same", x, y: "T256 H128 I256 E8 k2", says: "1.00x"}));
        const looks = new Map([["same", {light: "#000", dark: "#fff"}]]), chart = {kind: "matrix", x: {kind: "names"}, y: {kind: "names"}, marks: {}};
        return [300, 343, 700].map(room => { const svg = panelOf(chart, marks, room, looks); document.body.append(svg); return all("text", svg).every(one => one.getBoundingClientRect().right <= svg.getBoundingClientRect().right + 1); });""")
    assert found == [True, True, True]


@pytest.mark.parametrize("kind", ["dots", "bars", "matrix"])
def test_a_long_name_above_its_line_is_broken_and_whole(ask, kind):
    """On a phone: no end of it is cut off, and none lies over a mark or the next name; a short one has one line."""
    found = ask(
        f"""const kind = "{kind}"; """
        + """const looks = new Map([["same", {light: "#000", dark: "#fff"}]]), axis = {kind: kind === "matrix" ? "names" : "linear", label: "us"}, chart = {kind, x: axis, y: {kind: "names"}, marks: {}, reference: null};
        const names = length => [1, 2, 3].map(i => `qwen3-30b-a3b decode T${i} packed-fp8_block128 weights-e4m3_block128 | vllm_triton_fp8`.slice(0, length)), drawn = length => { const svg = panelOf(chart, names(length).map((y, i) => ({panel: "layer", series: "same", x: kind === "matrix" ? "auto" : i + 1, y, low: i, high: i + 1, says: "1.00x", doubt: null})), 343, looks); document.body.append(svg); return svg; };
        return [200, 30].map(length => { const svg = drawn(length), boxes = kind => all(kind, svg).map(one => one.getBoundingClientRect()), said = all("text", svg).filter(one => one.textContent.startsWith("qwen3")), texts = said.map(one => one.getBoundingClientRect()).sort((a, b) => a.top - b.top);
            const marks = boxes({dots: "[aria-label=dot] path", bars: "[aria-label=bar] rect", matrix: "[aria-label=cell] rect"}[kind]), over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2;
            return [said.length, Math.max(...texts.map(one => one.height)) > 20, texts.every(one => one.right <= svg.getBoundingClientRect().left + 343), texts.filter((one, i) => marks.some(mark => over(one, mark)) || texts.slice(i + 1).some(next => over(one, next))).length]; });""",
    )
    assert found == [[3, True, True, 0], [3, False, True, 0]]


def test_a_name_of_wide_letters_is_whole(ask):
    """On a phone the last of "weights-e4m3_block128" was cut off: letters are wider than the library takes them to be."""
    found = ask("""const looks = new Map([["same", {light: "#000", dark: "#fff", symbol: "circle"}]]), y = "deepseek-v3 decode T8 I256 tp8 packed-fp8_block128 weights-e4m3_block128";
        return [300, 330, 358, 390].flatMap(room => ["linear", "names"].map(kind => { const svg = panelOf({kind: kind === "names" ? "matrix" : "dots", x: {kind, label: "us"}, y: {kind: "names"}, marks: {}, reference: null}, [{panel: "layer", series: "same", x: 1, y, says: "1.00x", doubt: null}], room, looks); document.body.append(svg);
            return Math.round(all("text", svg).find(one => one.textContent.startsWith("deepseek")).getBoundingClientRect().right - svg.getBoundingClientRect().left - room); }));""")
    assert max(found) <= 0, found


@pytest.mark.parametrize("width", [1440, 768, 390])
def test_times_of_lines_are_read_without_a_pointer(ask, width):
    """At the end of a line, or after its name above it: whole, on no mark and no other text."""
    found = ask(
        """const texts = name => all(".panels svg text", of(name)).filter(one => one.textContent.trim() && one.getBoundingClientRect().width && !one.closest("[aria-label=tip]")), boxes = list => list.map(one => one.getBoundingClientRect());
        const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
        return ["crossover", "stage_share", "decode", "limits"].map(name => { const all_ = texts(name), said = all_.filter(one => one.textContent.includes("µs") && !one.textContent.includes("→")), panel = of(name).querySelector(".panels").getBoundingClientRect();
            return {name, said: said.map(one => one.textContent), cut: boxes(said).filter(one => one.right > panel.right + 1 || one.left < panel.left - 1).length, over: all_.filter((one, i) => said.includes(one) && all_.some((other, j) => i !== j && over(one.getBoundingClientRect(), other.getBoundingClientRect()))).length}; });""",
        width=width,
    )
    for figure in found:
        assert not figure["cut"] and not figure["over"], figure
    said = {figure["name"]: [text.replace("\u00a0", " ") for text in figure["said"]] for figure in found}
    assert len(said["crossover"]) == 2 and all("cute, 3 µs" in text for text in said["crossover"])
    assert sum("5.000 µs [1.000, 9.000]" in text for text in said["stage_share"]) == 2
    assert len(said["decode"]) >= 4 and len(said["limits"]) >= 3


def test_panels_with_names_begin_at_one_place(ask):
    """However long the names of each are: equal ends in other places were no equal scale."""
    found = ask("""return [1400, 390].flatMap(wide => { const held = charts.limits, marks = ["a", "T16384 H2048 E128 k8 skew3.7"].map((y, i) => ({panel: `p${i}`, series: held.legend[0].name, x: 2, y, aside: "cute, 3 µs"}));
        of("limits").style.width = `${wide}px`; charts.limits = {...held, own: {}, count: 2, marks: Object.fromEntries(Object.keys(marks[0]).map(name => [name, {each: marks.map(one => one[name])}]))}; drawChart("limits"); charts.limits = held;
        return all(".panels svg", of("limits")).map(svg => svg.scale("x").range.join()); });""")
    assert len(found) == 4 and found[0] == found[1] and found[2] == found[3], found


def test_panels_of_one_scale_have_one_height(ask):
    """Linear ones too, whatever lies in each; a panel of another scale has its own; and they stand on one line under headings of any height."""
    found = ask("""const held = charts.over_tokens, series = held.legend[0].name, marks = [["p", 1, 94, 92], ["p", 2, 96, 95], ["q" + " long".repeat(60), 1, 55, 50], ["r", 1, 3, 2]].map(([panel, x, y, low]) => ({panel, series, x, y, low, high: y + 1}));
        charts.over_tokens = {...held, x: {label: "x", kind: "linear"}, y: {label: "%", kind: "linear"}, level: true, reference: 100, own: {r: {x: {label: "x", kind: "linear"}, y: {label: "bits", kind: "linear"}, reference: null}}, count: 4, marks: Object.fromEntries(Object.keys(marks[0]).map(name => [name, {each: marks.map(one => one[name])}]))};
        drawChart("over_tokens"); const panels = all(".panels > div", of("over_tokens")), svgs = panels.map(one => one.querySelector("svg")); charts.over_tokens = held;
        return {ends: svgs.map(svg => svg.scale("y").domain), labels: svgs.map(svg => all("[aria-label='y-axis tick label'] text", svg).map(one => one.textContent).join()), bottoms: svgs.map(svg => svg.getBoundingClientRect().bottom)};""")
    first, second, other = found["ends"]
    assert first == second and first[0] <= 50 and first[1] >= 100 and other[1] < 10
    assert found["labels"][0] == found["labels"][1] and max(found["bottoms"]) - min(found["bottoms"]) < 1


def test_a_number_of_an_axis_has_room_above_its_name(ask):
    """The largest number of tokens and the word touched."""
    gaps = ask("""return ["over_tokens", "decode", "crossover"].flatMap(name => all(".panels svg", of(name)).map(svg => { const box = label => all(`[aria-label='${label}'] text`, svg).map(one => one.getBoundingClientRect());
        return Math.min(...box("x-axis label").map(one => one.top)) - Math.max(...box("x-axis tick label").map(one => one.bottom)); }));""")
    assert len(gaps) > 3 and min(gaps) >= 1, gaps


def test_steps_that_lie_close_have_their_numbers_apart(ask):
    """Of two histories of a day the second number stood on the first."""
    found = ask("""const looks = new Map([["ours", {light: "#000", dark: "#fff", symbol: "circle"}]]), chart = {kind: "lines", level: true, x: {label: "days", kind: "linear"}, y: {label: "speed", kind: "log"}, reference: 1, marks: {}};
        const svg = panelOf(chart, [[0, 1, null], [4.5, 1.01, "1.01x"], [5.2, 1.015, "1.02x"], [8, 1.2, "1.17x"]].map(([x, y, text]) => ({panel: "p", series: "ours", x, y, text})), 350, looks); document.body.append(svg);
        const boxes = all("[aria-label=text] text", svg).map(one => one.getBoundingClientRect());
        return [boxes.length, boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length];""")
    assert found == [3, 0]


def test_a_name_is_broken_between_words(ask):
    """`cute_quantised` was cut in two; a word that is longer than a line still is."""
    found = ask(
        """return [broken("qwen3-30b-a3b T16384 weights-int4_g128: cute_quantised, 2,212 µs", 49), broken("transformers_grouped_mm", 16)];"""
    )
    assert found == [
        ["qwen3-30b-a3b T16384 weights-int4_g128: ", "cute_quantised, 2,212 µs"],
        ["transformers_", "grouped_mm"],
    ]


def test_a_matrix_of_few_columns_does_not_scroll_on_a_phone(ask):
    """Four columns did, and the name of the last was cut off: the names of lines stand above these where that makes room."""
    found = ask("""const looks = new Map([["same", {light: "#000", dark: "#fff"}]]), chart = {kind: "matrix", x: {kind: "names"}, y: {kind: "names"}, marks: {}};
        const svg = panelOf(chart, ["cute_push", "cute_push_graph", "torch_static", "torch_static_graph"].map(x => ({panel: "p", series: "same", x, y: "T8192 H7168 E256 k8", says: "4.74x"})), 358, looks);
        return svg.width.baseVal.value;""")
    assert found <= 358


def test_a_name_above_its_line_is_not_struck_out(ask):
    """In a narrow panel the dashed line at 1 lies below the names."""
    found = ask(
        """const parts = [...of("crossover").querySelector(".panels svg").children].map(one => one.getAttribute("aria-label"));
        return [parts.indexOf("rule"), parts.indexOf("text")];""",
        width=390,
    )
    assert 0 <= found[0] < found[1]


def test_an_axis_of_tokens_names_those_that_were_measured(ask):
    """All of a few; of many as many as have room, the largest among them; zoomed, those in sight."""
    found = ask("""const labels = () => all("[aria-label='x-axis tick label'] text", of("over_tokens").querySelector(".panels svg")).map(one => one.textContent), first = labels().sort();
        const ticked = xs => all("[aria-label='x-axis tick label'] text", panelOf(charts.over_tokens, xs.map(x => ({panel: "p", series: "cute", x, y: 1})), 900, new Map([["cute", charts.over_tokens.legend[0]]]))).map(one => one.textContent).sort();
        const many = Array.from({length: 16}, (_, i) => ({x: 2 ** (i + 2)})), places = countsOn(many, null, 300).map(one => 300 * Math.log2(one / 4) / 15);
        return [first, countsOn(many, null, 300).length, countsOn(many, null, 3000).length, Math.min(...places.slice(1).map((one, i) => places[i] - one)), countsOn(many, [60, 1100], 3000), countsOn([{x: 64}], null, 300), ticked([1, 16, 64, 512, 4096, 16384, 65536]), ticked([48, 96, 1000, 3000])];""")
    first, few, every, apart, zoomed, single, wide, odd = found
    assert first == ["512", "64"] and 3 < few < every == 16 and apart >= 16
    assert zoomed == [1024, 512, 256, 128, 64] and single == [64]
    assert wide == ["1", "16", "16,384", "4096", "512", "64", "65,536"] and odd == ["1000", "3000", "48", "96"]


def test_numbers_below_a_narrow_panel_do_not_run_into_each_other(ask):
    """However much of it the names on the left take, and however long the numbers are."""
    found = ask("""const looks = new Map([["a", {light: "#000", dark: "#fff", symbol: "circle"}]]), chart = {kind: "dots", x: {label: "time", kind: "linear"}, y: {label: "", kind: "names"}, reference: 0, marks: {}};
        const marks = ["ops", "transformers_eager", "transformers_batched_mm"].map((y, i) => ({panel: "p", series: "a", x: 3000 + 40000 * i, low: 3000, high: 113430, y}));
        return [320, 358, 460, 700, 1400].map(room => { const svg = panelOf(chart, marks, room, looks); document.body.append(svg);
            const places = all("[aria-label='x-axis tick label'] text", svg).map(one => one.getBoundingClientRect()).sort((a, b) => a.left - b.left);
            return [places.length, Math.min(...places.slice(1).map((one, i) => one.left - places[i].right))]; });""")
    assert all(many >= 3 and apart >= 4 for many, apart in found), found


def test_an_interval_that_ends_just_below_0_has_little_axis_below_it(ask):
    """An end of -0.0012 bits had an axis from -0.05; where nothing is below 0, the axis ends at a tick."""
    found = ask("""const looks = new Map([["a", {light: "#000", dark: "#fff", symbol: "circle"}]]), chart = {kind: "dots", x: {label: "bits", kind: "linear"}, y: {label: "", kind: "names"}, reference: 0, marks: {}};
        return [-0.0012, 0.01].map(low => panelOf(chart, [{panel: "p", series: "a", x: 0.02, low, high: 0.03, y: "b"}, {panel: "p", series: "a", x: 0.2, low: 0.1, high: 0.32, y: "c"}], 700, looks).scale("x").domain);""")
    assert -0.011 < found[0][0] < 0 and found[0][1] >= 0.32 and found[1] == [0, 0.35]


def test_a_bar_with_an_interval_has_it_at_its_end(ask):
    """Where the axis has room for it, in the middle of the bar, wide and narrow; a bar without one has none."""
    found = ask("""const looks = new Map([["a", {light: "#000", dark: "#fff", symbol: "square"}]]), chart = {kind: "bars", x: {label: "time", kind: "linear"}, y: {label: "", kind: "names"}, reference: null, marks: {}};
        const marks = [{panel: "p", series: "a", x: 10, low: 0, high: 10, x_low: 8, x_high: 13, y: "torch_grouped_mm"}, {panel: "p", series: "a", x: 5, low: 0, high: 5, y: "ops"}];
        return [900, 240].map(room => { const svg = panelOf(chart, marks, room, looks); document.body.append(svg);
            const lines = all("[aria-label=rule] line", svg), bars = all("[aria-label=bar] rect", svg).map(one => one.getBoundingClientRect()), {apply} = svg.scale("x"), [one] = lines;
            return {lines: lines.length, from: +one.getAttribute("x1") - apply(8), to: +one.getAttribute("x2") - apply(13), most: svg.scale("x").domain[1],
                off: one.getBoundingClientRect().y - bars[0].y - bars[0].height / 2, thick: bars[0].height}; });""")
    for at in found:
        assert at["lines"] == 1 and abs(at["from"]) < 1 and abs(at["to"]) < 1 and at["most"] >= 13, found
        assert abs(at["off"]) <= 2 < at["thick"], found


def test_ticks_of_an_axis_are_told_apart(ask):
    """Losses that differ in the fifth digit had an axis on which every tick said 5.954; else four digits are enough."""
    found = ask("""const looks = new Map([["a", {light: "#000", dark: "#fff", symbol: "circle"}]]), chart = {kind: "points", x: {label: "s", kind: "linear"}, y: {label: "bits", kind: "linear"}, marks: {}};
        return [[5.95371, 5.95402], [1, 2]].map(ends => all("[aria-label='y-axis tick label'] text", panelOf(chart, ends.map((y, i) => ({panel: "p", series: "a", x: i, y})), 700, looks)).map(one => one.textContent));""")
    fine, coarse = found
    assert len(set(fine)) == len(fine) > 2 and all(one.startswith("5.95") for one in fine)
    assert coarse == ["1", "1.2", "1.4", "1.6", "1.8", "2"]


def test_axes_of_a_panel(ask):
    """A panel has scales of its own where the chart gives it some; a logarithmic axis has a label at each tick, and room for all; steps go round what lies on a front."""
    found = ask("""const types = () => ["x", "y"].map(name => of("over_tokens").querySelector(".panels svg").scale(name).type), before = types(), chart = charts.over_tokens, panel = marksOf(chart)[0].panel;
        chart.own = {[panel]: {x: {label: "own", kind: "linear"}, y: chart.y}}; drawChart("over_tokens");
        const wide = ticksOf([4096, 65536], 280, text => 6.2 * text.length + 10);
        const level = points => { const [, first, , second] = Plot.plot({marks: [frontOf(points)]}).querySelector("[aria-label=line] path").getAttribute("d").match(/[\\d.]+/g); return first === second; };
        return {before, after: types(), labels: of("over_tokens").querySelector(".panels").textContent.includes("own"), from: all(".from").map(one => one.textContent), wide,
            tall: ticksOf([1, 5000], 200, () => 15), fine: ticksOf([1, 2.1], 900, () => 30), none: ticksOf([1.001, 1.002], 200, () => 15) ?? null, names: panelOf({kind: "lines", x: {label: "mode", kind: "names"}, y: chart.y, reference: null, marks: {}}, ["joint", "frozen"].map(x => ({panel: "p", series: "cute", x, y: 1})), 400, new Map([["cute", chart.legend[0]]])).scale("x").domain, below: ticksOf([0.87, 3.5], 600, () => 30), ticked: [...Plot.plot({width: 640, x: {type: "log", domain: [0.87, 3.5], base: labelsAll, ticks: ticksOf([0.87, 3.5], 600, () => 30), tickFormat: short}, marks: [Plot.ruleX([1])]}).querySelectorAll("[aria-label*=label] text")].map(one => one.textContent), short: [500, 30000, 1200000, -0.25, 0.0005, 0.000015, 0].map(short), aside: [asideOf(["a", "torch_compile"], 100), asideOf(["torch_compile", "a"], 400)], ends: endsOn(charts.decode, marksOf(charts.decode), "x"),
            steps: [level([{x: 2, y: 1}, {x: 1, y: 3}]), level([{x: 2, y: 3}, {x: 1, y: 1}])]};""")
    assert (found["before"], found["after"], found["labels"]) == (["log", "log"], ["linear", "log"], True)
    assert len(found["from"]) == len(DRAWN) and all("n = " in text and text.endswith(".") for text in found["from"])
    assert found["wide"] == [5000, 10000, 20000, 30000, 50000] and found["tall"] == [
        1,
        2,
        5,
        10,
        20,
        50,
        100,
        200,
        500,
        1000,
        2000,
        5000,
    ]
    assert found["fine"][:3] == [1, 1.1, 1.2] and found["none"] is None and found["ends"] == [1, 9]
    assert found["names"] == ["joint", "frozen"], "in their own order"
    assert found["below"][:3] == [0.9, 1, 1.2] and found["ticked"] == [f"{one:g}" for one in found["below"]], (
        "every tick has its label"
    )
    assert found["short"] == ["500", "30k", "1.2M", "-0.25", "0.0005", "1.5e-5", "0"] and found["aside"] == [
        6 * 13 - 25,
        18,
    ]
    assert found["steps"] == [True, False], "level from the left where less is better, up at once where more is"


def test_panels_of_one_scale_end_alike_where_one_is_below_0(ask):
    """Bits lost at a capacity factor had -0.05 to 0.35 in one panel and 0 to 0.3 in the next."""
    found = ask("""const looks = new Map([["a", {light: "#000", dark: "#fff", symbol: "circle"}]]), chart = {kind: "dots", x: {label: "bits", kind: "linear"}, y: {label: "", kind: "names"}, reference: 0, ends: [-0.008, 0.302], marks: {}};
        return [-0.008, 0.2].map(low => panelOf(chart, [{panel: "p", series: "a", x: 0.21, low, high: 0.3, y: "a"}], 400, looks).scale("x").domain);""")
    assert found[0] == found[1] and found[0][0] < -0.007 and found[0][1] > 0.301


def test_a_reference_stands_within_its_panel(ask):
    """That of the floor stood on the names, left of an axis that began at the first mark."""
    found = ask("""const held = charts.decode, first = {...held, reference: 1, shared: true, own: {}, marks: {...held.marks, x: {all: 3}, low: {all: 2.5}, high: {all: 4}}};
        charts.decode = first; drawChart("decode"); const svg = of("decode").querySelector(".panels svg"), [low, high] = svg.scale("x").range, place = svg.scale("x").apply(1); return [low, place, high];""")
    assert found[0] <= found[1] < found[2]


def test_numbers_of_pale_cells_can_be_read(ask):
    """Of a suspect row, in both modes: 4.5:1 on a colour through which the page is seen."""
    found = ask(
        CONTRAST
        + """const rgb = text => { const probe = document.createElement("i"); probe.style.color = text; document.body.append(probe); const got = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number); probe.remove(); return got; };
        const blend = (a, b, by) => `rgb(${[0, 1, 2].map(i => by * rgb(a)[i] + (1 - by) * rgb(b)[i]).join()})`, tints = ["#0173b2", "#992255", "#550000", "#996666", "#767676"], dark = ["#409bdd", "#f87ba6", "#fedad4", "#b07b7b", "#8f8f8f"];
        const looks = new Map(tints.map((light, i) => [`s${i}`, {light, dark: dark[i]}])), chart = {kind: "matrix", x: {label: "", kind: "names"}, y: {label: "", kind: "names"}, reference: null, marks: {}};
        return ["light", "dark"].map(mode => { document.documentElement.style.colorScheme = mode; const svg = panelOf(chart, tints.map((_, i) => ({panel: "p", series: `s${i}`, x: `c${i}`, y: "row", says: "0.5x", doubt: "suspect"})), 700, looks); document.body.append(svg);
            const words = all("[aria-label=text] text", svg), cells = all("[aria-label=cell] rect", svg); return cells.map((one, i) => contrast(`rgb(${rgb(getComputedStyle(words[i]).fill).join()})`, blend(getComputedStyle(one).fill, getComputedStyle(document.body).backgroundColor, Number(one.getAttribute("fill-opacity"))))); });"""
    )
    assert all(len(mode) == 5 and min(mode) >= 4.5 for mode in found), found


def test_a_short_logarithmic_axis_has_labels_all_along(ask):
    """From 81 to 105 s it had 81, 82, 83 and then 95 to 100; in a narrow window 100 alone."""
    found = ask("""const looks = new Map([["a", {light: "#000", dark: "#fff", symbol: "circle"}]]), chart = {kind: "points", x: {label: "s", kind: "log"}, y: {label: "bits", kind: "linear"}, reference: null, marks: {}};
        return [1300, 280].map(room => all("[aria-label='x-axis tick label'] text", panelOf(chart, [80.5, 104].map(x => ({panel: "p", series: "a", x, y: 1.5})), room, looks)).map(one => one.textContent));""")
    wide, narrow = ([float(one) for one in labels] for labels in found)
    assert wide == [*range(81, 101)] and narrow == [90, 100]


def test_series_are_switched_off_and_on(ask):
    """By a button that says so; all of a panel off leaves a line of text; other figures keep theirs."""
    found = ask("""const dots = name => all(".panels [aria-label=dot] path", of(name)).length, buttons = all(".legend button", of("over_tokens")), seen = () => [dots("over_tokens"), dots("crossover"), buttons.map(one => one.getAttribute("aria-pressed")).join()];
        const found = [seen()]; buttons[0].click(); found.push(seen()); buttons[1].click(); found.push(seen(), of("over_tokens").querySelector(".panels").innerText.includes("switched off")); buttons[0].click(); found.push(seen());
        return [...found, buttons.map(one => one.lastChild.textContent)];""")
    assert found == [
        [4, 4, "true,true"],
        [2, 4, "false,true"],
        [0, 4, "false,false"],
        True,
        [2, 4, "true,false"],
        ["triton", "cute"],
    ]


def test_a_mark_says_its_numbers_when_it_is_pointed_at(ask):
    words = ask("""const svg = of("decode").querySelector(".panels svg"), mark = svg.querySelector("[aria-label=dot] path").getBoundingClientRect(), at = {clientX: mark.x + mark.width / 2, clientY: mark.y + mark.height / 2, bubbles: true, pointerType: "mouse"};
        svg.dispatchEvent(new PointerEvent("pointerenter", at)); svg.dispatchEvent(new PointerEvent("pointermove", at));
        return svg.querySelector("[aria-label=tip]").textContent;""")
    assert "cute" in words and "median time (µs): 3 [1, 9]" in words


@pytest.mark.parametrize("width", [1440, 768, 390])
def test_figures_fit_and_are_seen(ask, width):
    """No drawing is wider than the window; colours are those of the page's mode, and text has 4.5:1 in both."""
    found = ask(
        CONTRAST
        + """const wide = document.documentElement.clientWidth, scrolled = document.documentElement.scrollWidth;
        return {poor: poor(), wide, scrolled, out: all(".panels svg").filter(e => e.getBoundingClientRect().right > wide + 1).length, texts: all("svg text").length};""",
        width=width,
    )
    assert found["poor"] == GOOD
    assert found["texts"] > 20 and found["scrolled"] <= found["wide"] and not found["out"]


def test_the_library_is_in_the_page_only_where_something_is_drawn(tmp_path):
    """With nothing fetched; its licences ship beside it, one for every package that the bundle names."""
    render(rows(status="crashed").iloc[:3], dict.fromkeys(FIGURES, tmp_path / "no.svg"), tmp_path / "index.html")
    assert page.LIBRARY.read_text() not in (tmp_path / "index.html").read_text()
    assert (
        not re.search(r"https?://(?!www\.w3\.org/)", page.LIBRARY.read_text())
        and "</script" not in page.LIBRARY.read_text()
    )
    licences = (page.LIBRARY.parent / "LICENSES.txt").read_text()
    assert "@observablehq/plot 0.6.17, ISC" in licences and licences.count("Permission to use, copy, modify") >= 10
