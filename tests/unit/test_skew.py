"""Expected loads: the target is met wherever it is accepted, and refused wherever it cannot be met."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_routing_bench.workload import skew
from moe_routing_kernels.errors import UserError

SHAPES = st.integers(1, 300).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


def meets(share, sampler, experts, top_k):
    """The probabilities of `share` of the largest skew, after checking all that they promise."""
    target = share * skew.largest(sampler, experts, top_k)
    skew.check(target, "exact", 1, experts, top_k)
    p = skew.inclusion_probabilities(target, sampler, experts, top_k)
    assert len(p) == experts and all(0 <= one <= 1 + 1e-12 for one in p)
    assert all(less <= more + 1e-12 for more, less in itertools.pairwise(p))
    assert sum(p) == pytest.approx(top_k, rel=1e-9)
    assert skew.coefficient_of_variation(p) == pytest.approx(target, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.floats(0, 1))
def test_exact_meets_every_target(shape, share):
    meets(share, "exact", *shape)


@settings(max_examples=15, deadline=None)
@example(shape=(3, 2), share=4.943246457806124e-78)  # all but equal: falling up to rounding only
@given(st.integers(1, 40).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))), st.floats(0, 1))
def test_plackett_luce_meets_every_target(shape, share):
    meets(share, "plackett_luce", *shape)


@pytest.mark.parametrize("sampler", ["exact", "plackett_luce"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (896, 16)])
def test_usual_shapes_reach_98_percent_of_the_ceiling(sampler, experts, top_k):
    assert skew.largest(sampler, experts, top_k) == 0.98 * skew.ceiling(experts, top_k)


@given(SHAPES)
def test_ceiling_is_the_variation_of_k_experts_that_take_everything(shape):
    experts, top_k = shape
    loads = [1.0] * top_k + [0.0] * (experts - top_k)
    assert skew.ceiling(experts, top_k) == pytest.approx(skew.coefficient_of_variation(loads), abs=1e-9)


@pytest.mark.parametrize("sampler", ["exact", "plackett_luce"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5)])
def test_an_expert_that_is_always_chosen_leaves_only_balance(sampler, experts, top_k):
    assert skew.inclusion_probabilities(0.0, sampler, experts, top_k) == (1.0,) * experts
    with pytest.raises(UserError, match="0 to 0 "):
        skew.check(0.01, sampler, 64, experts, top_k)


def test_the_exponent_is_that_of_the_probabilities():
    exponent = skew.zipf_exponent(1.0, "exact", 64, 2)
    weights = [rank**-exponent for rank in range(1, 65)]
    p = skew.inclusion_probabilities(1.0, "exact", 64, 2)
    assert max(p) < 1 and p == pytest.approx([2 * weight / sum(weights) for weight in weights])
    assert skew.zipf_exponent(0.0, "exact", 64, 2) == 0


def test_plackett_luce_is_refused_below_its_noise_and_exact_is_not():
    floor = skew.sampling_floor(1000, 8, 2)
    assert floor == pytest.approx(math.sqrt(6 / 2000))
    with pytest.raises(UserError, match="noise of plackett_luce"):
        skew.check(0.99 * floor, "plackett_luce", 1000, 8, 2)
    for accepted in (0.0, 1.01 * floor):
        skew.check(accepted, "plackett_luce", 1000, 8, 2)
    skew.check(0.99 * floor, "exact", 1000, 8, 2)


@pytest.mark.parametrize("target", [-0.1, math.nan, math.inf, 1.70])
def test_what_cannot_be_met_is_refused(target):
    skew.check(1.69, "exact", 64, 8, 2)
    with pytest.raises(UserError, match=r"0, or 0 to 1\.7 "):
        skew.check(target, "exact", 64, 8, 2)


def test_a_skew_of_exactly_the_floor_or_the_largest_is_allowed():
    """And nothing between 0 and the floor, nor above the largest; the exact sampler has no floor."""
    floor, top = skew.sampling_floor(50, 8, 2), skew.largest("plackett_luce", 8, 2)
    assert floor == pytest.approx(math.sqrt(6 / 100)) and top == pytest.approx(0.98 * math.sqrt(3))
    for value in (0.0, floor, top):
        skew.check(value, "plackett_luce", 50, 8, 2)
    skew.check(floor / 2, "exact", 50, 8, 2)
    for value in (floor * 0.999, top * 1.001, -0.1, math.inf, math.nan):
        with pytest.raises(UserError, match="skew"):
            skew.check(value, "plackett_luce", 50, 8, 2)


def test_variation_is_of_the_whole_population():
    assert skew.coefficient_of_variation([1.0, 3.0]) == 0.5 and skew.coefficient_of_variation([0.0, 0.0]) == 0.0


def test_successive_sampling_of_two_is_exact():
    """The sum over all ordered pairs of different experts."""
    weights = [5.0, 3.0, 1.5, 0.5]
    total = sum(weights)
    expected = [0.0] * 4
    for i, j in itertools.permutations(range(4), 2):
        chance = weights[i] / total * weights[j] / (total - weights[i])
        expected[i] += chance
        expected[j] += chance
    assert skew._plackett_luce_inclusion(weights, 2) == pytest.approx(expected)
    assert skew._plackett_luce_inclusion(weights, 1) == [0.5, 0.3, 0.15, 0.05]
    assert skew._plackett_luce_inclusion(weights, 4) == [1.0] * 4
    third = skew._plackett_luce_inclusion(weights, 3)
    ratios = [math.log1p(-p) / w for p, w in zip(third, weights, strict=True)]
    assert sum(third) == pytest.approx(3) and ratios == pytest.approx([ratios[0]] * 4)
    assert skew._exact_inclusion(weights, 2) == pytest.approx([1.0, 0.6, 0.3, 0.1])
    assert skew._exact_inclusion(weights, 3) == pytest.approx([1.0, 1.0, 0.75, 0.25])
