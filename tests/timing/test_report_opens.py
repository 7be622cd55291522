"""How long a page of very many rows takes to open."""

from pathlib import Path

import pytest

from browser import asked, loaded
from many_rows import FULL, MANY, many
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report import row_data
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

ALLOWED = 5_000_000  # bytes of a full page
EMPTY = 480_000  # bytes of a page without rows


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With as few samples of a row as a full page has."""
    monkeypatch.setattr(row_data, "ALTOGETHER", row_data.ALTOGETHER * MANY // FULL)
    drawn = {name: tmp_path / f"{name}.svg" for name, figure in FIGURES.items() if figure.source == "measurements"}
    render(many(), drawn, tmp_path / "index.html")
    return tmp_path / "index.html"


def test_a_page_of_many_rows_has_few_bytes_and_opens_at_once(page: Path) -> None:
    """All its figures, numbers and 30 samples of each row. Opened: the rows are unpacked, the question is answered and the table is laid out."""
    assert page.stat().st_size < EMPTY + (ALLOWED - EMPTY) * MANY // FULL
    asked(page, "return 0")  # the browser has started
    with loaded(page) as shown:
        count, answered, lines, seconds = shown.value(
            '[page.ids.length, byId("said").textContent.length, document.querySelectorAll("#rows tbody tr[id]").length, performance.getEntriesByName("opened")[0].startTime / 1000]'
        )
        assert not shown.console()
    assert (count, lines < 150) == (MANY, True) and answered > 30 and lines > 10
    assert seconds < 3, "0.4 s of an idle machine"
