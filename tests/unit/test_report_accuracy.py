"""The section of the report on quantised weights."""

import pandas as pd
import pytest
from rows import rows

from moe_routing_bench.report import quantised_weights
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

SIZES = {"tokens": 64, "hidden": 512, "intermediate": 256, "experts": 4, "top_k": 2}


def row(weights, drawn="normal", implementation=None, status=None, error=None, snr=20.0, **more):
    return (
        SIZES
        | {
            "weights": weights,
            "activations": "bf16",
            "drawn": drawn,
            "implementation": implementation,
            "status": status,
            "reason": None,
            "weight_snr_db": snr,
            "output_snr_db": snr and snr - 5,
            "output_cosine": 0.987654,
            "of_bound": None if snr is None else 10 / snr,
            "kernel_error": error,
            "tolerance": 0.01,
        }
        | more
    )


MATRIX = pd.DataFrame(
    [
        row("bf16", snr=None),
        row("int4_g128", implementation="dequant", status="ok", error=0.002),
        row("int4_g128", "outliers", "dequant", "ok", 0.004, snr=11.0),
        row("int4_g128", "outliers", "other", "incorrect", 0.5, snr=11.0, reason="y: <relative L2 error>"),
    ]
)


def test_lines_say_what_is_lost_and_what_is_right():
    plain, int4 = quantised_weights.exactness(MATRIX)
    assert (plain.weights, plain.right, plain.most, plain.wrong) == ("bf16", "–", "–", [])
    assert (plain.bound, int4.bound) == ("–", "91%"), "the largest of all kinds of weights"
    assert plain.costs == [("exact", "exact", "0.98765"), ("–", "–", "–")]
    assert int4.costs == [("20.0", "15.0", "0.98765"), ("11.0", "6.0", "0.98765")]
    assert (int4.right, int4.most) == ("2 of 3", "40%")
    assert int4.wrong == ["other is incorrect: y: <relative L2 error>"]
    assert quantised_weights.sizes(MATRIX) == "tokens=64, hidden=512, intermediate=256, experts=4, top_k=2"


def test_the_section_is_there_where_there_are_rows(tmp_path):
    out = tmp_path / "index.html"
    few = rows().query("bench == 'gate'")
    render(few, {}, out, matrix=MATRIX)
    page = out.read_text()
    assert 'id="formats"' in page and "<td>int4_g128</td>" in page and "&lt;relative L2 error&gt;" in page
    assert 'href="#accuracy"' in page, "it is in the contents"
    for nothing in (None, MATRIX.iloc[:0]):
        render(few, {}, out, matrix=nothing)
        assert 'id="formats"' not in out.read_text()
