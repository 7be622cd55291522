"""Each property can fail: faults that published code had, planted into a sound rule, are caught by the same functions."""

import pytest
import router_properties as properties
import torch
from router_properties import make

from moe_routing_kernels.routers import losses
from moe_routing_kernels.routers.learned import Routing
from moe_routing_kernels.routers.rules import selection_bias, topk, whole_batch


class DetachedLoss(topk.SoftmaxTopk):
    """A balance loss of integer counts alone."""

    def forward(self, x, token_ids, positions):
        routing = super().forward(x, token_ids, positions)
        share = losses.counts(routing.ids, self.experts) / routing.ids.numel()
        return Routing(
            routing.ids, routing.weights, {"switch": (share - 1 / self.experts).square().sum()}, routing.scores
        )


class FrozenRouter(topk.SoftmaxTopk):
    """An unweighted combine: the ids have no gradient and the weights are constants."""

    def forward(self, x, token_ids, positions):
        routing = super().forward(x, token_ids, positions)
        return Routing(routing.ids, torch.full_like(routing.weights, 0.5), routing.losses, routing.scores)


class DuplicateIds(topk.SoftmaxTopk):
    """The second expert is the first again."""

    def forward(self, x, token_ids, positions):
        routing = super().forward(x, token_ids, positions)
        return Routing(routing.ids[:, :1].expand(-1, 2), routing.weights, routing.losses, routing.scores)


class LeakingBias(selection_bias.BiasedTopk):
    """The weights are of the biased scores."""

    def forward(self, x, token_ids, positions):
        routing = super().forward(x, token_ids, positions)
        biased = (self.score(self.logits(x)) + self.bias).gather(1, routing.ids.long())
        return Routing(routing.ids, biased / biased.sum(1, keepdim=True), routing.losses, routing.scores)


class FutureLeak(topk.SoftmaxTopk):
    """Logits from which the mean over the sequence, its future included, is taken away."""

    def logits(self, x):
        return super().logits(x - x.mean(1, keepdim=True))


class WeightInAnEmptySlot(topk.SoftmaxTopk):
    """A dropped expert keeps its weight."""

    def forward(self, x, token_ids, positions):
        routing = super().forward(x, token_ids, positions)
        return Routing(
            routing.ids.masked_fill(routing.weights < 0.4, -1), routing.weights, routing.losses, routing.scores
        )


class LooksAtData(topk.SoftmaxTopk):
    """Waits for the host to learn whether there is anything to do."""

    def forward(self, x, token_ids, positions):
        routing = super().forward(x, token_ids, positions)
        assert routing.ids.max() < self.experts
        return routing


@pytest.mark.parametrize("sound", ["softk", "sigmoid_renorm"])
def test_the_rules_that_faults_are_planted_into_are_sound(sound):
    properties.router_learns(make(sound), True)
    properties.well_formed(make(sound), (1, 1), True)
    properties.causality_is(make(sound), True, True)


def test_detached_balance_loss():
    with pytest.raises(AssertionError, match="loss switch has no gradient"):
        properties.losses_have_gradients(make("softk", cls=DetachedLoss), ["switch"])


def test_frozen_router():
    with pytest.raises(AssertionError, match="the router gets no gradient"):
        properties.router_learns(make("softk", cls=FrozenRouter, losses={}), True)


def test_a_control_that_learns():
    with pytest.raises(AssertionError, match="a router that does not learn has a gradient"):
        properties.router_learns(make("softk"), False)


@pytest.mark.parametrize("training", [True, False])
def test_duplicate_ids(training):
    with pytest.raises(AssertionError, match="duplicate ids"):
        properties.well_formed(make("softk", cls=DuplicateIds), (1, 1), training)


def test_weight_without_an_expert():
    with pytest.raises(AssertionError, match="a weight without an expert"):
        properties.well_formed(make("softk", cls=WeightInAnEmptySlot), (1, 1), True)


def test_weights_that_do_not_sum_to_the_rule():
    with pytest.raises(AssertionError, match="weights do not sum to"):
        properties.well_formed(make("topk_prenorm"), (1, 1), True)


def test_bias_leaking_into_weights():
    with pytest.raises(AssertionError, match="the bias leaks into the weights"):
        properties.bias_only_selects(make("sigmoid_renorm", cls=LeakingBias))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("sound", "cls"), [("softk", FutureLeak), ("softk", whole_batch.ExpertChoice)])
def test_future_leak(sound, cls, training):
    with pytest.raises(AssertionError, match="sees later tokens"):
        properties.causality_is(make(sound, cls=cls), True, training)


def test_a_rule_marked_as_not_causal_that_is():
    with pytest.raises(AssertionError, match="causal in training"):
        properties.causality_is(make("softk"), False, True)


def test_a_look_at_data():
    with pytest.raises(AssertionError, match="depends on data"):
        properties.shapes_are_static(make("softk", cls=LooksAtData), True)


def test_state_outside_of_buffers():
    fresh, toy = make("deepseek_v3_small", seed=9), make("deepseek_v3_small")
    toy.routers[0].rate = 0.5  # an attribute, not a buffer
    with pytest.raises(AssertionError, match="after a step"):
        properties.state_survives(toy, fresh)
