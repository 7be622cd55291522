"""Rows of other benchmarks, as a table or a CSV file: they draw, compare and report through the functions for our own."""

import json

import pandas as pd
import pytest
from rows import frame, one

from browser import asked
from drawn import draw
from moe_routing_bench.cli import report as reporting
from moe_routing_bench.comparison import runs
from moe_routing_bench.figures import FIGURES, foreign
from moe_routing_bench.report import document
from moe_routing_bench.report.render import render
from moe_routing_kernels.errors import UserError

CSV = """bench,implementation,median_us,tokens,hidden,experts,top_k,baseline,gpu_name,remark
fused_moe,theirs,120.5,64,2048,64,8,naive,NVIDIA H100,ours
fused_moe,naive,800,64,2048,64,8,naive,NVIDIA H100,
fused_moe,theirs,900.5,4096,2048,64,8,naive,NVIDIA H100,
fused_moe,naive,7000,4096,2048,64,8,naive,NVIDIA H100,
pack,theirs,12,4096,2048,64,8,,NVIDIA H100,
"""
LEAST = {"bench": ["a", "a"], "implementation": ["x", "y"], "median_us": [1.0, 2.0]}
MEASURED = [name for name, figure in FIGURES.items() if figure.source == "measurements"]


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(CSV)
    return path


@pytest.mark.parametrize("name", MEASURED)
def test_every_figure_takes_them(name, csv):
    """Drawn where they have what it shows, else with a reason; with no more than three columns, too."""
    said = draw(name, foreign.read_csv(csv))[1]
    assert "no data: " in draw(name, foreign.rows(pd.DataFrame(LEAST)))[1] or name in ("crossover", "stage_share")
    if name in ("over_tokens", "decode", "speedup"):
        assert "no data" not in said and "theirs" in said and "fused_moe" in said


def test_what_they_lack_follows_from_their_medians(csv):
    """Ratios to the fastest other and to the baseline, without an interval; cells named by axes; missing values of our kind."""
    found = foreign.read_csv(csv)
    assert list(found) == list(frame(one("pack"))), "the columns of our rows"
    first = found.iloc[0]
    assert (first["cell"], first["status"], first["best_other"]) == ("T64 H2048 E64 k8", "ok", "naive")
    assert first["best_speedup"] == first["speedup"] == pytest.approx(800 / 120.5)
    assert found["best_verdict"].isna().all() and pd.isna(found["best_speedup"].iloc[-1]), "alone in its cell"
    given = foreign.rows(pd.DataFrame(LEAST | {"best_speedup": [3.0, None]}))
    assert list(given["best_speedup"]) == [3.0, 0.5], "what is given stays"
    failed = foreign.rows(pd.DataFrame(LEAST | {"status": ["ok", "crashed"], "median_us": [1.0, None]}))
    assert list(failed["status"]) == ["ok", "crashed"] and pd.isna(failed["best_speedup"].iloc[0])


def test_two_tables_compare(csv):
    """Row by row, as two runs of ours; a ratio without an interval is no verdict."""
    before = foreign.read_csv(csv)
    found = runs.compare(before, before.assign(median_us=before["median_us"] / 2))
    assert list(found.rows["ratio"].astype(float)) == [2.0] * 5 and set(found.rows["verdict"]) == {"undecided"}
    assert found.rows["ratio_ci_low"].isna().all()


@pytest.mark.slow
def test_the_report_command_takes_a_file(csv, tmp_path):
    """Figures, data and page below a folder, with each row; nothing of it is a measurement of ours."""
    out = tmp_path / "report"
    reporting.report(rows=csv, out=out)
    page, held = (out / "index.html").read_text(), json.loads((out / document.NAME).read_text())
    assert held["rows"]["values"]["implementation"] and "fused_moe" in page
    assert {one["name"] for one in held["figures"] if one["chart"]} >= {"over_tokens", "speedup", "decode"}
    assert (out / "figures/speedup.png").is_file() and (out / "figures/speedup.svg").is_file()
    assert asked(
        out / "index.html", "return [page.ids.length, [...document.querySelectorAll('#rows tbody tr')].length];"
    ) == [5, 5]
    assert "a row of another benchmark" in json.dumps(held["rows"]["commands"]) and not held["cpu"]
    assert "rows of another benchmark" in draw("speedup", foreign.read_csv(csv))[1]
    assert "moe-routing-bench measure fused_moe" not in json.dumps(held["rows"]["commands"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"median_us": None}, "no column median_us"),
        ({"median_us": ["fast", "1"]}, "median_us of row 1: got 'fast'; allowed: a finite number|a number"),
        ({"median_us": [1.0, -2.0]}, "median_us of row 2: got -2.0; allowed: a time above 0"),
        ({"median_us": [1.0, float("inf")]}, "median_us of row 2"),
        ({"median_us": [1.0, None]}, "got 'nothing'; allowed: a time above 0 in µs; hint: a row without a time"),
        ({"tokens": ["64", "64.5"]}, "tokens of row 2: got '64.5'; allowed: a whole number"),
        ({"tokens": [64, 0]}, "tokens of row 2: got 0; allowed: at least 1"),
        ({"suspect": ["no", "true"]}, "suspect of row 1: got 'no'; allowed: true or false"),
        ({"status": ["ok", "crash"]}, "status of row 2: .*did you mean 'crashed'"),
        ({"bench": ["a", ""]}, "bench of row 2"),
        ({"bench": ["a", "b: c"]}, "a name without a colon"),
        ({"implementation": ["x", "x"], "batch": [1, 2]}, "twice.*no axes: batch"),
    ],
)
def test_bad_rows_are_refused_in_a_line(change, says):
    """What, got, allowed, and a hint where there is one."""
    table = pd.DataFrame({name: values for name, values in (LEAST | change).items() if values is not None})
    with pytest.raises(UserError, match=says) as found:
        foreign.rows(table)
    assert "\n" not in str(found.value) and "allowed: " in str(found.value)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    for name, text in (
        ("none.csv", None),
        ("empty.csv", ""),
        ("ragged.csv", "bench,implementation,median_us\na,b\n1,2,3,4,5\n"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=r"rows|median_us"):
            foreign.read_csv(tmp_path / name)
    with pytest.raises(UserError, match="rows: got 'none'"):
        foreign.rows(pd.DataFrame(LEAST).iloc[:0])


def test_hosts_without_a_gpu_tell_rows_apart():
    table = pd.DataFrame({"bench": "gate", "implementation": "x", "median_us": [1.0, 2.0], "host": ["a", "b"]})
    assert foreign.rows(table)["median_us"].tolist() == [1.0, 2.0]
    with pytest.raises(UserError, match="twice"):
        foreign.rows(table.assign(host="a"))


def test_hostile_names_are_text(tmp_path):
    """In the page of a file that others wrote."""
    evil = "<img src=x onerror=alert(1)>"
    table = foreign.rows(pd.DataFrame(LEAST | {"implementation": [evil, "y"], "tokens": [8, 8]}))
    render(table, MEASURED, tmp_path / "index.html")
    assert evil not in (tmp_path / "index.html").read_text()
