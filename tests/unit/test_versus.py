"""Two platforms side by side, on stored rows of one and copies of them as if of the other: what is paired, what is said, where the links lead."""

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rows import rows

from browser import asked
from moe_routing_bench.cli.published import site
from moe_routing_bench.report import run_pages
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import page_data
from moe_routing_bench.store import paths
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.store.records import SCHEMA

FASTER_CARD = 0.8  # the time of the one over that of the other, in every row


def platform(name, gpu, factor=1.0):
    """Rows of three benches as if of this platform, in `factor` of the time, with 20 blocks each."""
    table = rows().query("status == 'ok' and bench in ('gate', 'pack', 'layer')").reset_index(drop=True)
    rng = np.random.default_rng(len(name) + int(10 * factor))
    us = table["median_us"] * factor
    blocks = [list(one * np.exp(rng.normal(0, 0.001, 20))) for one in us]
    return table.assign(
        platform=name,
        gpu_name=gpu,
        median_us=us,
        ci_low_us=us * 0.99,
        ci_high_us=us * 1.01,
        block_medians_us=blocks,
        roofline_us=us / 2,
        share_of_roofline=0.5,
        copy_gb_per_s=2000.0 / factor,
        best_verdict="faster",
        driver=f"driver of {name}",
    )


@pytest.fixture
def two():
    return platform("nvidia-h100", "NVIDIA H100"), platform("nvidia-h200", "NVIDIA H200", FASTER_CARD)


def test_rows_are_paired_with_the_ratio_of_their_limits(two):
    """By cell and implementation; above 1 the second is faster; a suspect row is marked; what one alone measured is left out."""
    one, other = two
    found = run_pages.rows(one.assign(suspect=one.index == 3).drop(index=[0]), other.drop(index=[1]))
    assert len(found) == len(one) - 2 and found["doubt"].sum() == 1
    assert np.allclose(found["ratio"], 1 / FASTER_CARD, rtol=0.01) and np.allclose(found["ceiling"], 1 / FASTER_CARD)
    assert (found["ratio_ci_low"] < found["ratio"]).all() and (found["ratio"] < found["ratio_ci_high"]).all()


def test_the_fastest_of_a_cell_may_be_another_on_each(two):
    """With its own verdict on either platform, and an interval as wide as both."""
    one, other = two
    first = one[(one["bench"] == "pack") & (one["cell"] == "T1024-0.0")]
    slow = first["median_us"].idxmin()
    times = {"median_us": 900.0, "ci_low_us": 890.0, "ci_high_us": 910.0}
    changed = one.assign(
        **{name: one[name].where(one.index != slow, value) for name, value in times.items()},
        best_verdict=one["best_verdict"].where(one["cell"] != "T1024-0.0", "same"),
    )
    best = run_pages.cells(run_pages.rows(changed, other))
    cell = best[(best["bench"] == "pack") & (best["cell"] == "T1024-0.0")].iloc[0]
    assert cell["other"] == one["implementation"][slow] != cell["one"] and not cell["one_told"] and cell["other_told"]
    assert (
        cell["low"] < cell["ratio"] == pytest.approx(cell["one_us"] / cell["other_us"]) and cell["ratio"] < cell["high"]
    )
    assert (best["one"] != best["other"]).sum() == 1


def test_in_how_many_cells_both_agree():
    """By the verdicts of both runs; a lowest median alone is no fastest. What did not happen is not said."""
    same = {"one": "cute", "other": "cute", "one_told": True, "other_told": True}
    cells = [
        same,
        same,
        same | {"other": "triton"},
        same | {"one_told": False},
        same | {"other": "triton", "other_told": False},
    ]
    known = "both runs tell the same implementation from the best other as the fastest"
    assert (
        run_pages.agreed(pd.DataFrame(cells))
        == f"In 2 of 5 cells {known}; in 1 they tell different ones; in 2 at least one of them tells none (≈)."
    )
    assert run_pages.agreed(pd.DataFrame(cells[:1])) == f"In 1 of 1 cell {known}."


def test_a_cell_is_in_doubt_where_a_time_that_it_shows_is(two):
    """That of the fastest on either platform; not where another row of the cell is suspect."""
    one, other = two
    of_cell = one[(one["bench"] == "pack") & (one["cell"] == "T1024-0.0")]["median_us"]
    for which, doubtful in ((of_cell.idxmin(), 1), (of_cell.idxmax(), 0)):
        for pair in (
            (one.assign(suspect=one.index == which), other),
            (one, other.assign(suspect=other.index == which)),
        ):
            assert run_pages.cells(run_pages.rows(*pair))["doubt"].sum() == doubtful


def test_platforms_that_are_compared(two):
    """Those of two GPUs and the same run, with a row in common; a CPU's times say nothing of another machine's."""
    one, other = two
    tables = {
        "cpu": one.assign(gpu_name=None),
        "nvidia-h100": one,
        "nvidia-h200": other,
        "nvidia-h200.layers": other,
        "nvidia-x": one.assign(cell="none"),
    }
    assert run_pages.pairs(tables) == [("nvidia-h100", "nvidia-h200")]
    assert run_pages.pairs({"nvidia-h100": one, "nvidia-h200": other.assign(status="crashed")}) == []


@pytest.mark.slow
def test_the_site_has_a_page_on_them(two, tmp_path, monkeypatch):
    """Linked from the first; its links open the rows in both reports; nothing sticks out on a phone."""
    monkeypatch.chdir(tmp_path)
    for table in two:
        name = table["platform"][0]
        paths.results(name).mkdir(parents=True)
        write_table(paths.measurements(name), pa.Table.from_pandas(table, SCHEMA, preserve_index=False))
        render(table, {}, paths.report(name))
    site(tmp_path / "pages")
    assert 'href="nvidia-h100-and-nvidia-h200.html"' in (tmp_path / "pages/index.html").read_text()
    page = tmp_path / "pages/nvidia-h100-and-nvidia-h200.html"
    text = page.read_text()
    links = set(re.findall(r'href="(nvidia-h\d00)/index.html#row-(\w+)"', text))
    held = {(name, id_) for table in two for name in table["platform"][:1] for id_ in page_data(table)["ids"].value}
    assert len(links) == 2 * len(two[0]) and links == held
    for said in (
        '<td class="n">NVIDIA H100</td><td class="n">NVIDIA H200</td>',
        "driver of nvidia-h200",
        "copy_gb_per_s",
        ">1.25<",
        "In 18 of 18 cells both runs tell the same",
        "1.25x [1.23, 1.28]",
    ):
        assert said in text, said
    script = """const wide = document.documentElement.clientWidth; return [[...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > wide + 1 && !e.closest(".scroll")).length, document.documentElement.scrollWidth <= wide, document.querySelectorAll("#both tbody tr").length, document.querySelectorAll("svg circle").length];"""
    assert asked(page, script, width=390) == [0, True, len(two[0]), 18]
