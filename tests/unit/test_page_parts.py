"""Parts of a page in a real browser: what one of them throws is told at its place, and the others work."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rows import by_tokens

from browser import loaded
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.packing import compressed
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

TABLE = by_tokens()
FAILED = "This part of the page failed: "
STATE = """(() => { Object.keys(charts).forEach(drawChart); return {said: byId("said").innerText, problem: byId("problem").innerText, shown: byId("shown").innerText,
    boxes: document.querySelectorAll(".chart").length, drawn: document.querySelectorAll(".chart svg[aria-label$=marks]").length, pictures: document.querySelectorAll(".chart img").length,
    figures: document.querySelector(".chart")?.innerText, rows: document.querySelectorAll("#rows tbody tr[id]").length}; })()"""


def planted(page: Path, fault: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a page with a fault in the data that its scripts read."""
    text = page.read_text()
    (packed,) = re.findall(r'<script type="text/plain" id="data">([^<]+)</script>', text)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    fault(data)
    out = page.with_name(f"planted-{len(list(page.parent.iterdir()))}.html")
    out.write_text(text.replace(packed, compressed(data)))
    return out


def state(page: Path) -> tuple[dict[str, Any], str]:
    """What each part of a page shows, and what the page wrote to the console."""
    with loaded(page) as shown:
        return shown.value(STATE), "\n".join(shown.console())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = (folder := tmp_path_factory.mktemp("page")) / "index.html"
    render(TABLE, {name: folder / f"{name}.svg" for name in FIGURES}, out)
    return out


@pytest.mark.parametrize(
    "fault",
    [lambda data: data.update(questions=None), lambda data: data["questions"].update(axes=None)],
    ids=["before its form", "in its form"],
)
def test_figures_and_rows_are_there_whatever_ask_does(fault: Callable, page: Path) -> None:
    whole, silent = state(page)
    assert not silent and whole["drawn"] >= whole["boxes"] > 3 and whole["rows"] == len(TABLE)
    found, console = state(planted(page, fault))
    assert found["said"].startswith(f"{FAILED}TypeError: ") and "TypeError" in console and not found["shown"]
    assert found | {"said": "", "shown": ""} == whole | {"said": "", "shown": ""}


def test_ask_and_figures_are_there_whatever_the_table_does(page: Path) -> None:
    whole, _ = state(page)
    found, console = state(planted(page, lambda data: data.update(aliases=None)))
    assert found["problem"].startswith(f"{FAILED}TypeError: ") and "TypeError" in console and not found["rows"]
    assert found | {"problem": "", "rows": 0} == whole | {"problem": "", "rows": 0}


def test_a_figure_that_fails_says_so_and_the_others_are_drawn(page: Path) -> None:
    """Its picture stands in; the line below it has the reason."""
    whole, _ = state(page)

    def fault(data: dict[str, Any]) -> None:
        first = next(iter(data["charts"].values()))
        first["legend"] = None

    found, console = state(planted(page, fault))
    assert found["pictures"] == 1 and found["boxes"] == whole["boxes"] and "TypeError" in console
    assert FAILED in found["figures"] and 0 < found["drawn"] < whole["drawn"]
    assert (found["said"], found["shown"], found["rows"]) == (whole["said"], whole["shown"], whole["rows"])


def test_an_answer_that_fails_does_not_leave_the_one_before(page: Path) -> None:
    """Nor does it keep the next question from being answered."""
    script = """(() => { const whole = byId("shown").innerText, held = nearest, ask = tokens => { const box = controls.get("tokens"); box.value = tokens; box.dispatchEvent(new Event("input", {bubbles: true})); return [byId("said").innerText, byId("shown").innerText]; };
        nearest = () => { throw new Error("planted"); }; const failed = ask("512"); nearest = held; return {whole, failed, after: ask("64")}; })()"""
    with loaded(page) as shown:
        found = shown.value(script)
        assert any("planted" in line for line in shown.console())
    assert found["failed"] == [f"{FAILED}Error: planted. The other parts do not need it.", ""]
    assert found["whole"] and FAILED not in found["after"][0] and "T=64" in found["after"][1]
