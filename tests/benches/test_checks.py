"""What the checks of the benches see: wrong pairs of expert and weight, a wrong route, and no more rounding than is declared."""

import pytest
import torch

from moe_routing_bench.benches.checks import Check, Cost, both, close, exact, nbytes, tolerance
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.draw import again
from moe_routing_kernels.routers import ROUTERS


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
    if torch.equal(swapped["topk_weights"], good["topk_weights"]):
        pytest.skip("the rule gives all experts of a token the same weight")
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


def test_exact_counts_what_differs() -> None:
    """NaN equals nothing, not even itself."""
    nan = torch.tensor([1.0, float("nan"), 3.0])
    assert exact(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]), "a") == Check()
    assert exact(torch.tensor([1, 5, 6]), torch.tensor([1, 2, 3]), "a") == Check(
        mismatches=2, error="a: 2 of 3 elements differ"
    )
    assert exact(nan, nan, "a").mismatches == 1


def test_the_limits_of_close_are_where_they_are_said_to_be() -> None:
    """Relative L2 of 3 / 5, and of each element 6 limits of (rms + |want|): 0.6 (5 / sqrt 2 + 4) here."""
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = close(torch.tensor([3.0, 1.0]), want, 0.6, "y")
    assert found == Check(0.6, 3.0, 0.6, 0, 0, None)
    outside = close(torch.tensor([3.0, 1.0]), want, 0.59, "y")
    assert outside == Check(
        0.6, 3.0, 0.59, 0, 0, "y: relative L2 error 6.00e-01 (limit 5.9e-01), 0 elements out of bounds"
    )
    many = torch.full((10_000,), 1.0, dtype=torch.float64)
    one_off = many.clone()
    for off, wrong in ((0.119, 0), (0.121, 1)):  # the limit of 0.01 allows 0.12 of an element, and an L2 error of 1.0
        one_off[7] = 1 + off
        found = close(one_off, many, 0.01, "y")
        assert (found.mismatches, found.error is not None, found.rel_l2_error < 0.01) == (wrong, bool(wrong), True)
    assert close(torch.zeros(3), torch.zeros(3), 0.1, "y") == Check(0.0, 0.0, 0.1)
    assert close(torch.full((3,), 1e-3), torch.zeros(3), 0.1, "y").rel_l2_error > 1e20, "nothing is near to nothing"


def test_what_is_not_finite_is_counted() -> None:
    got = torch.tensor([1.0, float("nan"), float("inf"), 4.0])
    found = close(got, torch.ones(4), 10.0, "y")
    assert found.error == "y: 2 of 4 elements are not finite" and found.mismatches == 2


def test_the_worse_of_two() -> None:
    """Field by field; the first error that there is."""
    one, other = Check(1.0, 5.0, 3.0, 7, 1, None), Check(2.0, 4.0, 2.0, 5, 2, "wrong")
    assert both(one, other) == both(other, one) == Check(2.0, 5.0, 3.0, 12, 3, "wrong")
    assert both(other, Check(error="later")).error == "wrong"


def test_tolerance_and_cost() -> None:
    """1.5 sqrt(n) unit roundoffs; bytes and FLOPs add up."""
    assert tolerance("bf16") == pytest.approx(1.5 * 2**-8) and tolerance("fp32", 16) == pytest.approx(6 * 2**-24)
    one, other = Cost(1, 2, ((3, 4, 5),), 7), Cost(10, 20, ((1, 1, 1),), 30)
    assert one + other == Cost(11, 22, ((3, 4, 5), (1, 1, 1)), 37)
    fast = Cost(0, 0, ((1, 1, 1),), rate=2)  # the rate of what has some of its products as fast
    assert (one + other).rate == 1 and (one + fast).rate == (fast + one).rate == 2
    assert (Cost(1, 2).flops, one.flops, (one + other).flops) == (0, 127, 159)
    assert nbytes(torch.zeros(3, 5), torch.zeros(7, dtype=torch.int8)) == 67


def test_cost_of_each_of_several_devices() -> None:
    """Rows of a product are shared out, not its sums or columns; the rate is that of the device."""
    whole = Cost(10, 21, ((8, 4, 5), (2, 1, 1)), 7, rate=2)
    assert whole.of_each(2) == Cost(5, 10, ((4, 4, 5), (1, 1, 1)), 3, rate=2) and whole.of_each(1) == whole
