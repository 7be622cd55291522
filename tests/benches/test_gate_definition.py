"""What the bench `gate` accepts where experts tie: either of them, with the weight that it has."""

import pytest
import torch

from moe_routing_bench.benches.gate import definition
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels.routers import ROUTERS

INVERSE = {"deepseek_v3": torch.logit, "sqrtsoftplus_renorm": lambda score: torch.log(torch.expm1(score**2))}
SCORES = torch.tensor([0.875, 0.75, 0.5] + 13 * [0.125])
BIAS = torch.tensor([0.0, 0.0, 0.25] + 13 * [0.0])  # experts 1 and 2 have the same biased score


def answer(router: str, ids: list[int], weighed_as: list[int]) -> dict[str, torch.Tensor]:
    """One token's choice of `ids` with the weights of the experts `weighed_as`."""
    weights = SCORES[weighed_as] / SCORES[weighed_as].sum() * ROUTERS[router].options.get("scale", 1.0)
    return {"topk_ids": torch.tensor([ids], dtype=torch.int32), "topk_weights": weights[None]}


@pytest.mark.parametrize("router", INVERSE)
@pytest.mark.parametrize(
    ("ids", "weighed_as", "ties", "error"),
    [
        ([0, 1], [0, 1], 0, None),
        ([2, 0], [2, 0], 1, None),
        ([0, 2], [0, 1], 1, "topk_weights"),
        ([0, 1], [0, 2], 0, "topk_weights"),
        ([0, 9], [0, 9], 0, "other experts"),
    ],
)
def test_a_tied_expert_is_accepted_with_its_own_weight_alone(router, ids, weighed_as, ties, error):
    cell = cell_of("gate", tokens=1, experts=16, top_k=2, dtype="fp32", router=router)
    inputs = {"logits": INVERSE[router](SCORES)[None], "bias": BIAS}
    found = definition.check(cell, inputs, answer(router, ids, weighed_as), answer(router, [0, 1], [0, 1]))
    assert found.ties == ties and (error in found.error if error else found.error is None), found


@pytest.mark.parametrize("router", INVERSE)
def test_equal_scores_with_unequal_biases_are_no_tie(router):
    """Experts 1 and 2 would weigh the same."""
    cell = cell_of("gate", tokens=1, experts=16, top_k=2, dtype="fp32", router=router)
    scores, bias = SCORES.index_fill(0, torch.tensor(2), 0.75), BIAS.roll(-1)
    inputs = {"logits": INVERSE[router](scores)[None], "bias": bias}
    right, wrong = (answer(router, ids, [0, 1]) for ids in ([0, 1], [0, 2]))
    assert definition.check(cell, inputs, right, right).error is None
    assert "other experts" in (definition.check(cell, inputs, wrong, right).error or "")


@pytest.mark.parametrize("router", INVERSE)
@pytest.mark.parametrize("experts", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_the_weights_of_a_tied_choice_are_compared_expert_by_expert(router, experts):
    """Whatever ids the experts have: where their scores did not rise with these, right weights were taken for wrong ones."""
    cell = cell_of("gate", tokens=1, experts=16, top_k=2, dtype="fp32", router=router)
    place = torch.tensor([*experts, *range(3, 16)]).argsort()
    inputs = {"logits": INVERSE[router](SCORES[place])[None], "bias": BIAS[place]}

    def of(chosen):  # experts of the table above, by the ids that they have here
        found = answer(router, chosen, chosen)
        return found | {"topk_ids": torch.tensor([[experts[one] for one in chosen]], dtype=torch.int32)}

    for chosen in ([0, 2], [2, 0]):
        found = definition.check(cell, inputs, of(chosen), of([0, 1]))
        assert (found.ties, found.error) == (1, None), found
        swapped = of(chosen) | {"topk_weights": of(chosen)["topk_weights"].flip(1)}
        assert "topk_weights" in definition.check(cell, inputs, swapped, of([0, 1])).error


LOGITS = torch.zeros(1, 16).index_put(
    (torch.tensor(0), torch.tensor([0, 2, 4, 5, 6, 8])), torch.tensor([4.0, 3.0, 2.0, 1.5, 2.0, 1.99])
)


@pytest.mark.parametrize(
    ("ids", "weighed_as", "ties", "error"),
    [
        ([0, 2, 4, 5], [0, 2, 4, 5], 0, None),
        ([0, 2, 6, 7], [0, 2, 6, 7], 1, None),
        ([0, 2, 6, 3], [0, 2, 6, 3], 1, None),  # 1, 3 and 7 are equal experts of the groups that remain
        ([0, 2, 6, 7], [0, 2, 4, 5], 1, "topk_weights"),
        ([0, 2, 6, 5], [0, 2, 6, 5], 0, "other experts"),  # of both groups that tie
        ([0, 2, 8, 9], [0, 2, 8, 9], 0, "other experts"),  # of a group that is worse
    ],
)
def test_either_of_two_groups_that_tie_may_be_chosen_from(ids, weighed_as, ties, error):
    """The third best group of two experts is that of 4 or of 6, which are equal, but not their neighbours."""
    cell = cell_of("gate", tokens=1, experts=16, top_k=4, dtype="fp32", router="deepseek_v2")
    probability = LOGITS.double().softmax(1)[0] * 16
    outputs = {
        "topk_ids": torch.tensor([ids], dtype=torch.int32),
        "topk_weights": probability[weighed_as].float()[None],
    }
    expected = definition.reference(cell, {"logits": LOGITS})
    assert expected["topk_ids"].sort(1).values.tolist() == [[0, 2, 4, 5]]
    found = definition.check(cell, {"logits": LOGITS}, outputs, expected)
    assert found.ties == ties and (error in found.error if error else found.error is None), found


@pytest.mark.parametrize("router", ROUTERS)
def test_another_choice_among_equal_scores_is_right(router):
    """Coarse scores tie all the time; an implementation that sees the experts in reverse order chooses the last of equals."""
    cell = cell_of("gate", tokens=512, experts=64, top_k=1 if router == "llama4" else 6, dtype="fp32", router=router)
    rng = torch.Generator().manual_seed(5)
    inputs = {"logits": torch.randint(-8, 9, (512, 64), generator=rng) / 4}
    if ROUTERS[router].bias:
        inputs["bias"] = torch.randint(-2, 3, (64,), generator=rng) / 8
    reverse = [one.flip(-1) for one in inputs.values()]
    ids, weights = ROUTERS[router].load()(reverse[0], cell.top_k, *reverse[1:])
    outputs = {"topk_ids": (63 - ids).int(), "topk_weights": weights.float()}
    found = definition.check(cell, inputs, outputs, definition.reference(cell, inputs))
    assert found.error is None and found.ties > 30, found
    swapped = outputs | {"topk_weights": outputs["topk_weights"].roll(1, 0)}
    same = torch.equal(swapped["topk_weights"], outputs["topk_weights"])  # a rule may give all experts the same weight
    assert same or "topk_weights" in definition.check(cell, inputs, swapped, definition.reference(cell, inputs)).error
