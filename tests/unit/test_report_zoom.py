"""Zoom in the figures of the page, and the pictures where they cannot be drawn, in a real browser."""

import re

import pytest
from rows import by_tokens

from browser import asked, opened
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

TABLE = by_tokens()
HELP = """Object.keys(charts).forEach(drawChart);
    const box = name => document.querySelector(`#chart-${name} .panels > div`), svg = name => box(name).querySelector("svg"), domain = (name, axis) => svg(name).scale(axis).domain;
    const at = (name, x, y) => { const m = svg(name).getScreenCTM(); return {clientX: m.a * x + m.e, clientY: m.d * y + m.f, bubbles: true, pointerType: "mouse"}; };
    const drag = (name, from, to) => { const on = svg(name); on.dispatchEvent(new PointerEvent("pointerdown", at(name, ...from))); on.dispatchEvent(new PointerEvent("pointermove", at(name, ...to)));
        const seen = on.querySelectorAll(".dragged").length; on.dispatchEvent(new PointerEvent("pointerup", at(name, ...to))); return seen; };
    const press = (name, key) => box(name).dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    const dots = name => svg(name).querySelectorAll("[aria-label=dot] path").length, reset = name => box(name).querySelector("h4 button");"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = (folder := tmp_path_factory.mktemp("page")) / "index.html"
    render(TABLE, {name: folder / f"{name}.svg" for name in FIGURES}, out)
    return out


@pytest.fixture
def ask(page):
    return lambda script, **options: asked(page, HELP + script, **options)


def test_a_drag_zooms_to_what_it_covers(ask):
    """Both scales of a line chart, clipped to the frame; one alone where the drag is flat; all again by a button. Other figures stay."""
    found = ask("""const name = "over_tokens", [x0, x1] = svg(name).scale("x").range, before = [domain(name, "x"), domain(name, "y"), domain("decode", "x")], middle = (x0 + x1) / 2;
        const wanted = svg(name).scale("x").invert(middle), seen = drag(name, [middle, 40], [x1 + 50, 120]), both = [domain(name, "x"), domain(name, "y")];
        const clipped = svg(name).querySelector("[aria-label=line]").hasAttribute("clip-path"), other = domain("decode", "x"); reset(name).click();
        const after = [domain(name, "x"), domain(name, "y"), reset(name)]; drag(name, [x0, 100], [middle, 103]);
        return {before, wanted, seen, both, clipped, other, after, flat: [domain(name, "x"), domain(name, "y")]};""")
    x, y, decode = found["before"]
    assert found["seen"] == 1 and found["clipped"] and found["other"] == decode
    assert (
        found["both"][0] == pytest.approx([found["wanted"], x[1]])
        and y[0] < found["both"][1][0] < found["both"][1][1] < y[1]
    )
    assert found["after"] == [x, y, None]
    assert found["flat"][0] == pytest.approx([x[0], found["wanted"]]) and found["flat"][1] == pytest.approx(y)


def test_keys_zoom_and_move_the_panel_that_has_the_focus(ask):
    """On logarithmic and linear scales; out as far as in shows all again; the focus stays, and other keys are left to the browser."""
    found = ask("""const name = "over_tokens", x = () => domain(name, "x"), seen = [x()], held = box(name); held.focus();
        press(name, "+"); seen.push(x()); press(name, "ArrowRight"); seen.push(x()); press(name, "ArrowLeft"); press(name, "-"); seen.push(x());
        const left = reset(name); press(name, "+"); press(name, "q"); press(name, "0"); seen.push(x());
        return [seen, left, document.activeElement === held, held.tabIndex, held.getAttribute("aria-label")];""")
    (all_, nearer, right, out, again), left, focused, stop, label = found
    assert all_[0] < nearer[0] < nearer[1] < all_[1] and right[0] > nearer[0] and right[1] > nearer[1]
    assert out == again == all_ and left is None and focused and stop == 0 and "+ and - zoom" in label


def test_names_do_not_zoom_and_a_press_is_a_click(ask):
    """A drag on a chart of names zooms its scale of numbers alone; a matrix has none; a press without a drag changes nothing."""
    found = ask("""const [x0, x1] = svg("decode").scale("x").range, names = dots("decode"), y = domain("decode", "y"); drag("decode", [x0, 20], [(x0 + x1) / 2, 60]);
        const half = domain("decode", "x")[1]; const before = domain("over_tokens", "x"), pressed = drag("over_tokens", [200, 100], [203, 101]);
        return [dots("decode") === names, y, domain("decode", "y"), half, pressed, before, domain("over_tokens", "x"), box("verdict_matrix").tabIndex];""")
    same, y, after, half, pressed, before, unchanged, stop = found
    assert same and y == after and half < 192 and (pressed, before, stop) == (0, unchanged, -1)


def test_a_zoomed_panel_stays_when_series_are_switched(ask):
    found = ask("""press("over_tokens", "+"); const view = domain("over_tokens", "x"); document.querySelector("#chart-over_tokens .legend button").click();
        return [view, domain("over_tokens", "x"), dots("over_tokens")];""")
    assert found[0] == pytest.approx(found[1]) and found[2] == 3


def test_pictures_stand_in_where_the_page_cannot_draw(page):
    """Without scripts, and where the library fails: the file beside the page, with its title and caption as text."""
    wanted = re.findall(r'<noscript>.*?src="figures/(\w+)\.svg" alt="([^"]+)"', page.read_text())
    assert ("over_tokens", f"{FIGURES['over_tokens'].title}. {FIGURES['over_tokens'].caption}") in wanted
    assert len(wanted) == page.read_text().count('<div class="chart"')
    broken = page.with_name("broken.html")
    data = '<script type="text/plain" id="data"'
    fails = page.read_text().replace(data, f"<script>Plot = {{}}</script>{data}")
    broken.write_text(f"{fails}<script>unpacked.then(() => Object.keys(charts).forEach(drawChart))</script>")
    document, console = opened(broken)
    drawn = re.findall(r'id="chart-(\w+)"><div class="scroll whole picture".*?<img src="figures/(\w+)\.svg"', document)
    assert drawn and all(one == other for one, other in drawn) and any("is not a function" in line for line in console)


def test_pictures_are_explained_only_where_there_is_one(page, tmp_path):
    """One cell leaves nothing to choose from: a finding without a picture has no note on pictures."""
    assert 'id="pictured"' in page.read_text()
    alone = tmp_path / "alone.html"
    render(TABLE.iloc[:1].assign(best_verdict="faster"), {}, alone)
    assert 'id="findings"' in alone.read_text() and 'id="pictured"' not in alone.read_text()
