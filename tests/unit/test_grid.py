"""From config to jobs: what makes two cells, specs and hashes the same, and how many cells a grid has."""

from dataclasses import asdict, fields, replace

import pytest

from moe_routing_bench import config, grid
from moe_routing_bench.benches import BENCHES
from moe_routing_bench.settings import Settings

ENTRY = {"benches": ["pack"], "tokens": [64, 128], "hidden": [16], "experts": [8], "top_k": [1, 2]}
MODELS = {"tiny": {"hidden": 16, "intermediate": 24, "experts": 8, "top_k": 2, "router": "softmax_topk"}}
FULL = grid.Cell(
    "layer", 17, model="tiny", phase="prefill", tokens=64, hidden=16, intermediate=24, experts=8, top_k=2,
    capacity_factor=1.25, skew=0.5, sampler="exact", dtype="bf16", layout="compact", router="softmax_topk",
)  # fmt: skip
OTHER = {
    "bench": "routing", "seed": 18, "model": None, "phase": "decode", "capacity_factor": None, "skew": 0.0, "dtype": "fp32",
    "sampler": "plackett_luce", "layout": "padded", "router": "llama4",
}  # fmt: skip


def expand(*entries, **top):
    return grid.expand(config.load({"grid": list(entries), **top}), MODELS)


def hash_of(cell=FULL, implementations=("torch_loop",), settings=None):
    return grid.Job(cell, implementations, settings or Settings()).hash


def test_a_grid_is_the_product_of_its_axes_for_each_bench():
    assert len(expand(ENTRY)) == 4
    assert len(expand({**ENTRY, "capacity_factor": [1, "none"], "skew": [0, 0.5, 1.0]})) == 24
    assert len(expand({**ENTRY, "benches": ["pack", "combine"]})) == 8
    assert len(expand(ENTRY, {**ENTRY, "experts": [16]})) == 8
    assert len(expand({"benches": ["gate", "layer"], "model": ["tiny"], "tokens": [1, 2, 3]})) == 6


def test_an_axis_that_a_bench_does_not_depend_on_makes_no_cells():
    several = {**ENTRY, "hidden": [16, 32], "dtype": ["bf16", "fp32"], "layout": ["compact", "block64"]}
    assert len(expand({**several, "benches": ["pack"]})) == 4 * 8
    assert len(expand({**several, "benches": ["permute"]})) == 4 * 2
    assert len(expand({**several, "benches": ["gate"]})) == 4 * 2


@pytest.mark.parametrize("bench", BENCHES)
def test_projection_keeps_the_axes_of_a_bench_and_drops_the_others(bench):
    axes = BENCHES[bench].axes
    found = asdict(grid.project(replace(FULL, bench=bench)))
    for axis, value in asdict(FULL).items():
        if axis not in ("bench", "seed", "phase"):
            assert found[axis] == (value if axis in axes else None)


def test_a_cell_of_two_entries_is_measured_once_with_the_implementations_of_both():
    first, second = {**ENTRY, "implementations": ["triton"]}, {**ENTRY, "implementations": ["torch"], "tokens": [64]}
    jobs = expand(first, second)
    assert [job.implementations for job in jobs] == [("torch", "triton")] * 2 + [("triton",)] * 2


def test_equal_cells_are_spelt_alike():
    spelt = [{**ENTRY, "capacity_factor": [1], "skew": [0]}, {**ENTRY, "capacity_factor": [1.0], "skew": [0.0]}]
    assert [job.spec for job in expand(spelt[0])] == [job.spec for job in expand(spelt[1])]
    assert len(expand(*spelt)) == 4


def test_order_and_place_of_keys_change_nothing():
    backwards = dict(reversed({**ENTRY, "skew": [0.5]}.items()))
    measure = {"min_blocks": 5, "timeout": 60}
    one = expand({**ENTRY, "skew": [0.5]}, measure=measure)
    other = expand(backwards, measure=dict(reversed(measure.items())))
    assert [job.hash for job in one] == [job.hash for job in other]


def test_a_default_written_out_changes_nothing():
    written = {**ENTRY, "capacity_factor": ["none"], "skew": [0], "sampler": ["exact"], "dtype": ["bf16"]}
    assert [job.hash for job in expand(ENTRY)] == [job.hash for job in expand(written, measure={"min_blocks": 10})]


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_every_setting_is_part_of_the_hash(name):
    changed = replace(Settings(), **{name: getattr(Settings(), name) + 1})
    assert hash_of(settings=changed) != hash_of()


@pytest.mark.parametrize("name", [field.name for field in fields(grid.Cell) if field.name != "trace"])
def test_every_axis_is_part_of_the_hash(name):
    value = OTHER[name] if name in OTHER else getattr(FULL, name) + 1
    assert hash_of(replace(FULL, **{name: value})) != hash_of()


def test_swapped_values_and_other_implementations_change_the_hash():
    assert hash_of(replace(FULL, hidden=24, intermediate=16)) != hash_of()
    assert hash_of(settings=Settings(samples_per_block=10, min_blocks=5)) != hash_of()
    assert hash_of(implementations=("torch_loop", "torch_bmm")) != hash_of()


def test_the_content_of_a_trace_is_part_of_the_hash_and_its_timestamp_is_not(tmp_path):
    path = tmp_path / "trace.parquet"
    cell = replace(FULL, sampler="trace", skew=None, trace=str(path))
    path.write_bytes(b"one")
    before = hash_of(cell)
    path.touch()
    assert hash_of(cell) == before
    path.write_bytes(b"two")
    assert hash_of(cell) != before


def test_a_spec_holds_the_whole_job():
    for job in expand({**ENTRY, "capacity_factor": [1.25, "none"]}, measure={"timeout": 7}):
        assert grid.Job.from_spec(job.spec) == job


def test_keys_are_unique_and_readable():
    jobs = expand({**ENTRY, "capacity_factor": [1.25, "none"], "skew": [0, 0.5], "dtype": ["bf16", "fp16"]})
    keys = [job.cell.key for job in jobs]
    assert len(set(keys)) == len(keys) == 32
    assert "T64-H16-E8-k1-cf1.25-skew0.5-exact-fp16-compact-seed17" in keys


@pytest.mark.parametrize(("layout", "block"), [("compact", 1), ("padded", 1), ("block64", 64), ("block128", 128)])
def test_blocks_and_element_sizes(layout, block):
    assert replace(FULL, layout=layout).block == block
    assert [replace(FULL, dtype=name).dtype_bytes for name in ("bf16", "fp16", "fp32", "fp8_row")] == [2, 2, 4, 2]
    assert [replace(FULL, dtype=name).packed_bytes for name in ("bf16", "fp32", "fp8_row", "fp8_block128")] == [
        2,
        4,
        1,
        1,
    ]
