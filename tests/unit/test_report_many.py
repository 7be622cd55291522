"""A report of very many rows: how many bytes it has, how long it takes to open, and that its columns hold what they were given."""

import base64
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rows import frame, one

from browser import asked, loaded
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report import pictures
from moe_routing_bench.report import samples as report_samples
from moe_routing_bench.report.packing import compressed
from moe_routing_bench.report.render import render
from moe_routing_bench.report.rows import page_data
from moe_routing_bench.report.samples import ALTOGETHER, LEAST, MOST, samples
from moe_routing_bench.store import records

STORED = Path(__file__).parents[2] / "results/nvidia-h200/measurements.parquet"
MANY = 5_000
FULL, ALLOWED = 20_000, 5_000_000  # rows of a page, and the bytes that it may then have
EMPTY = 480_000  # bytes of a page without rows
KEPT = ("skew", "capacity_factor", "tolerance", "over_dense")  # numbers that are of a choice, not of a measurement
MAPS = ("stage_us", "stage_timer", "configuration")
SHARES = ("_p", "share_of_roofline", "drop_rate", "gini")  # which end the names of what is at most 1


def many() -> pd.DataFrame:
    """The stored rows, and as many more of other hidden sizes, whose every measured number is another: by a tenth from cell to cell, and by a thousandth from row to row where the rows of
    a cell differ, as ceilings do not. They have no twins, of which the floors of noise would take as long as all the rest."""
    stored = records.frame(records.read(STORED))
    rng, cells = np.random.default_rng(0), stored.groupby(["bench", "cell"], sort=False).ngroup().to_numpy()
    measured = [name for name in stored if stored[name].dtype.kind == "f" and name not in KEPT and not (stored[name].dropna() % 1 == 0).all()]  # fmt: skip
    noise = [1e-3 if stored[name].groupby(cells).nunique().max() > 1 else 0 for name in measured]
    parts = [stored]
    for turn in range(1, -(-MANY // len(stored))):
        of_cells = rng.normal(1, 0.1, (len(measured), cells.max() + 1)).clip(0.7)
        numbers = {
            name: stored[name] * factors[cells] * rng.normal(1, apart, len(stored))
            for name, factors, apart in zip(measured, of_cells, noise, strict=True)
        }
        numbers |= {name: held.clip(upper=1) for name, held in numbers.items() if name.endswith(SHARES)}
        numbers["twin_speedup"] = np.nan
        scale = numbers["median_us"] / stored["median_us"]
        lists = {name: [held if held is None else held * by * rng.normal(1, 1e-3, len(held)) for held, by in zip(stored[name], scale, strict=True)] for name in ("samples_us", "set_aside_samples_us")}  # fmt: skip
        clocks = {name: (pd.to_datetime(stored[name]) + pd.to_timedelta(turn * 86_400 + rng.uniform(0, 9, len(stored)), unit="s")).map(lambda time: time.isoformat()) for name in ("started_at", "ended_at")}  # fmt: skip
        hashes = [None if held is None else f"{rng.integers(16**8):08x}" for held in stored["cell_hash"]]
        parts.append(stored.assign(**numbers, **lists, **clocks, cell_hash=hashes, hidden=stored["hidden"] + 8 * turn, cell=stored["cell"] + f"-{turn}"))  # fmt: skip
    return pd.concat(parts, ignore_index=True).iloc[:MANY].copy()


@pytest.fixture(scope="module")
def table():
    return many()


@pytest.fixture
def page(table, tmp_path, monkeypatch):
    """With as few samples of a row as a full page has."""
    monkeypatch.setattr(report_samples, "ALTOGETHER", ALTOGETHER * MANY // FULL)
    drawn = {name: tmp_path / f"{name}.svg" for name, figure in FIGURES.items() if figure.source == "measurements"}
    render(table, drawn, tmp_path / "index.html")
    return tmp_path / "index.html"


@pytest.mark.slow
def test_a_page_of_many_rows_has_few_bytes_and_opens_at_once(page):
    """All its figures, numbers and 30 samples of each row. Opened: the rows are unpacked, the question is answered and the table is laid out."""
    assert page.stat().st_size < EMPTY + (ALLOWED - EMPTY) * MANY // FULL
    asked(page, "return 0")  # the browser has started
    with loaded(page) as shown:
        count, answered, lines, seconds = shown.value('[page.ids.length, byId("said").textContent.length, document.querySelectorAll("#rows tbody tr[id]").length, performance.getEntriesByName("opened")[0].startTime / 1000]')  # fmt: skip
        assert not shown.console()
    assert (count, lines < 150) == (MANY, True) and answered > 30 and lines > 10
    assert seconds < 3, "0.4 s of an idle machine; others may share this one"


def test_columns_come_back(table, tmp_path):
    """Every field of every row as the page's scripts read it is what was stored, to five digits (of its median or ratio, where it is an end of an interval) and whole seconds."""
    table = table.sample(150, random_state=1)
    extremes = [{"median_us": 9.9996, "ci_low_us": 0.99994, "ci_high_us": 10.0004}, {"median_us": 1e-7, "min_us": 9e-8, "max_us": 123456.789}, {"median_us": 1000.0, "p95_us": 100.0}, {"ci_low_us": 2.0}]  # fmt: skip
    table = pd.concat([table, frame(*(one("gate", "cute", cell=f"e{i}", **{"median_us": None} | times) for i, times in enumerate(extremes)))], ignore_index=True)  # fmt: skip
    render(table, {}, tmp_path / "index.html")
    bases = {name: column.get("near", name) for name, column in page_data(table)["values"].items()}
    names = [name for name in bases if name not in (*MAPS, "check_nonce")]
    found = asked(tmp_path / "index.html", f"return Object.fromEntries({names}.map(name => [name, page.ids.map((_, row) => value(row, name))]))")  # fmt: skip
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


def test_of_many_rows_fewer_samples_are_kept(monkeypatch):
    """The page says one in how many. The limits are real, the number of samples altogether is not."""
    assert (LEAST, MOST, ALTOGETHER) == (30, 120, 30 * FULL)
    monkeypatch.setattr(report_samples, "ALTOGETHER", 6000)
    row = {"samples_us": np.linspace(9, 11, 240), "set_aside_samples_us": None, "median_us": 10.0}
    for count, most in ((1, MOST), (50, MOST), (100, 60), (200, LEAST), (2000, LEAST)):
        first = samples([row] * count)["rows"][0]
        assert (first["every"], len(first["at"])) == (240 // most, most)


def test_a_small_picture_stays_small():
    """Of many dots every so manieth, and the one that the sentence is about."""
    dots = [pictures.Dot(f"d{i}", i + 1, i + 0.5, i + 1.5, chosen=i == 1001) for i in range(2000)]
    drawn = pictures.picture(dots, "times as fast", "x")
    assert drawn.count("<circle") <= pictures.MOST + 1 and "d1001 " in drawn and "times as fast, one in 34" in drawn
    assert "one in" not in pictures.picture(dots[: pictures.MOST], "times as fast", "x")


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
