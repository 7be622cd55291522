"""From config to jobs: what makes two cells, specs and hashes the same, and how many cells a grid has."""

import json
from dataclasses import fields, replace

import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes
from moe_routing_bench.config import expand as expansion
from moe_routing_bench.config import load as config
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.config.presets import Preset
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_kernels.errors import UserError

ENTRY = {"benches": ["pack"], "tokens": [64, 128], "hidden": [16], "experts": [8], "top_k": [1, 2]}
TINY = {"hidden": 16, "intermediate": 24, "experts": 8, "top_k": 2, "router": "softmax_topk"}
MODELS = {
    "tiny": Preset(**TINY),
    "sharing": Preset(**TINY, activation="swiglu", shared_experts=2, shared_intermediate=48),
    "gated": Preset(**TINY, activation="swiglu", shared_experts=1, shared_intermediate=24, shared_gate="sigmoid"),
}
FULL = cell_of(
    "layer",
    tokens=64,
    hidden=16,
    intermediate=24,
    experts=8,
    top_k=2,
    capacity_factor=1.25,
    skew=0.5,
    router="softmax_topk",
)


def expand(*entries, **top):
    return expansion.expand(config.load({"grid": list(entries), **top}), MODELS)


def hash_of(cell=FULL, implementations=("torch_loop",), settings=None):
    return Job(cell, implementations, settings or Settings()).hash


def test_a_grid_is_the_product_of_its_axes_for_each_bench():
    assert len(expand(ENTRY)) == 4
    assert len(expand({**ENTRY, "capacity_factor": [1, "none"], "skew": [0, 0.5, 1.0]})) == 24
    assert len(expand({**ENTRY, "benches": ["pack", "combine"]})) == 8
    assert len(expand(ENTRY, {**ENTRY, "experts": [16]})) == 8
    assert len(expand({"benches": ["gate", "layer"], "model": ["tiny"], "tokens": [1, 2, 3]})) == 6


def test_an_axis_that_a_bench_does_not_read_makes_no_cells():
    several = {**ENTRY, "hidden": [16, 32], "dtype": ["bf16", "fp32"], "layout": ["compact", "block64"]}
    assert len(expand({**several, "benches": ["pack"]})) == 4 * 8
    assert len(expand({**several, "benches": ["permute"]})) == 4 * 2
    assert len(expand({**several, "benches": ["gate"]})) == 4 * 2


@pytest.mark.parametrize("bench", BENCHES)
def test_a_cell_holds_the_axes_of_its_bench_and_no_others(bench):
    entry = {"benches": [bench], "model": ["tiny"], "tokens": [64], "phase": "decode"}
    (job,) = expand(entry, seed=3)
    universal, sparse = (
        {axis.name for axis in axes.AXES.values() if getattr(axis, kind)} for kind in ("universal", "sparse")
    )
    assert {name for name, _ in job.cell.values} == (universal | set(BENCHES[bench].axes)) - sparse
    assert (job.cell.seed, job.cell.phase, job.cell.tokens) == (3, "decode", 64)
    assert job.cell.get("hidden", 16) == 16 and job.cell.get("no such axis") is None
    with pytest.raises(AttributeError, match=f"{bench} has no axis trials"):
        _ = job.cell.trials


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
    written |= {"packed": ["bf16"], "phase": "prefill"}
    assert [job.hash for job in expand(ENTRY)] == [job.hash for job in expand(written, measure={"min_blocks": 20})]


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_every_setting_is_part_of_the_hash(name):
    changed = replace(Settings(), **{name: getattr(Settings(), name) + 1})
    assert hash_of(settings=changed) != hash_of()


@pytest.mark.parametrize("name", [name for name, _ in FULL.values if name != "trace"])
def test_every_axis_is_part_of_the_hash(name):
    value = FULL.get(name)
    other = value + 1 if isinstance(value, int | float) else "another"
    assert hash_of(FULL.but(**{name: other})) != hash_of()
    assert hash_of(FULL.but("routing")) != hash_of()


def test_swapped_values_and_other_implementations_change_the_hash():
    assert hash_of(FULL.but(hidden=24, intermediate=16)) != hash_of()
    assert hash_of(settings=Settings(samples_per_block=10, min_blocks=5)) != hash_of()
    assert hash_of(implementations=("torch_loop", "torch_bmm")) != hash_of()


@pytest.mark.parametrize("part", [{"twins": ("torch_loop",)}, {"plugins": ("own:PACK",)}, {"isolate": "all"}])
def test_every_part_of_a_job_is_part_of_the_hash_where_it_is_not_the_default(part):
    """Hashes of stored rows stay: the spec of a plain job has no further part."""
    plain = Job(FULL, ("torch_loop",), Settings())
    other = replace(plain, **part)
    assert other.hash != plain.hash and Job.from_spec(other.spec) == other
    assert set(json.loads(plain.spec)) == {"cell", "implementations", "settings"}
    assert set(json.loads(other.spec)) - set(json.loads(plain.spec)) == set(part)


def test_the_content_of_a_trace_is_part_of_the_hash_and_its_timestamp_is_not(tmp_path):
    path = tmp_path / "trace.parquet"
    cell = FULL.but(sampler="trace", skew=None, trace=str(path))
    path.write_bytes(b"one")
    before = hash_of(cell)
    path.touch()
    assert hash_of(cell) == before
    path.write_bytes(b"two")
    assert hash_of(cell) != before


def test_a_spec_holds_the_whole_job():
    for job in expand({**ENTRY, "capacity_factor": [1.25, "none"]}, measure={"timeout": 7}):
        assert Job.from_spec(job.spec) == job


def test_keys_are_unique_and_readable():
    jobs = expand(
        {**ENTRY, "capacity_factor": [1.25, "none"], "skew": [0, 0.5], "dtype": ["bf16", "fp16"]},
        {**ENTRY, "packed": ["fp8_row"]},
    )
    keys = [job.cell.key for job in jobs]
    assert len(set(keys)) == len(keys) == 36
    assert "T64-H16-E8-k1-cf1.25-skew0.5-exact-fp16-compact-seed17" in keys
    assert "T64-H16-E8-k1-cfnone-skew0-exact-bf16-packed-fp8_row-compact-seed17" in keys


def test_phases_and_presets_are_other_cells_under_other_keys():
    entry = {"benches": ["gate", "routing"], "model": ["tiny"], "tokens": [64]}
    jobs = expand(entry, {**entry, "phase": "decode"}, {**ENTRY, "benches": ["gate", "routing"], "top_k": [2]})
    gate = [job.cell.key for job in jobs if job.cell.bench == "gate"]
    routing = [job.cell.key for job in jobs if job.cell.bench == "routing"]
    assert len(set(gate)) == len(gate) and len(set(routing)) == len(routing) == 4
    key = cell_of("gate", tokens=64, experts=8, top_k=2, router="softmax_topk").key
    assert key in gate and f"decode-{key}" in gate
    assert routing[0].startswith("tiny-T64-") and routing[1].startswith("tiny-decode-T64-")


def test_shared_experts_are_there_where_they_are_asked_for():
    """A cell without them says nothing of them: neither its key nor its spec, as before there were any."""
    entry = {"benches": ["gate", "layer"], "tokens": [64]}
    models = {**entry, "model": ["sharing", "gated"]}
    plain, both = expand(models), expand({**models, "shared_experts": True})
    assert expand({**models, "shared_experts": False, "shared_intermediate": ["none"]}) == plain
    assert not any("shared" in job.spec or "-S" in job.cell.key for job in plain)
    gates, layers = ([job.cell for job in both if job.cell.bench == name] for name in ("gate", "layer"))
    assert gates == [job.cell for job in plain if job.cell.bench == "gate"]
    assert [(cell.shared_intermediate, cell.get("shared_gate")) for cell in layers] == [(48, None), (24, "sigmoid")]
    assert ["-k2-S48-cf" in layers[0].key, "-k2-S24-gate-sigmoid-cf" in layers[1].key] == [True, True]
    sizes = {name: [value] for name, value in TINY.items()}
    given = {**entry, **sizes, "shared_intermediate": ["none", 48], "shared_gate": ["sigmoid"]}
    with pytest.raises(UserError, match="shared_gate: got 'sigmoid'; allowed: none without shared_intermediate"):
        expand({**given, "benches": ["layer"]})
    given = {**given, "shared_intermediate": [24, 48]}
    assert [job.cell.get("shared_gate") for job in expand({**given, "benches": ["layer"]})] == ["sigmoid"] * 2


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"model": ["tiny"]}, "grid shared_experts: got True; allowed: false for tiny"),
        ({"model": ["gated"], "shared_intermediate": [8]}, "grid shared_intermediate: got .*a model sets it"),
        ({"model": ["sharing"], "shared_gate": ["sigmoid"]}, "grid shared_gate: got .*a model sets it"),
        ({name: [value] for name, value in TINY.items()}, "allowed: false without a model; hint: give shared_intermed"),
    ],
)
def test_shared_experts_of_no_model_are_refused(axes, said):
    with pytest.raises(UserError, match=said):
        expand({"benches": ["layer"], "tokens": [64], "shared_experts": True, **axes})


def test_two_cells_of_one_key_are_refused():
    with pytest.raises(UserError, match=r"cell key.*one cell per key"):
        expand({**ENTRY, "capacity_factor": [1.25, 1.2500001]})


SMALL = {"tokens": [1, 2, 3, 4], "experts": [4], "top_k": [1]}


def test_a_grid_of_the_most_cells_is_expanded_and_no_larger_one(monkeypatch) -> None:
    monkeypatch.setattr(expansion, "MOST_CELLS", 4)
    assert len(list(expansion._products(BENCHES["permute"], SMALL))) == 4
    monkeypatch.setattr(expansion, "MOST_CELLS", 3)
    with pytest.raises(UserError, match="4 cells of permute"):
        list(expansion._products(BENCHES["permute"], SMALL))


def test_a_cell_of_the_most_rows_is_one_and_no_larger_one(monkeypatch) -> None:
    monkeypatch.setattr(axes, "MOST_ROWS", 8)
    axes.check("permute", {"tokens": 4, "experts": 4, "top_k": 2})
    with pytest.raises(UserError, match="10 rows"):
        axes.check("permute", {"tokens": 5, "experts": 4, "top_k": 2})


def test_a_trace_has_no_skew_and_only_a_trace_has_a_file(monkeypatch) -> None:
    monkeypatch.setattr(axes, "check", lambda *_: None)
    asked = SMALL | {"tokens": [4], "skew": [0.5], "trace": ["f"]}
    found = [
        next(expansion._products(BENCHES["permute"], asked | {"sampler": [sampler]})) for sampler in ("trace", "exact")
    ]
    assert [(cell.get("skew"), cell.get("trace")) for cell in found] == [(None, "f"), (0.5, None)]
