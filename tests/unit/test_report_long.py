"""A table of many rows, of which those in sight are laid out, and the columns that it has, in a real browser."""

from urllib.parse import urlencode

import pytest
from rows import frame, one

from browser import asked
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import row_id

pytestmark = pytest.mark.slow

COUNT = 900  # many times those that are laid out at once
TIMED = {"ci_low_us": 12.3, "ci_high_us": 12.4, "energy_mj": 3.5}
TABLE = frame(
    *(
        one("gate", "cute", cell=f"c{i}", tokens=i + 1, median_us=float(1 + i * 7919 % 20011), **TIMED)
        for i in range(COUNT)
    )
)
IDS = [row_id(record) for record in TABLE.to_dict("records")]
HELP = """const ids = () => [...document.querySelectorAll("#rows tbody tr[id]")].map(line => line.id.slice(4)), names = () => heads.map(head => head.textContent);
    const inSightNow = () => { const box = scroller.getBoundingClientRect(), head = table.tHead.getBoundingClientRect().bottom; return ids().filter(id => { const at = document.querySelector("#row-" + id).getBoundingClientRect(); return at.bottom > head && at.top < box.bottom; }); };
    const go = top => { scroller.scrollTop = top; scrolled(); };"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    render(TABLE, {}, folder / "index.html")
    return folder / "index.html"


@pytest.fixture
def ask(page, tmp_path):
    return lambda script, **options: asked(page, HELP + script, **options)


def test_scrolling_shows_every_row_in_order(ask):
    """A few at a time, without a gap and none twice; the height is that of all, the last is at the end, columns keep their widths."""
    found = ask("""const seen = [], widths = () => heads.map(head => head.offsetWidth).join(), first = widths(), high = scroller.scrollHeight; let most = 0, blank = 0;
        for (let top = 0; top < scroller.scrollHeight; top += scroller.clientHeight - 60) { go(top); most = Math.max(most, ids().length); blank += !inSightNow().length; inSightNow().forEach(id => seen.includes(id) || seen.push(id)); }
        return {seen, most, blank, drift: Math.abs(scroller.scrollHeight - high), end: inSightNow().at(-1), line: lineTall, high};""")
    assert found["seen"] == IDS and found["most"] < 150 and not found["blank"] and found["end"] == IDS[-1]
    assert found["drift"] <= 2 and found["high"] == pytest.approx(COUNT * found["line"], rel=0.01)


def test_an_open_row_keeps_its_place_out_of_sight(ask):
    """Scrolled away and back it is open as before, and what lies below it has moved by its height; the focus of a line in sight stays."""
    found = ask("""const before = scroller.scrollHeight, row = page.ids.indexOf(ids()[5]); open(row, true); const high = opened.get(row).offsetHeight, grown = scroller.scrollHeight - before;
        go(12000); const away = [opened.get(row).isConnected, scroller.scrollHeight - before]; const button = document.querySelector("#row-" + inSightNow()[3] + " .open"); button.focus(); layOut(); const focus = document.activeElement === button;
        go(0); return {high, grown, away, focus, back: opened.get(row).isConnected, after: opened.get(row).previousElementSibling.id === "row-" + page.ids[row]};""")
    assert found["high"] > 50 and found["grown"] == pytest.approx(found["high"], abs=2)
    assert found["away"] == [False, pytest.approx(found["high"], abs=3)]
    assert found["focus"] and found["back"] and found["after"]


def test_sorted_and_filtered_the_first_are_shown(ask):
    order = sorted(range(COUNT), key=lambda place: TABLE["median_us"][place])
    found = ask(
        """go(15000); ask("", "median_us"); const sorted = [inSightNow(), ids().length]; document.querySelector("#filter").value = "tokens>890"; byId("filter").oninput(); return [...sorted, ids().sort()];"""
    )
    assert found[1] < 150 and found[2] == sorted(IDS[890:])
    assert found[0] == [IDS[place] for place in order[: len(found[0])]] and len(found[0]) > 10


def test_columns_are_chosen(ask):
    """Off by a box and on again; any field can be one more, sorts like the others, and the address keeps all of it."""
    found = ask("""const box = name => document.querySelector(`#ticks [value="${name}"]`), first = names(), cells = () => [...document.querySelector("#rows tbody tr[id]").cells].map(cell => cell.textContent);
        open(0, true); box("model").click(); const without = names(), hash = location.hash, span = opened.get(0).cells[0].colSpan; box("model").click(); const again = names(); const more = byId("more-columns"); more.value = "energy_mj"; more.dispatchEvent(new Event("change"));
        const added = names(), cell = cells().at(-1), classes = heads.at(-1).className; heads.at(-1).querySelector("button").click(); const sorted = [heads.at(-1).getAttribute("aria-sort"), location.hash];
        byId("usual").click(); return {first, without, hash, span, again, added, cell, classes, sorted, last: [names(), location.hash, byId("usual").hidden, table.classList.contains("chosen")]};""")
    first = found["first"]
    assert found["without"] == [name for name in first if name != "model"] and found["span"] == len(first) - 1
    assert "columns=tokens%2Ctrace%2C" in found["hash"] and found["again"] == first
    assert found["added"] == [*first, "energy_mj"] and (found["cell"], found["classes"]) == ("3.5", "n")
    assert (
        found["sorted"][0] == "ascending"
        and "sort=energy_mj" in found["sorted"][1]
        and "energy_mj" in found["sorted"][1]
    )
    assert found["last"][0] == first and "columns" not in found["last"][1] and found["last"][2:] == [True, False]


def test_the_address_names_the_columns(ask):
    part = "rows?" + urlencode({"filter": "tokens<3", "sort": "-energy_mj", "columns": "median_us,energy_mj,toknes"})
    found = ask(
        'return [names(), ids(), byId("problem").textContent, document.querySelector("[aria-sort=descending]").textContent, [...document.querySelectorAll("#ticks :checked")].map(box => box.value)]',
        part=part,
    )
    assert found[0] == ["bench", "implementation", "median_us", "energy_mj"] and sorted(found[1]) == sorted(IDS[:2])
    assert found[2:] == ["No column is called toknes.", "energy_mj", ["median_us", "energy_mj"]]
