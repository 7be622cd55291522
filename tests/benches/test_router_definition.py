"""What the bench `router` accepts: logits rounded to bf16 are refused, choices within the bound of float32 sums are ties."""

import pytest
import torch

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.benches.router import definition
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.skew import coefficient_of_variation
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.target import Target

SHAPE = {"sampler": "exact", "dtype": "bf16"}


def drawn(tokens, hidden, experts, top_k, skew=0.0, router="softmax_topk_renorm"):
    """A cell with its inputs and reference."""
    cell = cell_of(
        "router", tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, skew=skew, router=router, **SHAPE
    )
    inputs = definition.build(cell, 17, "cpu")
    return cell, inputs, definition.reference(cell, inputs)


def judged(cell, inputs, expected, logits):
    """The check of what the rule makes of these logits."""
    ids, weights = ROUTERS[cell.router].load()(logits, cell.top_k, inputs.get("bias"))
    return definition.check(cell, inputs, {"topk_ids": ids, "topk_weights": weights}, expected)


@pytest.mark.parametrize("router", list(ROUTERS))
def test_float32_logits_are_right_and_bf16_logits_are_not(router):
    cell, inputs, expected = drawn(200, 512, 64, 4, router=router)
    logits = inputs["x"].float() @ inputs["router_weight"].float().T
    assert (logits - expected["logits"]).abs().max() < 0.1 * expected["bound"].min()
    assert judged(cell, inputs, expected, logits).error is None
    assert judged(cell, inputs, expected, logits.bfloat16()).error


@pytest.mark.parametrize(("distance", "right"), [(0.5, True), (1.5, True), (5.0, False)])
@pytest.mark.parametrize("router", ["softmax_topk_renorm", "sqrtsoftplus_renorm"])
def test_two_experts_may_change_places_only_within_the_bound(router, distance, right):
    cell, inputs, expected = drawn(3, 256, 16, 4, router=router)
    order, bound = expected["logits"].argsort(1, descending=True), float(expected["bound"][1])
    last, next_one = order[1, 3], order[1, 4]
    for logits in (expected["logits"], changed := expected["logits"].clone()):
        logits[1, next_one] = logits[1, last] - distance * bound  # the reference still prefers `last`
    changed[1, next_one] = changed[1, last] + 1e-9
    ids, weights = ROUTERS[router].load()(expected["logits"], 4, inputs.get("bias"))
    found = judged(cell, inputs, expected | {"topk_ids": ids, "topk_weights": weights}, changed)
    assert (found.error is None) == right, found
    assert found.ties == right


@pytest.mark.parametrize(("factor", "right"), [(0.8, True), (1.3, False)])
def test_one_weight_among_many_may_be_off_only_by_its_own_bound(factor, right):
    """Among 65,536 weights its error is within the limit of all: six times the limit of both the weight and their mean size."""
    cell, inputs, expected = drawn(16_384, 32, 8, 4)
    weights, limit = expected["topk_weights"].float().clone(), 1.5 * 2**-24 + 4 * float(expected["bound"].max())
    weights[5, 1] += factor * 6 * limit * (expected["topk_weights"].square().mean().sqrt() + weights[5, 1])
    found = definition.check(cell, inputs, {"topk_ids": expected["topk_ids"], "topk_weights": weights}, expected)
    assert (found.error is None) == right and found.rel_l2_error < found.tolerance


def test_a_row_of_wrong_ids_is_refused():
    cell, inputs, expected = drawn(5, 64, 8, 2)
    for ids in (torch.full((5, 2), 8), torch.full((5, 2), 3), (expected["topk_ids"] + 1) % 8):
        outputs = {"topk_ids": ids.int(), "topk_weights": expected["topk_weights"]}
        assert definition.check(cell, inputs, outputs, expected).error


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.7])
def test_tokens_bring_about_the_drawn_loads(skew):
    _, inputs, expected = drawn(512, 512, 64, 4, skew)
    loads = expected["topk_ids"].flatten().long().bincount(minlength=64).tolist()
    assert abs(coefficient_of_variation(loads) - skew) < 0.05
    assert 0.9 < float(inputs["x"].float().std()) < 1.1


def test_as_many_experts_as_features_make_no_huge_tokens():
    """The logits of the drawn assignment would need some of 15 times the usual size: they are reached in part."""
    _, inputs, _ = drawn(64, 64, 64, 4)
    assert 1 < float(inputs["x"].float().std()) < 2


@pytest.mark.parametrize("name", [one.name for one in BENCHES["router"].implementations])
def test_what_has_nothing_to_compile_ahead_says_so(name, monkeypatch):
    """`compile` asks every implementation of a config, those of torch as well."""
    seen = []
    for module in ("gate.cute_gate", "router.cute_router"):
        monkeypatch.setattr(
            f"moe_routing_kernels.{module}.precompile", lambda *given, module=module: seen.append(module)
        )
    monkeypatch.setattr(Bench, "supports", lambda *_: None)
    cell = cell_of("router", tokens=8, hidden=64, experts=16, top_k=2, dtype="bf16")
    BENCHES["router"].precompile(name, cell, Target.of("sm_90a"))
    assert seen == {"matmul_cute": ["gate.cute_gate"], "cute": ["router.cute_router"]}.get(name, [])


@pytest.mark.parametrize("router", ROUTERS)
def test_another_choice_among_equal_scores_is_right(router):
    """Products of few values tie all the time, between more than two experts; an implementation that sees them in reverse order chooses
    the last of equals. Weights of other tokens are wrong all the same."""
    cell = cell_of("router", tokens=512, hidden=32, experts=64, top_k=1 if router == "llama4" else 6, router=router)
    rng = torch.Generator().manual_seed(5)
    x, weight = torch.randint(-1, 2, (512, 32), generator=rng) / 2, torch.randint(-1, 2, (64, 32), generator=rng) / 4
    inputs = {"x": x.bfloat16(), "router_weight": weight.bfloat16()}
    if ROUTERS[router].bias:
        inputs["bias"] = torch.randint(-2, 3, (64,), generator=rng) / 8
    expected, bias = definition.reference(cell, inputs), inputs.get("bias")
    ids, weights = ROUTERS[router].load()((x @ weight.T).flip(-1), cell.top_k, bias if bias is None else bias.flip(-1))
    outputs = {"topk_ids": (63 - ids).int(), "topk_weights": weights.float()}
    found = definition.check(cell, inputs, outputs, expected)
    assert found.error is None and found.ties > 30, found
    swapped = outputs | {"topk_weights": outputs["topk_weights"].roll(1, 0)}
    same = torch.equal(swapped["topk_weights"], outputs["topk_weights"])  # a rule may give all experts the same weight
    assert same or "topk_weights" in definition.check(cell, inputs, swapped, expected).error
    worse = outputs | {"topk_ids": outputs["topk_ids"].roll(1, 0)}
    assert "other experts" in definition.check(cell, inputs, worse, expected).error
