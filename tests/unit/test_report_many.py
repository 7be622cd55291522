"""A report of very many rows: its columns hold what they were given, and of samples and dots it keeps fewer."""

import base64
import gzip
import json
import re

import numpy as np
import pandas as pd
import pytest
from rows import frame, one

from browser import asked, loaded
from many_rows import FULL, many
from moe_routing_bench.report import page
from moe_routing_bench.report import row_data as report_samples
from moe_routing_bench.report.document import Dot
from moe_routing_bench.report.packing import compressed, pieces, written
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import ALTOGETHER, LEAST, MOST, page_data, samples

pytestmark = pytest.mark.slow

MAPS = ("stage_us", "stage_timer", "configuration")


def test_columns_come_back(tmp_path):
    """Every field of every row as the page's scripts read it is what was stored, to five digits (of its median or ratio, where it is an end of an interval) and whole seconds."""
    table = many().sample(150, random_state=1)
    extremes = [
        {"median_us": 9.9996, "ci_low_us": 0.99994, "ci_high_us": 10.0004},
        {"median_us": 1e-7, "min_us": 9e-8, "max_us": 123456.789},
        {"median_us": 1000.0, "p95_us": 100.0},
        {"ci_low_us": 2.0},
    ]
    table = pd.concat(
        [
            table,
            frame(
                *(one("gate", "cute", cell=f"e{i}", **{"median_us": None} | times) for i, times in enumerate(extremes))
            ),
        ],
        ignore_index=True,
    )
    render(table, {}, tmp_path / "index.html")
    bases = {name: column.value.get("near", name) for name, column in page_data(table)["values"].items()}
    names = [name for name in bases if name not in (*MAPS, "check_nonce")]
    found = asked(
        tmp_path / "index.html",
        f"return Object.fromEntries({names}.map(name => [name, page.ids.map((_, row) => value(row, name))]))",
    )
    for name in names:
        for got, stored, base in zip(found[name], table[name], table[bases[name]], strict=True):
            if pd.isna(stored):
                assert got is None, name
            elif isinstance(stored, float):
                least = 5.1e-5 * np.nanmax([abs(stored), abs(base)])
                assert got == pytest.approx(stored, abs=least), name
            elif name.endswith("ed_at"):
                assert pd.Timestamp(got) == pd.Timestamp(stored).floor("s")
            else:
                assert got == stored, name


def test_equal_rows_give_equal_bytes():
    value = {"text": "µs <", "numbers": [1, None, 2.5]}
    text = compressed(value)
    assert text == compressed(value) and re.fullmatch("[A-Za-z0-9+/]+=*", text)
    assert json.loads(gzip.decompress(base64.b64decode(text))) == value


def test_what_is_written_already_is_copied():
    value = {"a µ": [1, None], "b": {"c": 2.5, "d": {}}, "e": {1: "x"}}
    parts = {"a µ": written(value["a µ"]), "b": {"c": written(2.5), "d": {}}, "e": {1: "x"}}
    assert "".join(pieces(parts)) == written(value).text and json.loads(written(value).text) == {
        **value,
        "e": {"1": "x"},
    }
    assert compressed(parts) == compressed(value) and written(value["b"]).value == value["b"]
    with pytest.raises(ValueError, match="JSON compliant"):
        list(pieces({"a": {"b": float("nan")}}))


def test_of_many_rows_fewer_samples_are_kept(monkeypatch):
    """The page says one in how many. The limits are real, the number of samples altogether is not."""
    assert (LEAST, MOST, ALTOGETHER) == (6, 120, 30 * FULL)
    monkeypatch.setattr(report_samples, "ALTOGETHER", 6000)
    row = {"samples_us": np.linspace(9, 11, 240), "set_aside_samples_us": None, "median_us": 10.0}
    for count, most in ((1, MOST), (50, MOST), (100, 60), (200, 30), (2000, LEAST)):
        first = samples([row] * count)["rows"][0]
        assert (first["every"], len(first["at"])) == (240 // most, most)


def test_a_small_picture_stays_small():
    """Of many dots every so manieth, and the one that the sentence is about."""
    dots = [Dot(f"d{i}", i + 1, i + 0.5, i + 1.5, chosen=i == 1001) for i in range(2000)]
    drawn = page.picture(dots, "times as fast", "x")
    assert drawn.count("<circle") <= page.MOST + 1 and "d1001 " in drawn and "times as fast, one in 34" in drawn
    assert "one in" not in page.picture(dots[: page.MOST], "times as fast", "x")


def test_a_browser_that_cannot_unpack_says_where_the_rows_are(tmp_path):
    """What is in the page without its rows stays there, and pictures stand where figures would be."""
    table = frame(
        *(one("gate", "cute", cell=f"c{i}", tokens=i + 1, median_us=1.0 + i, gb_per_s=i + 1.0) for i in range(3))
    )
    render(table, {"over_tokens": tmp_path / "over_tokens.svg"}, tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "new DecompressionStream" in text
    (tmp_path / "old.html").write_text(text.replace("new DecompressionStream", "new NoSuchStream"))
    with loaded(tmp_path / "old.html") as shown:
        said = shown.value('["said", "problem"].map(id => document.getElementById(id).textContent).join("|")')
        pictures_shown = shown.value('document.querySelectorAll(".chart img").length')
        assert said.count("They are in measurements.parquet, too") == 2 and "NoSuchStream is not defined" in said
        assert pictures_shown == 1 and any("NoSuchStream" in line for line in shown.console())
