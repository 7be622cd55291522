"""The report as data: strict JSON, from which alone its page is rendered, with the rule that made each sentence."""

import dataclasses
import importlib
import json

import pytest
from rows import BAD, rows, some

from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report import document, page
from moe_routing_bench.report.packing import unpacked
from moe_routing_bench.report.render import render
from moe_routing_kernels.errors import UserError

TABLE = some(rows())
HOSTILE = '</script><script>alert(1)</script>"\u2028'


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report of most kinds of rows: its page and its data."""
    out = tmp_path_factory.mktemp("report") / "index.html"
    render(TABLE, FIGURES, out)
    return out, out.with_name(document.NAME)


def strict(text):
    """JSON without what only Python reads."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.slow
def test_the_page_is_rendered_from_the_data_alone(written, tmp_path):
    """By another process with nothing but the file; a second run gives equal files."""
    out, data = written
    again = tmp_path / "again/index.html"
    page.write_report(document.parsed(data.read_text()), again)
    assert again.read_bytes() == out.read_bytes()
    render(TABLE, FIGURES, tmp_path / out.parent.name / "index.html")
    assert (tmp_path / out.parent.name / document.NAME).read_bytes() == data.read_bytes()


def test_the_data_is_strict_and_small(written):
    """Numbers that JSON has, a version, and at most three times the bytes of the page, which holds the rows compressed."""
    out, data = written
    held = strict(data.read_text())
    assert held["version"] == document.VERSION and data.stat().st_size < 3 * out.stat().st_size
    with pytest.raises(ValueError, match="JSON compliant"):
        document.dumped(dataclasses.replace(document.parsed(data.read_text()), rows={"a": float("nan")}))


def test_each_sentence_names_the_rule_that_made_it(written):
    """A function of this package that can be called."""
    held = strict(written[1].read_text())
    said = [held["scope"], held["unfound"], *held["headlines"], *held["findings"], *held["answers"]]
    assert len(said) > 20
    for one in said:
        module, _, name = one["rule"].partition(".")
        assert callable(getattr(importlib.import_module(f"moe_routing_bench.report.{module}"), name)), one["text"]


def test_rows_are_data(written):
    """Columns unpack to the values of the table, to five digits."""
    held = strict(written[1].read_text())["rows"]
    found = {name: unpacked(name, held["values"], len(TABLE)) for name in held["values"]}
    assert found["implementation"] == list(TABLE["implementation"])
    medians = [None if time != time else time for time in TABLE["median_us"].astype(float)]
    assert found["median_us"] == [time and pytest.approx(time, rel=1e-4) for time in medians]
    low = zip(found["ci_low_us"], TABLE["ci_low_us"], found["median_us"], strict=True)
    assert all(one == pytest.approx(other, abs=1e-4 * median) for one, other, median in low if one is not None)


def test_hostile_texts_are_text_everywhere(tmp_path):
    """In names, reasons and units of a file that others wrote: no page runs them."""
    render(TABLE.assign(reason=HOSTILE, cpu_model=HOSTILE).iloc[:40], FIGURES, tmp_path / "index.html")
    held = document.parsed((tmp_path / document.NAME).read_text())
    dots = [document.Dot(HOSTILE, 1.0, 0.5, 2.0), document.Dot(BAD, 2.0, 1.0, 3.0)]
    sentence = document.Sentence(HOSTILE, HOSTILE, document.Picture(dots, HOSTILE, HOSTILE), HOSTILE)
    changed = dataclasses.replace(held, title=HOSTILE, headlines=[sentence], findings=[sentence], scope=sentence)
    page.write_report(changed, tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "alert(1)</script>" not in text and "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 99}, "version 99"),
        ({"findings": [{"link": "x"}]}, "findings.0.text"),
        ({"machine": None}, "machine"),
    ],
)
def test_a_file_of_another_shape_is_refused_in_a_line(written, change, says):
    """With the part that is wrong."""
    with pytest.raises(UserError, match=says) as found:
        document.parsed(json.dumps(strict(written[1].read_text()) | change))
    assert "\n" not in str(found.value)
    with pytest.raises(UserError, match="no JSON"):
        document.parsed("<html>")
