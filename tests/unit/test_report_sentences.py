"""Sentences of the page that its template makes under a condition: that they are there, and where each must be silent."""

from pathlib import Path

import pytest
from rows import frame, one

from moe_routing_bench.quality import run_rows
from moe_routing_bench.quality.run_rows import BY_DOMAIN, MIXED
from moe_routing_bench.report.bars import PLATFORM
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

STORED = Path(__file__).parents[2] / "results"
LARGE = {"platform": PLATFORM, "gpu_name": "NVIDIA H200", "tokens": 16384, "experts": 128, "top_k": 8, "dtype": "fp32"}
TIMED = {"median_us": 5.0, "ci_low_us": 4.9, "ci_high_us": 5.1}
FLOOR = {"roofline_us": 4.0, "share_of_roofline": 0.8, "gpu_uuid": "GPU-1", "timer": "cuda_graph", "graph_node_us": 1.0}
MODEL = {
    "model": "olmoe-1b-7b",
    "tokens": 1,
    "phase": "decode",
    "block_medians_us": [5.0, 5.01],
    "cell_hash": "a",
    "set_aside": 0,
    "code_fingerprint": "a" * 16,
}
GATE = one("gate", "cute", **LARGE | TIMED)
PACK = one("pack", "cute", **LARGE | TIMED | {"share_of_stream": 0.99, "hidden": 2048, "dtype": "bf16"})
MODELS = [
    one("model", name, **LARGE | TIMED | {"dtype": "bf16"} | MODEL) for name in ("ops", "transformers_batched_mm")
]


@pytest.fixture
def page(tmp_path):
    """What a page of these rows says, in one line; figures that are named are drawn."""

    def made(*rows, figures=(), **options) -> str:
        render(frame(*rows), figures, tmp_path / "index.html", **options)
        return " ".join((tmp_path / "index.html").read_text().split())

    return made


@pytest.mark.parametrize(
    ("rows", "bars", "streams"),
    [
        ([GATE], True, False),
        (MODELS, True, False),
        ([GATE, PACK, *MODELS], True, True),
        ([GATE | {"platform": "nvidia-h100"}, PACK | {"platform": "nvidia-h100"}], False, False),
    ],
)
def test_words_about_bars_stand_above_the_table_that_they_are_about(page, rows, bars, streams):
    text = page(*rows)
    for said in (
        '<table id="bars"',
        "Bars that were fixed before",
        "A bar is missed as soon as",
        "within noise: the interval holds",
    ):
        assert (said in text) == bars
    assert ("A stream of its mix: a kernel" in text) == streams


def test_how_far_stages_are_from_the_hardware(page):
    """The figure, where a row has a floor; else that none has."""
    none = "Not measured: no row has a floor (on a CPU no ceiling is one)."
    far, near = page(GATE | {"gpu_uuid": None}, figures=["limits"]), page(GATE | FLOOR, figures=["limits"])
    assert none in far and 'href="#figure-limits">Distance' not in far
    assert none not in near and '<a href="#figure-limits">Distance to the limit</a>: the time over the least' in near


def test_figures_without_rows_are_named_where_there_are_any(page):
    assert 'id="undrawn">This figure has nothing to show of this run: Distance to the limit.' in page(
        GATE | {"gpu_uuid": None}, figures=["limits"]
    )
    assert 'id="undrawn"' not in page(GATE | FLOOR) and 'id="undrawn"' not in page(GATE | FLOOR, figures=["limits"])


def test_batches_of_one_domain_are_a_caution(page):
    """Where runs validated on them, and not where all batches were mixed."""
    trained = run_rows.read(STORED / "nvidia-h200/quality.parquet", run_rows.SCHEMA).to_pandas()
    trained = trained[trained["router"].isin(["dense", "switch_top1", "softk"])]  # fewer are ranked sooner
    texts = {
        batches: page(GATE, trained=rows.assign(validation_batches=batches))
        for batches, rows in ((BY_DOMAIN, trained), (MIXED, trained[trained["seed"] == trained["seed"].min()]))
    }
    said = {
        batches: "because these runs validated on batches of one domain each" in text for batches, text in texts.items()
    }
    assert said == {BY_DOMAIN: True, MIXED: False}
    assert "trained with each router, several seeds each, on" in texts[BY_DOMAIN]
    assert "trained with each router, one seed each, on" in texts[MIXED]


def test_pictures_are_explained_where_there_are_any(page):
    """A finding of one value has none."""
    against = {
        "best_other": "triton",
        "best_verdict": "faster",
        "best_speedup": 1.5,
        "best_speedup_ci_low": 1.4,
        "best_speedup_ci_high": 1.6,
    }
    alone = GATE | against
    assert "In the pictures:" not in page(alone) and 'id="findings"' in page(alone)
    assert "In the pictures:" in page(alone, alone | {"cell": "b", "best_speedup": 1.55})
