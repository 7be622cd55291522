"""Answers that are wrong by little: each check refuses what one token, one rounding more or one input less makes of them."""

import pytest
import torch
from torch import Tensor

from moe_routing_bench.benches.checks import rounded
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.draw import again
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.routers import ROUTERS

Tensors = dict[str, Tensor]


def drawn(bench: str, seed: int = 3, **axes):
    """A cell with its definition, inputs and reference."""
    cell, definition = cell_of(bench, **axes), BENCHES[bench].definition()
    inputs = definition.build(cell, seed, "cpu")
    if hasattr(definition, "shared"):
        inputs |= definition.shared(cell, seed, "cpu")
    return cell, definition, inputs, definition.reference(cell, inputs)


def parts(inputs: Tensors) -> tuple[Tensor, Tensor]:
    """Rows (T, k, H) and weights (T, k) of the kept assignments in float32; those of dropped ones are zero."""
    inverse = inputs["inverse"].long()
    return inputs["y"][inverse.clamp_min(0)].float(), torch.where(inverse >= 0, inputs["topk_weights"], 0.0)


def right(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows * weights.unsqueeze(2)).sum(1)


def summed_narrow(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Every sum on the way is rounded."""
    total = torch.zeros_like(rows[:, 0], dtype=dtype)
    for j in range(rows.shape[1]):
        total = (total.float() + rows[:, j] * weights[:, j, None]).to(dtype)
    return total


def narrow_weights(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    return right(rows, weights.bfloat16().float())


def lacks_a_term(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """One token lacks the expert that weighs least of all."""
    kept = torch.where(weights > 0, weights, 9.0)
    kept[weights.count_nonzero(1) < 2] = 9.0
    return right(rows, weights.masked_fill(torch.arange(weights.numel()).view_as(weights) == kept.argmin(), 0.0))


def stale_where_dropped(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens that nobody took hold something small, not zeros."""
    return right(rows, weights).masked_fill(weights.eq(0).all(1, keepdim=True), 1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("wrong", [summed_narrow, narrow_weights, lacks_a_term, stale_where_dropped])
def test_combine_is_a_sum_that_is_rounded_once(wrong, dtype: str) -> None:
    """All of these are within the relative L2 error of one rounding."""
    axes = {"tokens": 300, "hidden": 64, "experts": 16, "top_k": 2, "dtype": dtype, "skew": 0.6}
    cell, definition, inputs, expected = drawn("combine", **axes, capacity_factor=0.6)
    rows, weights = parts(inputs)
    kind = inputs["y"].dtype
    good = definition.check(cell, inputs, {"combined": right(rows, weights).to(kind)}, expected)
    assert good.error is None
    found = definition.check(cell, inputs, {"combined": wrong(rows, weights, kind).to(kind)}, expected)
    assert "combined" in (found.error or ""), found
    assert found.mismatches > 0


def test_declared_roundings_of_weights_are_not_held_against_a_sum() -> None:
    cell, _, inputs, expected = drawn("combine", tokens=200, hidden=64, experts=16, top_k=8, dtype="bf16")
    rows, weights = parts(inputs)
    outputs = {"combined": narrow_weights(rows, weights, torch.bfloat16).bfloat16()}
    errors = {
        name: BENCHES["combine"].check(name, cell, inputs, outputs, expected).error for name in ("torch", "sglang")
    }
    assert errors["sglang"] is None and "combined" in errors["torch"]


def test_a_residual_is_a_term_of_the_sum() -> None:
    """Where it cancels the rest, what is left is as inexact as both were."""
    cell, definition, inputs, expected = drawn("combine", tokens=20, hidden=16, experts=4, top_k=2, dtype="fp32")
    inputs["residual"] = -expected["combined"].float() + 1e-9
    want = {"combined": expected["combined"] + inputs["residual"]}
    got = {"combined": right(*parts(inputs)) + inputs["residual"]}
    found = definition.check(cell, inputs, got, want)
    assert found.mismatches == 0 and found.rel_l2_error > 1e-3


def test_what_one_rounding_may_make_of_a_sum() -> None:
    """A roundoff of the sum, or of the least normal number; those of float32 and of a term are of the terms."""
    want = torch.tensor([2.0, -4.0, 0.0, 0.0], dtype=torch.float64)
    terms = torch.tensor([8.0, 8.0, 8.0, 0.0], dtype=torch.float64)
    form = FORMATS["fp16"]
    before = torch.tensor([8.0, 8.0, 8.0, 0.0], dtype=torch.float64) * (3 * 2.0**-24 + 2.0**-10)
    last = torch.tensor([2.0, 4.0, form.least_normal, 0.0], dtype=torch.float64) * 2.0**-11
    assert torch.allclose(rounded(want, terms, "fp16", 3, 2.0**-10), (last + before) * (1 + 2.0**-10), rtol=1e-12)
    assert torch.equal(rounded(want, terms, "fp16", 3), rounded(want, terms, "fp16", 3, 0.0)), (
        "terms are exact unless said"
    )


def test_routing_is_a_sum_that_is_rounded_once() -> None:
    """Of terms of one sign, so each element to its own roundoff; a token that is small has no more room than a large one."""
    axes = {"tokens": 200, "hidden": 64, "experts": 16, "top_k": 4, "router": "softmax_topk", "capacity_factor": 0.4}
    cell, definition, inputs, expected = drawn("routing", **axes, skew=0.8)
    shown = {"topk_ids": expected["topk_ids"], "topk_weights": expected["topk_weights"], "packed": inputs["x"]}
    good = expected["combined"].bfloat16()
    assert definition.check(cell, inputs, shown | {"combined": good}, expected).error is None
    smallest = int(torch.where(good != 0, good.abs(), 9.0).argmin())
    for wrong in ((expected["combined"] * (1 + 2.0**-12)).bfloat16().mul(1 + 2.0**-7), good + good.eq(0) * 1e-3):
        found = definition.check(cell, inputs, shown | {"combined": wrong}, expected)
        assert "combined" in (found.error or "") and found.mismatches > 0
    wrong = good.clone()
    wrong.view(-1)[smallest] *= 1.03
    found = definition.check(cell, inputs, shown | {"combined": wrong}, expected)
    assert found.mismatches == 1 and found.rel_l2_error < found.tolerance


def test_the_weights_of_a_routing_have_the_bits_of_float32() -> None:
    """Where their sum is rounded to nothing narrower."""
    cell, definition, inputs, expected = drawn("routing", tokens=64, hidden=16, experts=16, top_k=4, dtype="fp32")
    shown = {"topk_ids": expected["topk_ids"], "topk_weights": expected["topk_weights"], "packed": inputs["x"]}
    wrong = expected["combined"].float()
    wrong[3, 5] *= 1 + 2e-6  # six times the rms error of 24 roundings is 2.6e-6
    assert definition.check(cell, inputs, shown | {"combined": wrong}, expected).error is None
    wrong[3, 5] *= 1 + 2e-6
    found = definition.check(cell, inputs, shown | {"combined": wrong}, expected)
    assert found.mismatches == 1 and "combined" in found.error


@pytest.mark.parametrize("hidden", [256, 4096])
@pytest.mark.parametrize("cut", ["tf32 factors", "fp16 logits"])
def test_router_logits_have_the_bits_of_float32(cut: str, hidden: int) -> None:
    """A largest error of a logit allows for more than what fewer bits make of all of them."""
    cell, definition, inputs, expected = drawn("router", tokens=128, hidden=hidden, experts=32, top_k=4, dtype="fp32")

    def judged(x: Tensor, weight: Tensor, cut: torch.dtype = torch.float32) -> str | None:
        ids, weights = ROUTERS[cell.router].load()((x @ weight.T).to(cut).float(), 4, None)
        return definition.check(cell, inputs, {"topk_ids": ids, "topk_weights": weights}, expected).error

    factors = inputs["x"], inputs["router_weight"]
    assert judged(*factors) is None
    tf32 = [((one.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for one in factors]
    assert judged(*tf32) if cut == "tf32 factors" else judged(*factors, torch.float16)


@pytest.mark.parametrize("router", [name for name, rule in ROUTERS.items() if rule.bias])
@pytest.mark.parametrize("bench", ["router", "routing", "layer"])
def test_who_leaves_out_the_selection_bias_is_wrong_in_a_fresh_draw(bench: str, router: str) -> None:
    """And what is timed has a bias of zeros, which keeps the drawn skew."""
    axes = {"tokens": 64, "hidden": 128, "intermediate": 8, "experts": 32, "top_k": 4, "router": router}
    axes = {name: value for name, value in axes.items() if name in BENCHES[bench].axes}
    assert not drawn(bench, **axes)[2]["bias"].any()
    cell, definition, inputs, expected = drawn(bench, again(3, 7), **axes)
    without = definition.reference(cell, inputs | {"bias": torch.zeros(32)})
    outputs = without | {"packed": inputs.get("x")}
    assert definition.check(cell, inputs, outputs, expected).error


def tied(bench: str, router: str, **axes):
    """A composite's cell in which most tokens have ties, its inputs, reference, and what an implementation makes of them that sees
    experts in reverse order, and so chooses the last of equals."""
    axes |= {"tokens": 96, "hidden": 16, "experts": 32, "router": router, "dtype": "fp32"}
    cell, definition, inputs, _ = drawn(bench, **axes, top_k=1 if router == "llama4" else 3)
    rng = torch.Generator().manual_seed(5)
    inputs["logits"] = torch.randint(-3, 4, (96, 32), generator=rng) / 2
    if "bias" in inputs:
        inputs["bias"] = torch.randint(-2, 3, (32,), generator=rng) / 8
    backwards = {"logits": inputs["logits"].flip(1)} | ({"bias": inputs["bias"].flip(0)} if "bias" in inputs else {})
    ids, weights = ROUTERS[router].load()(backwards["logits"], cell.top_k, backwards.get("bias"))
    choice = {"topk_ids": (31 - ids).int(), "topk_weights": weights}
    bound = BENCHES[bench].bind(BENCHES[bench].baseline, cell, inputs | definition.empty_outputs(cell, inputs))
    bound()
    for name, tensor in choice.items():
        bound.scope.tensors[name].copy_(tensor)
    for _, stage in bound.stages[1:]:
        stage()
    return cell, definition, inputs, definition.reference(cell, inputs), dict(bound.scope.tensors)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("bench", "axes"),
    [("routing", {}), ("routing", {"capacity_factor": 0.8}), ("layer", {"intermediate": 8, "capacity_factor": 0.8})],
)
def test_a_composite_may_break_ties_otherwise(bench: str, axes: dict, router: str) -> None:
    """With a capacity other tokens are then dropped. What follows from its own choice is all that is right."""
    cell, definition, inputs, expected, outputs = tied(bench, router, **axes)
    other = (outputs["topk_ids"].sort(1).values != expected["topk_ids"].sort(1).values).any(1)
    assert int(other.sum()) > 10
    assert (found := definition.check(cell, inputs, outputs, expected)).error is None, found
    assert BENCHES[bench].check_stages(BENCHES[bench].baseline, cell, outputs).error is None
    gap = (outputs["combined"] - expected["combined"]).abs().amax(1) > 1e-3
    assert bool(gap.any()) or bench == "routing"
    wrong = outputs | {"combined": outputs["combined"].roll(1, 0)}
    assert "combined" in definition.check(cell, inputs, wrong, expected).error
    worse = outputs | {"topk_ids": outputs["topk_ids"].roll(1, 0)}
    assert definition.check(cell, inputs, worse, expected).error


def test_a_tie_of_groups_leaves_other_tokens_no_room() -> None:
    """The third and fourth group tie by their best experts; their second ones have other scores. All experts of three groups are chosen."""
    cell = cell_of("gate", tokens=2, experts=16, top_k=6, router="deepseek_v2", dtype="fp32")
    definition = BENCHES["gate"].definition()
    logits = torch.tensor([[5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 3.0, 1.0, *[-1.0] * 8]] * 2)
    logits[1, 4] = 3.5
    expected, scores = definition.reference(cell, {"logits": logits}), logits.double().softmax(1)
    other = [4, 5] if 6 in expected["topk_ids"][0] else [6, 7]
    ids = torch.tensor([[0, 1, 2, 3, *other], [0, 1, 2, 3, 4, 5]])
    for off, right in ((1e-7, True), (2e-5, False)):
        weights = 16 * scores.gather(1, ids) * torch.tensor([[1.0], [1 + off]])
        outputs = {"topk_ids": ids.int(), "topk_weights": weights.float()}
        found = definition.check(cell, {"logits": logits}, outputs, expected)
        assert (found.error is None) == right and found.ties == 1, found


@pytest.mark.parametrize(("gap", "right"), [(0.15, True), (0.25, False)])
def test_groups_tie_within_twice_the_bound(gap: float, right: bool) -> None:
    """One is raised by it, the other lowered: here the fourth group, in place of the third."""
    cell = cell_of("gate", tokens=1, experts=16, top_k=6, router="deepseek_v2", dtype="fp32")
    logits = torch.tensor([[5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 3.0 - gap, 1.0, *[-1.0] * 8]])
    theirs = torch.tensor([[0, 1, 2, 3, 6, 7]])
    ids, _ = BENCHES["gate"].definition().if_moved(cell, logits, None, theirs, 0.1)
    assert ids.equal(theirs) == right


@pytest.mark.parametrize("weights", ["int4_g32", "e4m3_row", "mxfp4"])
def test_quantised_weights_are_two_roundings_more(weights: str) -> None:
    axes = {"tokens": 4, "hidden": 64, "intermediate": 32, "experts": 2, "top_k": 1}
    definition = BENCHES["experts"].definition()
    assert definition.roundings(cell_of("experts", **axes, weights=weights)) == 2 + definition.roundings(
        cell_of("experts", **axes)
    )


@pytest.mark.parametrize("padding", [-1, 24, 25, 26, 2**31 - 1])
def test_padding_of_an_aligned_order_is_any_number_of_no_assignment(padding: int) -> None:
    """Who declares that it writes the order alone may put there what it likes, and no assignment twice."""
    cell, _, inputs, expected = drawn("permute", tokens=12, experts=4, top_k=2, layout="block64")
    order = expected["order"].masked_fill(expected["order"] < 0, padding)
    found = BENCHES["permute"].check("vllm_align", cell, inputs, {"order": order}, expected)
    assert found.error is None, found
    lost = order.masked_fill(order == 0, padding)
    assert BENCHES["permute"].check("vllm_align", cell, inputs, {"order": lost}, expected).mismatches > 0
    order[int((expected["order"] < 0).nonzero()[0])] = 3
    assert BENCHES["permute"].check("vllm_align", cell, inputs, {"order": order}, expected).mismatches > 0
