"""Sentences of the pages of changes, histories and seeds that stand there under a condition: said on hand-made rows, and silent otherwise."""

import html
import math
import re

import pandas as pd
import pytest

from moe_routing_bench.comparison.runs import Comparison, History, Then
from moe_routing_bench.report import page, run_pages
from moe_routing_bench.report.parts import Group, Table
from moe_routing_bench.report.seeds import section


@pytest.fixture
def said(tmp_path):
    """What a page says, without its style, in one line; and its table as texts."""

    def read(name: str = "page.html") -> tuple[str, list[list[str]]]:
        text = (tmp_path / name).read_text().partition("</style>")[2]
        rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
        plain = [[_plain(one) for one in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)] for row in rows]
        return _plain(text), plain

    return read


def _plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


ROW = {
    "bench": "gate",
    "cell": "T64",
    "implementation": "cute",
    "before_us": 20.0,
    "after_us": 10.0,
    "ratio": 2.0,
    "ratio_ci_low": 1.9,
    "ratio_ci_high": 2.1,
    "verdict": "faster",
    "reason": None,
}


def compared(tmp_path, *rows: dict, marks=(), across: bool = False) -> None:
    found = Comparison(pd.DataFrame([ROW | row for row in rows]), list(marks), across)
    run_pages.write_changes(found, ("old", "new"), tmp_path / "page.html")


def test_changes_say_what_differs_besides_the_code_where_something_does(tmp_path, said):
    compared(tmp_path, {}, marks=["driver: 1 before, 2 after", "torch_version: <3> before, 4 after"])
    text, _ = said()
    assert (
        "The runs differ in more than the code: driver: 1 before, 2 after torch_version: <3> before, 4 after Rows by verdict: 1 faster."
        in text
    )
    compared(tmp_path, {})
    assert "differ in more" not in said()[0] and 'id="marks"' not in (tmp_path / "page.html").read_text()


def test_changes_are_written_as_the_report_writes_them(tmp_path, said):
    """Times in whole µs, never with an exponent; ratios with as many digits as tell their ends apart; what is told to have changed before what is not."""
    compared(
        tmp_path,
        {"implementation": "untold", "ratio": 3.0, "verdict": "undecided"},
        {
            "implementation": "gone",
            "after_us": None,
            "ratio": None,
            "ratio_ci_low": None,
            "ratio_ci_high": None,
            "verdict": "only before",
        },
        {"before_us": 12061.4, "after_us": 11260.0, "ratio": 1.0815, "ratio_ci_low": 1.0808, "ratio_ci_high": 1.0822},
    )
    text, _ = said()
    assert "cute faster 1.081x [1.081, 1.082] 12,061 µs 11,260 µs gate T64 untold undecided" in text
    assert text.endswith("gone only before – 20.00 µs – gate T64") and "e+" not in text


def test_changes_between_kinds_of_devices_are_not_held_against_a_drift(tmp_path, said):
    drift, kinds = (
        "and the drift of the device's ceilings",
        "The devices are of two kinds: the difference of their ceilings is part of what is compared.",
    )
    compared(tmp_path, {}, across=False)
    assert drift in said()[0] and kinds not in said()[0]
    compared(tmp_path, {}, across=True)
    assert drift not in said()[0] and kinds in said()[0]


def test_each_change_has_its_times_in_the_order_of_the_heading(tmp_path, said):
    """With its interval, where there is one; the reason behind a verdict; a dash for what is missing. What changed most comes first."""
    lost = {
        "after_us": None,
        "ratio": None,
        "ratio_ci_low": None,
        "ratio_ci_high": None,
        "verdict": "no longer ok",
        "reason": "crashed",
        "cell": "T1",
    }
    short = {
        "ratio": 1.5,
        "after_us": 13.33,
        "ratio_ci_low": None,
        "ratio_ci_high": None,
        "verdict": "undecided",
        "cell": "T2",
    }
    compared(tmp_path, {}, lost, short)
    text, (heading, *rows) = said()
    assert heading == ["implementation", "verdict", "before / after", "before", "after", "bench", "cell"]
    assert ["cute", "faster", "2.00x [1.90, 2.10]", "20.00 µs", "10.00 µs", "gate", "T64"] in rows
    assert ["cute", "no longer ok: crashed", "–", "20.00 µs", "–", "gate", "T1"] in rows
    assert ["cute", "undecided", "1.50x", "20.00 µs", "13.33 µs", "gate", "T2"] in rows
    assert (
        "before ( old ) and after ( new )".replace("( ", "(").replace(" )", ")") in text
        and "above 1, new is faster" in text
    )
    assert all(one in text for one in ("1 faster", "1 no longer ok", "1 undecided"))


def then(run: str, ratio: float, verdict: str, width: float = 0.01) -> Then:
    return Then(run, 10 * ratio, ratio, ratio - width, ratio + width, verdict)


def over(tmp_path, *rows: tuple[Then, ...]) -> str:
    found = [History("gate", f"T{i}", "cute", 10.0, one) for i, one in enumerate(rows)]
    run_pages.write_history(found, ["first", "second"], "last", tmp_path / "page.html")
    return (tmp_path / "page.html").read_text()


HOLLOW = "In the pictures, hollow: no change is told."


def test_a_history_has_a_column_per_run_and_a_dash_where_a_run_has_no_time(tmp_path, said):
    over(tmp_path, (then("second", 1.2, "faster"),), (then("first", 1.0, "same"), then("second", 2.0, "faster")))
    text, (heading, *rows) = said()
    assert heading == ["bench", "implementation", "cell", "now", "times as fast now", "first", "second"]
    assert [row[2] for row in rows] == ["T1", "T0"], "the largest change first"
    assert [row[3] for row in rows] == ["10 µs", "10 µs"]
    assert rows[1][5:] == ["–", "12 µs; 1.20x [1.19, 1.21], faster"]
    assert rows[0][5:] == ["10 µs; 1.00x [0.990, 1.01], same", "20 µs; 2.00x [1.99, 2.01], faster"]
    assert "2 of 2 rows changed since some run." in text
    assert "in first, second (earlier) and last (now)" in text


def test_a_history_without_an_interval_claims_none(tmp_path, said):
    over(tmp_path, (Then("first", 12.0, 1.2, math.nan, math.nan, "undecided"),))
    assert said()[1][1][5] == "12 µs; 1.20x, undecided" and "nan" not in said()[0]


def test_what_is_not_told_apart_is_no_change_and_hollow(tmp_path, said):
    """Same and undecided alike; and nothing is said of pictures where there is none: one time alone is no picture."""
    drawn = over(tmp_path, (then("first", 1.5, "undecided"), then("second", 1.3, "same")))
    assert "0 of 1 rows changed" in said()[0] and HOLLOW in said()[0]
    assert drawn.count('<g class="hollow">') == 2 and 'class="chosen"' not in drawn
    drawn = over(tmp_path, (then("first", 1.5, "faster"), then("second", 1.001, "same")))
    assert drawn.count('<g class="chosen">') == drawn.count('<g class="hollow">') == 1
    assert "1 of 1 rows changed" in said()[0]
    drawn = over(tmp_path, (then("first", 1.5, "faster"),))
    assert "<svg" not in drawn and HOLLOW not in said()[0]


SEED = {
    "number": "000",
    "about": "A log. Published on a card: here, by them.",
    "remarks": ["Inside their times: `all`."],
}
PAIR = (Group("theirs", ("ms",)), Group("measured (NVIDIA H200)", ("us", "why")))


def seeds(tmp_path, **change: object) -> str:
    page.write(
        "seeds.html.j2",
        tmp_path / "page.html",
        report={"seed": SEED | {"tables": [Table("One", PAIR, [["1", "2", "of"]])]} | change},
    )
    return " ".join((tmp_path / "page.html").read_text().split())


def test_a_seed_has_its_remarks_and_notes_only_where_there_are_some(tmp_path):
    noted = Table("Two", PAIR, [["3", "4", "in"]], "Read `so`.")
    text = seeds(tmp_path, tables=[noted, Table("Three", PAIR)])
    assert text.count("<p>") == 3 and "<p>Read so.</p>" in text and "<p>Inside their times: all.</p>" in text
    assert text.index("Two</caption>") < text.index("Read so.") < text.index("Three</caption>")
    assert seeds(tmp_path).count("<p>") == 2 and seeds(tmp_path, remarks=[]).count("<p>") == 1


def test_theirs_stand_on_the_left_and_ours_on_the_right(tmp_path):
    text = seeds(tmp_path)
    assert "The figures on the left of a table are theirs, and those on the right are of this run" in text
    assert re.findall(r'<th scope="colgroup" colspan="(\d)">(.*?)</th>', text) == [
        ("1", "theirs"),
        ("2", "measured (NVIDIA H200)"),
    ]
    assert re.findall(r'<th class="(\w*)">(.*?)</th>', text) == [("n", "ms"), ("n", "us"), ("", "why")]
    assert re.findall(r'<td class="(\w*)">(.*?)</td>', text) == [("n", "1"), ("n", "2"), ("", "of")]


def test_a_source_is_quoted_with_what_it_says_and_no_more(monkeypatch):
    """Its boundary, sizes and notes, in this order; of which a source may have none."""
    source = {"what": "a log", "hardware": "a card", "source": "a page", "who": "them"}
    monkeypatch.setattr(section, "_tables", lambda *_: [])
    monkeypatch.setattr(
        section.seeds,
        "sources",
        lambda: {"000": source, "003_models": source | {"notes": "noted.", "boundary": "all"}},
    )
    bare, full = section.section(pd.DataFrame(), "seed-000"), section.section(pd.DataFrame(), "seed-003-models")
    assert (bare.number, bare.about, bare.remarks) == (
        "000",
        "A log. Published on a card: a page, by them.",
        [],
    )
    assert (full.number, full.remarks) == ("003", ["Inside their times: all.", "Noted."])
    assert section.section(pd.DataFrame(), "seed-999") is None and section.section(pd.DataFrame(), "000") is None
