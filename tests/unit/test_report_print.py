"""The report on paper, as Chromium prints it to PDF: every row and figure, nothing cut off or shrunk, no controls."""

import pytest
from rows import frame, one

from browser import asked, chromium, loaded
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.render import render
from printed import printed

pytestmark = pytest.mark.slow

TIMED = {
    "model": "qwen3-30b-a3b",
    "hidden": 2048,
    "experts": 128,
    "top_k": 8,
    "ci_low_us": 1.0,
    "ci_high_us": 9999.0,
    "best_verdict": "faster",
    "best_other": "torch_compile",
    "best_speedup": 1.5,
    "best_speedup_ci_low": 1.4,
    "best_speedup_ci_high": 1.6,
    "share_of_roofline": 0.75,
    "gpu_uuid": "GPU-1",
}
REASON = "the copy ceiling drifted by 3.1 % from before to after the samples of this process, more than the 2 % allowed"
POINT = 0.75  # a CSS pixel in points, on a page that is not shrunk


def table(count):
    return frame(
        *(
            one(
                "routing",
                "cute",
                cell=f"c{i}",
                tokens=5000 + i,
                median_us=20.0 + i,
                suspect=True,
                suspect_reason=REASON,
                **TIMED,
            )
            for i in range(count)
        ),
        one("gate", "torch", status="crashed", reason=REASON),
    )


@pytest.fixture
def pages(tmp_path):
    render(table(200), {name: tmp_path / f"{name}.svg" for name in FIGURES}, tmp_path / "index.html")
    return printed(tmp_path / "index.html", tmp_path)


def test_paper_has_everything_and_no_controls(pages):
    """All rows of a table of which the browser held a few, with their reasons; figures that were never in sight; on A4, at full size."""
    text = "".join(one.text for one in pages)
    assert not [i for i in range(5000, 5200) if str(i) not in text]
    assert text.replace(" ", "").count(REASON.replace(" ", "")[-40:]) >= 200
    assert "tokens →" in text, "the axis of a figure that the page draws"
    assert not {
        word
        for word in (
            "Hover over",
            "What a filter can say",
            "download these rows",
            "any field of a row",
            "⇄",
            "▸",
            "usual columns",
            "Skip to",
        )
        if word in text
    }
    for page in pages:
        assert page.width == pytest.approx(842, abs=1) and page.scale == pytest.approx(POINT, rel=0.01)
        assert not page.cut and max(page.left, default=0) < page.width - 20


def test_on_paper_headings_and_numbers_are_whole(tmp_path):
    """Each on one line, in a table as wide as the paper; reasons take the lines that this costs."""
    render(table(3), {}, tmp_path / "index.html")
    with loaded(tmp_path / "index.html", width=1032) as page:
        chromium().ask("Emulation.setEmulatedMedia", page.session, media="print")
        lines, numbers, wide, reasons = (
            page.value("""(() => { const every = selector => [...document.querySelectorAll(selector)].filter(one => one.checkVisibility()), linesOf = one => { const range = document.createRange(); range.selectNodeContents(one.querySelector("button") ?? one); return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size; };
            return [every("#rows th").map(linesOf), every("#rows td.n").map(linesOf), document.getElementById("rows").offsetWidth <= innerWidth, Math.max(...every("#rows td").map(linesOf))]; })()""")
        )
    assert wide and set(lines) == {1} == set(numbers) and reasons > 1


def test_of_very_many_rows_paper_has_the_first_and_says_so(tmp_path):
    """2,000 of them, here 200 of a page that is allowed no more: more would be hundreds of pages. Afterwards the page has those in sight again."""
    page = tmp_path / "index.html"
    render(table(210), {}, page)
    text, most = page.read_text(), "onPaper = 2000,"
    assert most in text
    page.write_text(text.replace(most, "onPaper = 200,"))
    script = """const lines = () => document.querySelectorAll("#rows tbody tr[id]").length, found = [];
        for (const name of ["beforeprint", "afterprint"]) { dispatchEvent(new Event(name)); found.push(lines()); }
        return [...found, byId("paper").textContent];"""
    before, after, said = asked(page, script)
    assert before == 200 and after < 150 and said == "The first 200 of these 211 rows."
