"""The page by keyboard alone, with keys that Chromium itself takes for pressed: from the question to its answer, from the filter to a row."""

import pytest
from test_report_ask import IDS, MODELS, TABLE

from browser import chromium, loaded
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "g": (71, "g")}
MOST = 120  # stops of the Tab key until something is reached


@pytest.fixture
def page(tmp_path):
    render(TABLE, {}, tmp_path / "index.html", models=MODELS)
    with loaded(tmp_path / "index.html") as found:
        yield found


def press(page, key, times=1):
    code, text = KEYS[key]
    for _ in range(times):
        for kind in ("keyDown", "keyUp"):
            written = {"text": text} if text and kind == "keyDown" else {}
            chromium().ask(
                "Input.dispatchKeyEvent",
                page.session,
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **written,
            )


def write(page, text):
    chromium().ask("Input.insertText", page.session, text=text)


def tab_to(page, selector):
    """Press Tab until the element that has the focus is such a one; what had it on the way."""
    seen = []
    for _ in range(MOST):
        press(page, "Tab")
        if page.value(f"document.activeElement.matches({selector!r})"):
            return seen
        seen.append(page.value("document.activeElement.outerHTML.slice(0, 60)"))
    raise AssertionError(f"no {selector} among {seen}")


def test_a_question_is_asked_and_its_row_opened(page):
    """Skip link, stage, number of tokens, then Enter on the first implementation: its row is open and has the focus."""
    tab_to(page, ".skip")
    press(page, "Enter")
    assert not any("<nav" in one or "#versions" in one for one in tab_to(page, "#question [name=bench]"))
    press(page, "g")
    assert page.value("document.activeElement.value") == "gate"
    tab_to(page, "#question [name=tokens]")
    page.value("document.activeElement.select()")
    write(page, "512")
    assert page.value("document.querySelector('#said').innerText").startswith("cute is the fastest")
    tab_to(page, "#shown td a")
    press(page, "Enter")
    page.value("new Promise(done => setTimeout(done, 50))")
    opened = page.value(
        "[location.hash, document.querySelector('tr.detail').previousElementSibling.id, document.activeElement.className]"
    )
    assert opened == [f"#row-{IDS[2]}", f"row-{IDS[2]}", "open"] and not page.console()


def test_rows_are_filtered_sorted_and_opened(page):
    """A filter that is written, Enter on a heading and on a row's mark; then two rows are compared."""
    page.value("document.querySelector('#filter').focus()")
    write(page, "bench:gate status:ok")
    assert page.value("document.querySelector('#count').textContent") == "5 of 11 rows"
    tab_to(page, "th:nth-child(6) button")
    press(page, "Enter")
    assert page.value("document.querySelector('[aria-sort=ascending]').textContent") == "median_us"
    tab_to(page, "#rows .open")
    press(page, "Enter")
    assert page.value("document.activeElement.getAttribute('aria-expanded')") == "true"
    for _ in range(2):
        tab_to(page, "#rows .choose")
        press(page, "Enter")
    assert page.value("document.querySelector('#compared h3').textContent") == "Two rows" and not page.console()
