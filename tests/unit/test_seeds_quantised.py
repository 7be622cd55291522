"""The report of seed 003: each published row beside the cell that stands for it, its ratios, what is right, and layers."""

import functools
from pathlib import Path

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.report.parts import ABSENT
from moe_routing_bench.report.seeds import figures, sources
from moe_routing_bench.report.seeds.kernels import TIMES as TIMES_OF
from moe_routing_bench.report.seeds.section import section

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODELS = presets.load(ROOT / "config/models.yaml")
TIMES = {
    "torch_loop": 6000.0,
    "dequant_loop": 9000.0,
    "dequant": 5500.0,
    "dequant_cute": 4500.0,
    "dequant_uncached": 5000.0,
    "cute_quantised": 1500.0,
    "cute": 3000.0,
}


def cells(platform: str, *configs: str) -> list:
    """The jobs of these configs, or of both that have its kernels and layers."""
    return [
        job
        for config in configs or ("003", "003-layers")
        for job in expand(on(load(ROOT / f"config/seeds/{config}.yaml"), platform), MODELS)
    ]


@functools.cache
def _rows(platform: str) -> pd.DataFrame:
    known = {"tflops": 7.0, "rel_l2_error": 1e-3, "tolerance": 5e-3, "cpu_model": "C"}
    return frame(
        *(
            one(job.cell.bench, name, **dict(job.cell.values), **known, cell=job.cell.key, median_us=TIMES[name])
            for job in cells(platform)
            for name in job.implementations
            if name in TIMES
        )
    )


def rows(platform: str) -> pd.DataFrame:
    """A row for each implementation of each cell that has a time."""
    return _rows(platform).copy()


def test_each_config_has_the_tables_of_what_it_measures():
    shapes, layers = ([job.cell.key for job in cells("nvidia-h200", config)] for config in ("003", "003-layers"))
    assert not set(shapes) & set(layers)
    found = rows("nvidia-h200")
    said = {
        run: [table.title for table in section(found[found["cell"].isin(cells)], run).tables]
        for run, cells in (("seed-003", shapes), ("seed-003-layers", layers))
    }
    assert len(said["seed-003"]) == 3 and said["seed-003"][0].startswith("Seven shapes")
    assert said["seed-003-layers"] == [
        said["seed-003"][2],
        "Decoding by format of weights and activations",
        "Layers of its two models",
        "A dispatcher between kernels",
    ]


def columns(table, *wanted: int) -> list[tuple[str, ...]]:
    return [tuple(row[i] for i in wanted) for row in table.rows]


def test_on_a_gpu_every_published_row_has_its_cell_and_its_ratios():
    times, means, exactness, _, layers, _ = section(rows("nvidia-h200"), "seed-003").tables
    known = figures("003")
    assert len(times.rows) == len(known) == 126
    for row, (_, theirs) in zip(times.rows, known.iterrows(), strict=True):
        plain = theirs["format"] == theirs["activations"]
        assert row[:7] == [
            str(theirs[name]) for name in ("shape", "experts", "n", "k", "tokens", "format", "activations")
        ]
        expected = (
            ["6", ABSENT, ABSENT, "cute", "3", "2x", "2x"]
            if plain
            else ["6", "9", "4.5", "cute_quantised", "1.5", "6x", "3x"]
        )
        assert row[14:] == [*expected, "7", ABSENT]
    assert "divided" not in times.note and "were measured" not in times.note
    assert len(means.rows) == 18 and ("int4", "fp16", "6x", "3x", "7") in columns(means, 0, 1, 4, 5, 6)
    assert len(exactness.rows) == 18 and len(layers.rows) == 16


def test_published_times_that_our_rule_doubts_are_named_and_the_means_tell_the_machine():
    times, means, *_ = section(rows("nvidia-h200"), "seed-003").tables
    known = figures("003")
    assert [row[12] for row in times.rows] == list(known["machine"])
    for row, machine, marked in zip(times.rows, known["machine"], known["implausible"], strict=True):
        names = [] if pd.isna(marked) else [TIMES_OF[name] for name in marked.split()]
        assert set(names) <= set(row[13].split(", ")), "what the data marks as implausible"
        assert machine == "drifted" or row[13] == ABSENT, "a row of a steady machine is not doubted"
    said = {(row[0], row[1]): row[2:4] for row in means.rows}
    assert said["e4m3", "bf16"][1] == ABSENT, "no row of that table is of a steady machine"
    assert said["int8", "fp16"][0] == said["int8", "fp16"][1]


def test_rows_of_this_run_that_are_in_doubt_are_named():
    found = rows("nvidia-h200")
    which = (
        (found["implementation"] == "dequant_cute")
        & (found["weights"] == "int4_g128")
        & (found["tokens"] == 610)
        & (found["dtype"] == "fp16")
    )
    found.loc[which, "anomaly"] = "too long"
    times, *_ = section(found, "seed-003").tables
    assert [(row[0], row[5], row[6]) for row in times.rows if row[-1] != ABSENT] == [("uneven", "int4", "fp16")]
    assert {row[-1] for row in times.rows} == {ABSENT, "dequant_cute"}


def test_on_a_cpu_the_rows_that_were_measured_are_there_at_a_sixteenth_of_their_sizes():
    times, *_ = section(rows("cpu"), "seed-003").tables
    measured = [job for job in cells("cpu") if job.cell.bench == "experts" and job.cell.phase == "prefill"]
    assert len(times.rows) == len(measured) and {row[6] for row in times.rows} == {"bf16"}
    assert "divided by 16" in times.note and f"{len(times.rows)} of their 126 rows were measured" in times.note


def test_without_a_kernel_there_are_baselines_and_no_ratio():
    found = rows("nvidia-h200")
    times, means, *_ = section(found[found["implementation"] != "cute_quantised"], "seed-003").tables
    quantised = [row for row in times.rows if row[5] == "int4"]
    assert {tuple(row[14:]) for row in quantised} == {("6", "9", "4.5", *[ABSENT] * 6)}
    assert ("int4", "fp16", ABSENT, ABSENT) in columns(means, 0, 1, 4, 5)


def test_what_is_wrong_counts_among_what_was_judged():
    found = rows("nvidia-h200")
    wrong = (
        (found["weights"] == "int2z_g128")
        & (found["dtype"] == "bf16")
        & (found["implementation"] == "cute_quantised")
        & (found["bench"] == "experts")
    )
    found.loc[wrong, ["status", "median_us"]] = ["incorrect", None]
    _, _, exactness, *_ = section(found, "seed-003").tables
    said = {(row[0], row[1]): row[2:] for row in exactness.rows}
    assert said["int2_asym", "bf16"] == ["passed", "0.15", "19 of 27", "0.001", "0.005"]
    assert said["int4", "bf16"][2] == "27 of 27"


@pytest.mark.parametrize(
    ("us", "ratio", "within"), [(1500.0, "2x", "yes"), (6000.0, "0.5x", "yes"), (6100.0, "0.4918x", "no")]
)
def test_the_guard_of_decoding_is_twice_the_time_at_full_precision(us, ratio, within):
    slow = rows("nvidia-h200")
    slow.loc[slow["weights"] != slow["dtype"], "median_us"] = us
    *_, layers, _ = section(slow, "seed-003").tables
    assert {(row[1], row[5], row[10], row[11]) for row in layers.rows} == {
        ("decode", "2x", ratio, within),
        ("prefill", ABSENT, ratio, ABSENT),
    }
    assert layers.rows[0][6:10:2] == ["cute", layers.rows[0][8]] and layers.rows[0][7] == "3,000"


def test_full_precision_is_the_fastest_even_where_auto_alone_ran_it():
    found = rows("nvidia-h200")
    plain = found[(found["bench"] == "layer") & (found["implementation"] == "cute")]
    auto = plain.assign(implementation="auto", configuration="cute_dependent; tiles", median_us=2400.0)
    *_, layers, _ = section(pd.concat([found, auto], ignore_index=True), "seed-003").tables
    assert len(layers.rows) == 16 and {(row[6], row[7], row[10]) for row in layers.rows} == {
        ("cute_dependent", "2,400", "1.6x")
    }


def test_the_skew_of_each_cell_is_that_of_the_published_rows_per_expert():
    loads = {name: one for name, one in sources()["003"]["rows_per_expert"].items() if isinstance(one, list)}
    asked = {job.cell.tokens: job.cell.skew for job in cells("nvidia-h200") if job.cell.bench == "experts"}
    for name, one_load in loads.items():
        mean = sum(one_load) / len(one_load)
        cv = (sum((load - mean) ** 2 for load in one_load) / len(one_load)) ** 0.5 / mean
        assert asked[sum(one_load)] == pytest.approx(cv, abs=5e-4), name


def test_decoding_has_a_line_for_every_format_in_the_columns_of_the_shapes():
    found = rows("nvidia-h200")
    which = (found["phase"] == "decode") & (found["bench"] == "experts") & (found["implementation"] == "dequant")
    found.loc[which & (found["weights"] == "e5m2_g128"), "anomaly"] = "too long"
    times, _, _, decoding, *_ = section(found, "seed-003").tables
    assert decoding.groups[-1].columns == times.groups[-1].columns
    assert len(decoding.rows) == 18 and {tuple(row[:4]) for row in decoding.rows} == {("4096", "2048", "8", "2")}
    lines = {(row[4], row[5]): row[6:] for row in decoding.rows}
    assert lines["fp16", "fp16"] == ["6", ABSENT, ABSENT, "cute", "3", "2x", "2x", "7", ABSENT]
    assert lines["int4_asym", "bf16"] == ["6", "9", "4.5", "cute_quantised", "1.5", "6x", "3x", "7", ABSENT]
    assert lines["e5m2", "fp16"][-1] == "dequant" and lines["e4m3", "fp16"][-1] == ABSENT


def test_what_cannot_decode_says_why():
    found = rows("cpu")
    lacking = found[(found["phase"] == "decode") & (found["implementation"] == "dequant")].assign(
        implementation="cute_quantised", status="unsupported", reason="needs an NVIDIA GPU", median_us=None
    )
    decoding = section(pd.concat([found[found["implementation"] != "cute_quantised"], lacking]), "seed-003").tables[3]
    quantised = [row for row in decoding.rows if row[4] != "bf16"]
    assert len(quantised) == 8 and {row[9] for row in quantised} == {"cute_quantised, unsupported: needs an NVIDIA GPU"}
    assert {tuple(row[10:14]) for row in quantised} == {(ABSENT,) * 4}
