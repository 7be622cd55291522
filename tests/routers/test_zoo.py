"""Every rule of the zoo keeps what its table line promises; the properties are functions of `router_properties`."""

import pytest
import router_properties as properties
import torch
from router_properties import DIM, EXPERTS, OPTIONS, make

from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.routers.learned import COMMON_LOSSES, ZOO, build
from moe_routing_kernels.routers.zoo import NETWORKS
from moe_routing_kernels.routers.zoo import table as zoo_table

every_rule = pytest.mark.parametrize("name", ZOO)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
NETWORKED = [name for name, rule in ZOO.items() if rule.load().takes_network]
BIASED = [name for name in ZOO if hasattr(make(name).routers[0], "bias")]


def test_rules_with_a_selection_bias():
    assert BIASED == [
        "deepseek_v3_small",
        "sigmoid_renorm",
        "sqrtsoftplus_renorm",
        "loss_free_bias",
        "softmax_bias_renorm",
        "softmax_bias",
        "softmax_groups",
        "quantile_balancing",
        "quantile_logits",
        "longcat_zero",
    ]


@pytest.mark.parametrize("name", sorted(ZOO.keys() & ROUTERS))
def test_a_name_means_one_rule(name):
    """A trainable rule that is called like a gate rule chooses and weighs as that does."""
    toy = make(name).eval()
    router, (x, *rest) = toy.routers[0], properties.data()
    ids, weights = ROUTERS[name].load()(router.logits(x), 2, router.bias)
    routing = router(x, *rest)
    assert torch.equal(ids, routing.ids) and torch.equal(weights, routing.weights)


@every_rule
def test_router_gets_a_gradient_where_it_learns(name):
    properties.router_learns(make(name), ZOO[name].learns)


@pytest.mark.parametrize("name", NETWORKED)
@pytest.mark.parametrize("network", NETWORKS[1:])
def test_every_network_routes_and_learns(name, network):
    toy = make(name, network)
    properties.router_learns(toy, ZOO[name].learns)
    properties.well_formed(toy, ZOO[name].sums, True)


@every_rule
def test_losses_have_gradients(name):
    properties.losses_have_gradients(make(name), ZOO[name].losses)


@every_rule
def test_every_known_loss_can_be_asked_for(name):
    known = ZOO[name].load().known_losses
    properties.losses_have_gradients(make(name, losses=dict.fromkeys(known, 0.5)), known)


@every_rule
@both_modes
def test_ids_and_weights_are_well_formed(name, training):
    properties.well_formed(make(name), ZOO[name].sums, training)


@pytest.mark.parametrize("name", BIASED)
def test_bias_only_selects(name):
    properties.bias_only_selects(make(name))


@every_rule
@both_modes
def test_causality_is_what_the_table_says(name, training):
    properties.causality_is(make(name), ZOO[name].causal if training else ZOO[name].causal_in_evaluation, training)


@every_rule
@both_modes
def test_causality_with_a_capacity_is_what_the_table_says(name, training):
    """Of a rule that is causal without one: GShard seats first choices before second ones, so that later tokens evict earlier ones."""
    rule, toy = ZOO[name], make(name)
    toy.limit = properties.LIMIT
    if rule.causal if training else rule.causal_in_evaluation:
        properties.causality_is(toy, rule.causal_with_capacity(training=training), training, own_sequence=True)
    else:
        assert not rule.causal_with_capacity(training=training)


@pytest.mark.parametrize("policy", ["choice", "score", "random"])
def test_a_drop_policy_that_does_not_seat_by_position_leaks(policy):
    toy = make("softk")
    toy.limit, toy.policy = properties.LIMIT, policy
    properties.causality_is(toy, ZOO["softk"].causal_with_capacity(policy, False), False, own_sequence=True)


def test_gshard_is_causal_without_a_capacity_and_not_with_one():
    """In the published form first choices of later tokens evict second choices of earlier ones."""
    rule = ZOO["gshard_top2"]
    assert rule.causal and not rule.causal_with_capacity() and "without a capacity" in _line(rule.name)
    assert ZOO["softk"].causal_with_capacity() and not ZOO["softk"].causal_with_capacity("score")


@pytest.mark.parametrize("name", ["softk", "deepseek_v3_small", "switch_top1", "hash_position"])
def test_other_sequences_take_places_under_every_capacity(name):
    """Position in the batch decides, so that a token depends on the sequences before its own: no rule is independent of them."""
    toy = make(name)
    assert not properties.sees_other_sequences(toy, False)
    toy.limit, toy.policy = properties.LIMIT, "position"
    assert properties.sees_other_sequences(toy, False) == (name != "hash_position"), (
        "positions are the same in every batch"
    )


def _line(name):
    return next(line for line in zoo_table().splitlines() if f"`{name}`" in line)


@every_rule
def test_state_survives_a_round_trip(name):
    properties.state_survives(make(name), make(name, seed=9))


@every_rule
@both_modes
def test_bf16_input_is_widened(name, training):
    properties.half_precision_is_widened(make(name), training)


@every_rule
@both_modes
def test_shapes_are_static(name, training):
    properties.shapes_are_static(make(name), training)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("softkk", {}, "did you mean 'softk'"),
        ("softk", {"network": "mpl"}, "did you mean 'mlp'"),
        ("softk", {"top_k": 1}, "allowed: 2 to 8"),  # the one weight is 1: no gradient
        ("softk", {"top_k": 9}, "^top_k for router softk: got 9; allowed: 2 to 8"),
        ("switch_top1", {}, "allowed: 1"),
        ("noisy_topk", {"top_k": EXPERTS}, "allowed: 2 to 7"),
        ("quantile_balancing", {"top_k": EXPERTS}, "allowed: 2 to 7"),
        ("chain_of_experts", {"top_k": 3}, "^top_k for router chain_of_experts: got 3; allowed: a multiple of"),
        ("deepseek_v3_small", {"groups": 8}, "at least two per group"),
        ("sigmoid_renorm", {"score": "tanh"}, "allowed: sigmoid, sqrtsoftplus, softmax"),
        ("deepseek_v3_small", {"counted": "all"}, "allowed: routed, scores"),
        ("quantile_logits", {"score": "softmax"}, "allowed: sigmoid, logits"),
        ("remoe", {"scope": "batch"}, "allowed: layer, model"),
        ("softk", {"temperature": 1.0}, "option for router softk"),
        ("softk", {"losses": {"load": 1.0}}, "loss for router softk"),
        ("hash_random", {"network": "mlp"}, "^router network for hash_random: got 'mlp'; allowed: linear"),
        ("hash_balanced", {}, "^frequencies for router hash_balanced: got None; allowed: one number for each token id"),
    ],
)
def test_what_cannot_be_built_says_why(name, change, message):
    with pytest.raises(UserError, match=message):
        build(name, DIM, EXPERTS, **{"top_k": 2, **change})


@every_rule
def test_only_rules_that_learn_logits_have_a_network(name):
    router = make(name).routers[0]
    assert (router.network is not None) == router.takes_network


def test_fewer_tokens_than_a_tile_cannot_be_rounded():
    toy = make("token_rounding")
    toy.routers[0].tile = 1000
    with pytest.raises(UserError, match=r"^tokens for router token_rounding: got 48; .* one tile of 1000"):
        toy(*properties.data())


def test_the_table_names_losses_that_its_rules_know():
    assert all(set(rule.losses) <= set(rule.load().known_losses) for rule in ZOO.values())
    assert all(set(OPTIONS[name]) <= set(ZOO[name].options) for name in OPTIONS)
    assert set(COMMON_LOSSES) <= {loss for rule in ZOO.values() for loss in rule.load().known_losses}


def test_which_rules_have_no_network():
    """Hashes of what a token is or where it stands, and slots with parameters of their own; all others learn logits."""
    without = {name for name, line in ZOO.items() if not line.load().takes_network}
    assert without == {"hash_balanced", "hash_position", "hash_random", "soft_moe"}
