"""Every routing rule against its published formula in plain Python, and what all rules promise."""

import math

import pytest
import torch

from moe_routing_kernels.errors import UserError
from moe_routing_kernels.implementations import Entry
from moe_routing_kernels.routers import ROUTERS, GateRule, formulas

SHAPES = [(13, 3), (24, 5), (60, 4), (256, 8), (1, 1), (7, 7)]  # (experts, top_k), few of them powers of two


def best(scores, count):
    return sorted(sorted(range(len(scores)), key=lambda e: -scores[e])[:count])


def softmax(values):
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def kept(scores, groups, count, group_score):
    """Scores with the experts outside the `count` best groups taken out."""
    size = len(scores) // groups
    chosen = best([group_score(scores[g * size : (g + 1) * size]) for g in range(groups)], count)
    return [score if e // size in chosen else -math.inf for e, score in enumerate(scores)]


def renormalised(scores, ids, scale=1.0):
    return [scale * scores[e] / sum(scores[i] for i in ids) for e in ids]


def softmax_topk_renorm(h, k, _):
    ids = best(h, k)
    return ids, softmax([h[e] for e in ids])


def softmax_topk(h, k, _):
    ids = best(h, k)
    return ids, [softmax(h)[e] for e in ids]


def deepseek_v2(h, k, _):
    p = softmax(h)
    ids = best(kept(p, 8, 3, max), k)
    return ids, [16 * p[e] for e in ids]


def deepseek_v3(h, k, b):
    s = [sigmoid(v) for v in h]
    biased = [x + y for x, y in zip(s, b, strict=True)]
    ids = best(kept(biased, 8, 4, lambda group: sum(sorted(group)[-2:])), k)
    return ids, renormalised(s, ids, 2.5)


def sigmoid_renorm(h, k, b):
    s = [sigmoid(v) for v in h]
    ids = best([x + y for x, y in zip(s, b, strict=True)], k)
    return ids, renormalised(s, ids)


def sqrtsoftplus_renorm(h, k, b):
    s = [math.sqrt(math.log1p(math.exp(v))) for v in h]
    ids = best([x + y for x, y in zip(s, b, strict=True)], k)
    return ids, renormalised(s, ids, 1.5)


def llama4(h, k, _):
    ids = best(h, k)
    return ids, [sigmoid(h[e]) for e in ids]


PUBLISHED = (softmax_topk_renorm, softmax_topk, deepseek_v2, deepseek_v3, sigmoid_renorm, sqrtsoftplus_renorm, llama4)
FORMULAS = {formula.__name__: formula for formula in PUBLISHED}
SHARES = ("softmax_topk", "deepseek_v2")  # of one softmax, times the rule's scale
SUMS = {"softmax_topk_renorm": 1, "deepseek_v3": 2.5, "sigmoid_renorm": 1, "sqrtsoftplus_renorm": 1.5}
BIASED = [name for name, router in ROUTERS.items() if router.bias]


def fits(name, experts, top_k):
    try:
        ROUTERS[name].check(experts, top_k)
    except UserError:
        return False
    return True


CASES = [(name, *shape) for name in ROUTERS for shape in SHAPES if fits(name, *shape)]


def inputs(name, experts, tokens=40, scale=2.0):
    rng = torch.Generator().manual_seed(experts)
    logits = scale * torch.randn(tokens, experts, generator=rng, dtype=torch.float64)
    return logits, 0.3 * torch.randn(experts, generator=rng, dtype=torch.float64) if name in BIASED else None


def route(name, logits, top_k, bias):
    """The rule's answer with the ids of a row in rising order."""
    ids, weights = ROUTERS[name].load()(logits, top_k, bias)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    ids, place = ids.sort(dim=1)
    return ids, weights.gather(1, place)


@pytest.mark.parametrize(("name", "experts", "top_k"), [case for case in CASES if case[0] in FORMULAS])
def test_agrees_with_the_formula(name, experts, top_k):
    formula = FORMULAS[name]
    logits, bias = inputs(name, experts)
    ids, weights = route(name, logits, top_k, bias)
    for row, found_ids, found in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected_ids, expected = formula(row, top_k, None if bias is None else bias.tolist())
        assert found_ids == expected_ids and found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "experts", "top_k"), CASES)
def test_ids_are_distinct_and_weights_follow_their_sum_rule(name, experts, top_k):
    ids, weights = route(name, *inputs(name, experts)[:1], top_k, inputs(name, experts)[1])
    assert (ids[:, 1:] > ids[:, :-1]).all() and ids.min() >= 0 and ids.max() < experts
    assert (weights > 0).all()
    if name in SUMS:
        assert torch.allclose(weights.sum(1), torch.full((len(ids),), float(SUMS[name])))
    elif name == "llama4":
        assert (weights < 1).all()
    elif name in SHARES:
        scale = ROUTERS[name].options.get("scale", 1.0)
        assert (weights.sum(1) <= scale * (1 + 1e-6)).all()
        assert top_k == experts or (weights.sum(1) < scale).all()


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_changes_who_is_chosen_and_never_the_weights(name):
    logits, _ = inputs(name, 24)
    forced = torch.zeros(24, dtype=torch.float64)
    forced[[3, 4, 5]] = 100.0  # of one group where there are groups
    ids, weights = route(name, logits, 3, forced)
    assert (ids == torch.tensor([3, 4, 5])).all()
    free, plain = route(name, logits[:, 3:6].repeat(1, 8), 3, torch.tensor([9.0, 9.0, 9.0] + [0.0] * 21))
    assert (free == torch.tensor([0, 1, 2])).all() and torch.allclose(weights, plain)
    assert not torch.equal(route(name, logits, 3, None)[0], ids)
    unmoved = route(name, logits, 3, torch.full((24,), 0.25, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(unmoved, route(name, logits, 3, None), strict=True))


@pytest.mark.parametrize("name", [name for name in ROUTERS if name not in BIASED])
def test_a_rule_without_a_bias_refuses_one(name):
    with pytest.raises(AssertionError, match="no selection bias"):
        route(name, torch.randn(4, 24), 2, torch.zeros(24))


@pytest.mark.parametrize("name", ROUTERS)
def test_half_precision_logits_are_widened_first(name):
    logits, bias = inputs(name, 24)
    narrow = logits.to(torch.bfloat16)
    bias = None if bias is None else bias.float()
    found, wide = (ROUTERS[name].load()(one, 4, bias) for one in (narrow, narrow.float()))
    assert torch.equal(found[0], wide[0]) and torch.equal(found[1], wide[1])


@pytest.mark.parametrize(
    ("name", "experts", "top_k", "fine"),
    [
        ("deepseek_v3", 256, 8, True),
        ("deepseek_v3", 16, 8, True),
        ("deepseek_v3", 16, 9, False),  # 4 of 8 groups of two
        ("deepseek_v3", 20, 2, False),  # not in 8 groups
        ("deepseek_v3", 8, 2, False),  # a group's score is of two experts
        ("deepseek_v2", 24, 9, True),
        ("deepseek_v2", 24, 10, False),
        ("softmax_topk", 1, 1, True),
    ],
)
def test_shapes_that_a_rule_can_route(name, experts, top_k, fine):
    assert fits(name, experts, top_k) is fine


@pytest.mark.parametrize("name", ROUTERS)
def test_double_precision_logits_are_not_narrowed(name):
    """They are the reference: of two that are one in float32 the larger is chosen."""
    logits = torch.zeros(2, 16, dtype=torch.float64)
    logits[:, 14:] = 1.0
    logits[0, 14] += 1e-9
    logits[1, 15] += 1e-9
    assert ROUTERS[name].load()(logits, 1)[0].tolist() == [[14], [15]]


@pytest.mark.parametrize(
    ("options", "top_k", "ids", "weights"),
    [
        ({"renormalize": True, "groups": 2}, 2, [[0, 1], [3, 2]], [[0.8, 0.2], [11 / 14, 3 / 14]]),
        ({"renormalize": True, "groups": 2, "scale": 3.0}, 1, [[0], [3]], [[3], [3]]),
        ({"renormalize": False, "groups": 2, "scale": 3.0}, 2, [[0, 1], [3, 2]], [[1.2, 0.3], [1.65, 0.45]]),
        ({"renormalize": False, "groups": 2, "keep_groups": 2}, 2, [[0, 3], [3, 1]], [[0.4, 0.3], [0.55, 0.2]]),
        ({"renormalize": True, "scale": 2.0}, 2, [[0, 3], [3, 1]], [[8 / 7, 6 / 7], [22 / 15, 8 / 15]]),
        ({"renormalize": False}, 2, [[0, 3], [3, 1]], [[0.4, 0.3], [0.55, 0.2]]),
    ],
)
def test_options_of_softmax_in_any_combination(options, top_k, ids, weights):
    """Also those that no line of the table has: two groups of two, the best by its best expert."""
    logits = torch.tensor([[0.4, 0.1, 0.2, 0.3], [0.1, 0.2, 0.15, 0.55]]).log()
    found = formulas.route_softmax_topk(logits, top_k, **options)
    assert found[0].tolist() == ids and torch.allclose(found[1], torch.tensor(weights, dtype=torch.float32))


@pytest.mark.parametrize("module", [Entry(formulas, name) for name in ("sigmoid_topk", "sqrtsoftplus_topk")])
def test_two_groups_are_chosen_by_their_two_best(module):
    """One group and a scale of 1 where nothing else is asked for."""
    logits = torch.tensor([[3.0, -3.0, 2.0, 1.0]])
    scores = module.score(logits)
    both, wide = scores[:, [0, 2]], scores[:, [2, 3]]
    ids, weights = module.route(logits, 2)
    assert ids.tolist() == [[0, 2]] and torch.allclose(weights, both / both.sum())
    ids, weights = formulas.select(scores, 2, None, groups=2)
    assert ids.tolist() == [[2, 3]] and torch.allclose(weights, wide / wide.sum())


def test_the_groups_of_a_rule_by_logits():
    ids, weights = formulas.route_sigmoid_topk(torch.tensor([[3.0, -3.0, 2.0, 1.0]]), 2, groups=2)
    scores = torch.sigmoid(torch.tensor([2.0, 1.0]))
    assert ids.tolist() == [[2, 3]] and torch.allclose(weights, scores / scores.sum())


def test_experts_are_chosen_by_logits_unless_the_rule_says_otherwise():
    logits = torch.tensor([[1.0, -2.0]])
    assert ROUTERS["softmax_topk"].score(logits) is logits
    assert torch.equal(ROUTERS["sigmoid_renorm"].score(logits), torch.sigmoid(logits))


@pytest.mark.parametrize(
    ("options", "experts", "top_k", "text"),
    [
        (
            {"groups": 8, "keep_groups": 4},
            20,
            2,
            "experts for router a: got 20; allowed: a multiple of its 8 groups, at least two per group",
        ),
        (
            {"groups": 2},
            2,
            1,
            "experts for router a: got 2; allowed: a multiple of its 2 groups, at least two per group",
        ),
        ({"groups": 2}, 8, 5, "top_k for router a: got 5; allowed: at most 4: 1 of 2 groups are kept"),
        ({}, 3, 4, "top_k for router a: got 4; allowed: at most 3: 1 of 1 groups are kept"),
    ],
)
def test_what_a_rule_cannot_choose_is_said(options, experts, top_k, text):
    with pytest.raises(UserError) as error:
        GateRule("a", "softmax_topk", "a rule", options).check(experts, top_k)
    assert str(error.value).startswith(text)
