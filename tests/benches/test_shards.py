"""Layers and experts of one rank of several: tensor-parallel ranks split each expert's width, expert-parallel ones the experts."""

import math

import numpy as np
import pytest
import torch

from campaign import CAMPAIGN
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import supervisor
from moe_routing_bench.workload.draw import again
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.permute import RowLayout, torch_permute
from moe_routing_kernels.target import Target
from packs import no_ceilings

__all__ = ["no_ceilings"]

QUICK = Settings(check_seeds=2, warmup_ms=1, interval_us=200, min_blocks=10, max_blocks=10, max_seconds=1, wall_calls=1)
SHAPE = {"tokens": 30, "hidden": 32, "intermediate": 48, "experts": 8, "top_k": 3}


def case(bench, seed=3, **axes):
    cell, definition = cell_of(bench, **SHAPE | axes), BENCHES[bench].definition()
    return cell, definition, definition.build(cell, seed, "cpu") | definition.shared(cell, seed, "cpu")


@pytest.mark.parametrize("bench", ["experts", "layer"])
def test_a_cell_of_one_rank_has_a_part_of_the_widths(bench):
    shared = {"shared_intermediate": 96} if bench == "layer" else {}
    whole, shard = cell_of(bench, **SHAPE, **shared), cell_of(bench, **SHAPE, **shared, tp=4, ep=2)
    assert (shard.intermediate, shard.experts, shard.tp, shard.ep) == (12, 8, 4, 2) and shard.hidden == whole.hidden
    assert shard.get("shared_intermediate") == (24 if shared else None)
    assert "-I12-E8-k3-" in shard.key and "-tp4-ep2-" in shard.key
    assert cell_of(bench, **SHAPE, **shared, tp=1, ep=1) == whole and "tp" not in whole.key


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"tp": 5}, "tp: got 5; allowed: a divisor of intermediate=48"),
        ({"tp": 16, "shared_intermediate": 24}, "tp: got 16; allowed: a divisor of shared_intermediate=24"),
        ({"ep": 3}, "ep: got 3; allowed: a divisor of experts=8"),
        ({"ep": 16}, "ep: got 16; allowed: a divisor of experts=8"),
        ({"tp": 0}, "tp"),
    ],
)
def test_ranks_without_equal_parts_are_refused(axes, said):
    with pytest.raises(UserError, match=said):
        cell_of("layer", **SHAPE | axes)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_tensor_parallel_ranks_add_up_to_the_layer(activation):
    """Each with its columns of gates and ups and of the down weights, and all tokens."""
    whole, definition, inputs = case("layer", activation=activation, dtype="fp32")
    shard, total = cell_of("layer", **SHAPE, activation=activation, dtype="fp32", tp=3), 0
    wide = inputs["w13"].unflatten(1, (-1, 48))  # gates and ups, or ups alone
    for rank in range(3):
        columns = slice(16 * rank, 16 * (rank + 1))
        part = {"w13": wide[:, :, columns].flatten(1, 2), "w2": inputs["w2"][:, :, columns]}
        assert {name: one.shape for name, one in part.items()} == {
            name: one.shape for name, one in definition.shared(shard, 3, "cpu").items()
        }
        total += definition.reference(shard, inputs | part)["combined"]
    expected = definition.reference(whole, inputs)["combined"]
    assert (total - expected).norm() <= 1e-12 * expected.norm() and expected.norm() > 0


@pytest.mark.parametrize("factor", [None, 0.8])
def test_an_expert_parallel_rank_is_the_layer_whose_other_experts_give_nothing(factor):
    whole, definition, inputs = case("layer", dtype="fp32", capacity_factor=factor)
    shard = cell_of("layer", **SHAPE, dtype="fp32", capacity_factor=factor, ep=4)
    own = {name: inputs[name][:2] for name in ("w13", "w2")}
    assert {name: one.shape for name, one in own.items()} == {
        name: one.shape for name, one in definition.shared(shard, 3, "cpu").items()
    }
    silent = inputs | {"w2": inputs["w2"].clone().index_fill_(0, torch.arange(2, 8), 0)}
    found, expected = definition.reference(shard, inputs | own), definition.reference(whole, silent)
    assert torch.equal(found["topk_ids"], expected["topk_ids"]), "the router is that of all experts"
    assert (found["combined"] - expected["combined"]).norm() <= 1e-12 * expected["combined"].norm() > 0
    assert bool((found["inverse"] >= 0).any()) and not bool(((found["inverse"] >= 0) & (found["topk_ids"] >= 2)).any())
    cost, all_of_it = (
        definition.cost(one, inputs | weights, {"combined": inputs["x"]}, known)
        for one, weights, known in ((shard, own, found), (whole, {}, expected))
    )
    rows = int((found["inverse"] >= 0).sum())
    assert cost.flops == 6 * rows * 32 * 48 < all_of_it.flops and cost.read_bytes < all_of_it.read_bytes


@pytest.mark.parametrize(
    ("layout", "capacity"), [("compact", None), ("compact", 3), ("block64", None), ("block64", 3), ("padded", 3)]
)
def test_rows_of_one_rank(layout, capacity):
    """Against a plain loop, and in plain torch; ids of no expert at all, too."""
    rng = np.random.default_rng(5)
    ids = np.stack([rng.choice(12, 3, replace=False) for _ in range(20)]).astype(np.int32)
    known = RowLayout(20, 3, 4, capacity, layout, ranks=3)
    made = row_map(known, ids, known.rows)
    align, start = known.align, 0
    for expert in range(4):
        mine = np.flatnonzero(ids.reshape(-1) == expert)[:capacity]
        assert made.counts[expert] == len(mine) and made.offsets[expert] == start
        assert (made.order[start : start + len(mine)] == mine).all()
        assert (made.inverse.reshape(-1)[mine] == start + np.arange(len(mine))).all()
        start += capacity if layout == "padded" else math.ceil(len(mine) / align) * align
    assert made.offsets[4] == start and (made.inverse[ids >= 4] == -1).all() and (made.order[start:] == -1).all()
    counts, offsets, order, inverse = torch_permute.permute(known.problem, torch.from_numpy(np.where(ids > 9, -1, ids)))
    for found, wanted in zip(
        (counts, offsets, order, inverse), (made.counts, made.offsets, made.order, made.inverse), strict=True
    ):
        assert (found.numpy() == wanted).all()


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_other_draws_have_as_many_rows_of_the_rank(skew):
    cell, definition, inputs = case("experts", skew=skew, ep=4)
    rows = {int(inputs["offsets"][-1])}
    loads = {tuple(sorted(inputs["offsets"].diff().tolist()))}
    first = inputs["topk_ids"]
    for nonce in range(5):
        drawn = definition.build(cell, again(3, nonce), "cpu")
        assert not torch.equal(drawn["topk_ids"], first) and drawn["offsets"].shape == (3,)
        rows.add(int(drawn["offsets"][-1]))
        loads.add(tuple(sorted(drawn["offsets"].diff().tolist())))
    assert len(rows) == len(loads) == 1


@pytest.mark.usefixtures("no_ceilings")
@pytest.mark.parametrize(
    ("bench", "implementations", "axes"),
    [
        pytest.param("layer", ("torch_loop", "torch_grouped_mm", "torch_gather_loop", "auto"), {}, marks=CAMPAIGN),
        ("layer", ("torch_loop", "torch_grouped_mm"), {"capacity_factor": 1.0, "tp": 3}),
        ("experts", ("torch_loop", "torch_bmm"), {"capacity_factor": 1.0, "layout": "padded"}),
        ("layer", ("torch_loop", "torch_grouped_mm", "torch_gather_loop"), {"tokens": 1, "experts": 64, "top_k": 1}),
    ],
)
def test_implementations_run_one_rank(bench, implementations, axes):
    """Also one that no token is sent to: experts of others have the only one."""
    cell = cell_of(bench, **SHAPE | axes, ep=8 if axes.get("tokens") == 1 else 4)
    rows = supervisor.measure(Job(cell, implementations, QUICK), None)
    assert [row["status"] for row in rows] == ["ok"] * len(implementations), [row.get("reason") for row in rows]
    local = row_layout(cell).experts
    assert all(len(row["expert_load"]) == local and row["ep"] == cell.ep for row in rows)
    assert all(0 <= row["drop_rate"] <= 1 and math.isfinite(row["load_cv"]) for row in rows)


def test_libraries_that_give_every_assignment_a_row_say_so():
    cell, target = cell_of("layer", **SHAPE | {"hidden": 64, "intermediate": 64}, ep=2), Target.of("sm_90a")
    for name in ("vllm_triton", "sglang_triton", "sonicmoe", "transformers_eager", "flashinfer"):
        assert "one of 2 ranks" in (BENCHES["layer"].supports(name, cell, target) or "")


def test_tiles_are_those_of_the_rows_that_a_rank_has():
    """A rank's buffer has room for all assignments, of which it gets its part on average."""
    pytest.importorskip("cutlass")
    from moe_routing_kernels.experts import cute_experts, cute_fp8, cute_quantised

    for rows in (64, 4096, 1 << 17):
        for module, formats in (
            (cute_experts, ("bf16", "bf16", "bf16")),
            (cute_quantised, ("bf16", "bf16", "int4_g128")),
            (cute_fp8, ("bf16", "fp8_block128", "e4m3_block128")),
        ):
            shard = Experts(8 * rows, 2048, 768, 16, *formats, ranks=8)
            alone = Experts(rows, 2048, 768, 16, *formats)
            assert module.gemms(shard) == module.gemms(alone), (module.__name__, rows)


def test_a_choice_knows_the_mean_of_rows():
    from moe_routing_kernels.layer import Layer

    for ranks in (1, 8):
        layout = RowLayout(64, 8, 128 // ranks, ranks=ranks)
        shape = chooser._shape(Layer(layout, 64, 64, "bf16", "bf16", "bf16", "softmax_topk"), Target.of("sm_90a"))
        assert shape.mean_rows == 4.0
