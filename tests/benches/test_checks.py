"""What the checks of the benches see: wrong pairs of expert and weight, a wrong route, and no more rounding than is declared."""

import pytest
import torch

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.routers import ROUTERS
from moe_routing_bench.workload.draw import again


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_of_other_experts_are_seen(router: str, dtype: str) -> None:
    """The right weights in each row, given to the wrong experts."""
    cell = cell_of("gate", tokens=64, experts=16, top_k=4, router=router, dtype=dtype)
    definition = BENCHES["gate"].definition()
    inputs = definition.build(cell, 3, "cpu")
    expected = definition.reference(cell, inputs)
    good = {"topk_ids": expected["topk_ids"], "topk_weights": expected["topk_weights"].float()}
    assert definition.check(cell, inputs, good, expected).error is None
    swapped = good | {"topk_weights": good["topk_weights"].roll(1, dims=1)}
    assert "topk_weights" in (definition.check(cell, inputs, swapped, expected).error or "")


def test_quack_alone_may_round_as_quack_does() -> None:
    """Weights off by the bits that hold an expert's index, or rounded to bf16."""
    bench = BENCHES["gate"]
    for dtype, off in (("fp32", 2.0**-18), ("bf16", 2.0**-9)):
        cell = cell_of("gate", tokens=64, experts=64, top_k=4, dtype=dtype)
        inputs = bench.definition().build(cell, 3, "cpu")
        expected = bench.definition().reference(cell, inputs)
        rounded = {"topk_ids": expected["topk_ids"], "topk_weights": expected["topk_weights"].float() * (1 + off)}
        errors = {name: bench.check(name, cell, inputs, rounded, expected).error for name in ("torch", "quack")}
        assert errors["quack"] is None and "topk_weights" in errors["torch"]


@pytest.mark.parametrize("stage", ["topk_ids", "topk_weights", "offsets", "order", "inverse", "packed"])
@pytest.mark.parametrize("bench", ["routing", "layer"])
def test_what_a_stage_hands_on_is_checked(bench: str, stage: str) -> None:
    """combined = x is right for identity experts and weights that sum to 1, whatever was routed."""
    cell = cell_of(bench, tokens=40, hidden=16, intermediate=8, experts=8, top_k=2, capacity_factor=1.0, skew=0.5)
    one, definition = BENCHES[bench], BENCHES[bench].definition()
    inputs = definition.build(cell, 3, "cpu") | (definition.shared(cell, 3, "cpu") if one.shared else {})
    call = one.bind(one.baseline, cell, inputs | definition.empty_outputs(cell, inputs))
    tensors = call()
    assert one.check_stages(one.baseline, cell, tensors).error is None
    wrong = {"topk_ids": 1 - tensors["topk_ids"]} if stage == "topk_ids" else {stage: tensors[stage].roll(1, 0)}
    assert one.check_stages(one.baseline, cell, tensors | wrong).error is not None
    hidden = {name: tensor for name, tensor in tensors.items() if name != stage}
    if bench == "routing" and stage in ("topk_ids", "packed"):
        expected = definition.reference(cell, inputs)
        assert "not shown" in (definition.check(cell, inputs, hidden, expected).error or "")


def test_a_fresh_draw_has_the_loads_of_the_first() -> None:
    """Other ids for other tokens, as many rows in every layout: tensors keep their shapes."""
    for sampler, layout in (("exact", "block64"), ("plackett_luce", "block64"), ("plackett_luce", "compact")):
        cell = cell_of(
            "pack", tokens=300, hidden=8, experts=12, top_k=3, capacity_factor=0.8, skew=0.7, layout=layout
        ).but(sampler=sampler)
        definition = BENCHES["pack"].definition()
        first, fresh = (definition.build(cell, seed, "cpu") for seed in (5, again(5, 99)))
        loads = [one["topk_ids"].flatten().long().bincount(minlength=12) for one in (first, fresh)]
        assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in fresh.items()}
        assert loads[0].sort().values.equal(loads[1].sort().values) and not loads[0].equal(loads[1])
        assert not torch.equal(first["x"], fresh["x"]) and not torch.equal(first["topk_ids"], fresh["topk_ids"])
