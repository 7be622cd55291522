"""Rules of published models: ids and weights of their classes in transformers, else of their papers' formulas; and how their state moves."""

import importlib
from types import SimpleNamespace

import pytest
import router_properties as properties
import torch
from router_properties import BATCH, DIM, EXPERTS, SEQUENCE, VOCABULARY, data, make

from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers import losses, zoo
from moe_routing_kernels.routers.learned import build

TOKENS = BATCH * SEQUENCE
# rule: options, module, class, fields of its configuration; all of 12 inputs and 8 experts, of which a token takes 2, or 3 with 4 zero experts
CLASSES = {
    "softmax_bias_renorm": ({}, "ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {"num_experts": 8, "moe_norm_min": 1e-12}),
    "softmax_bias": (
        {"scale": 6.0}, "longcat_flash", "LongcatFlashTopkRouter",
        {"n_routed_experts": 8, "zero_expert_num": 0, "routed_scaling_factor": 6.0},
    ),
    "longcat_zero": (
        {"scale": 6.0}, "longcat_flash", "LongcatFlashTopkRouter",
        {"n_routed_experts": 8, "zero_expert_num": 4, "routed_scaling_factor": 6.0, "num_experts_per_tok": 3},
    ),
    "softmax_groups": (
        {}, "mistral4", "Mistral4TopkRouter", {"routed_scaling_factor": 1.0, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    ),
    "gpt_oss": ({}, "gpt_oss", "GptOssTopKRouter", {}),
    "gemma4": ({}, "gemma4", "Gemma4TextRouter", {"num_experts": 8, "top_k_experts": 2, "rms_norm_eps": 1e-6}),
    "sqrtsoftplus_renorm": (
        {}, "deepseek_v4", "DeepseekV4TopKRouter", {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
    ),
    "deepseek_v4_hash": (
        {}, "deepseek_v4", "DeepseekV4HashRouter",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "vocab_size": VOCABULARY},
    ),
    "sigmoid_renorm": (
        {"shared": True, "scale": 8.0}, "inkling", "InklingTopkRouter",
        {"n_routed_experts": 8, "n_shared_experts": 1, "route_scale": 8.0},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_rule_is_that_of_its_class_in_transformers(name):
    """Ids and weights of the same weights, biases and factors; of Inkling the weight of its shared expert, too."""
    pytest.importorskip("transformers")
    options, module, cls, fields = CLASSES[name]
    fields = {"num_experts_per_tok": 2, "hidden_size": DIM, "num_local_experts": EXPERTS} | fields
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    theirs, ours = (
        getattr(found, cls)(SimpleNamespace(**fields)).float().eval(),
        make(name, **options).routers[0].eval(),
    )
    x, token_ids, positions = data()
    with torch.no_grad():
        statics = getattr(theirs, "moe_statics", theirs)
        if hasattr(statics, "e_score_correction_bias"):  # Mistral 4 has none
            ours.bias.copy_(torch.linspace(-0.2, 0.2, len(ours.bias)))
            statics.e_score_correction_bias.copy_(ours.bias)
        for own, other in (
            ("offset", "bias"),
            ("input_scale", "scale"),
            ("expert_scale", "per_expert_scale"),
            ("table", "tid2eid"),
        ):
            if hasattr(ours, own):
                getattr(theirs, other).copy_(getattr(ours, own))
        linear = next((getattr(theirs, part) for part in ("classifier", "proj") if hasattr(theirs, part)), theirs)
        linear.weight.copy_(ours.network.weight)
        inputs = (x.flatten(0, 1), token_ids) if name == "deepseek_v4_hash" else (x.flatten(0, 1),)
        _, weights, ids, *shared = theirs(*inputs)
        routing = ours(x, token_ids, positions)
    if shared:
        assert (routing.ids[:, -1] == EXPERTS).all()
        torch.testing.assert_close(routing.weights[:, -1:], shared[0], atol=1e-6, rtol=1e-5)
        routing.ids, routing.weights = routing.ids[:, :-1], routing.weights[:, :-1]
    order, own = ids.argsort(1), routing.ids.long().argsort(1)
    assert torch.equal(ids.gather(1, order).long(), routing.ids.long().gather(1, own))
    torch.testing.assert_close(weights.gather(1, order), routing.weights.gather(1, own), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["sigmoid_renorm", "sqrtsoftplus_renorm", "deepseek_v3_small"])
@pytest.mark.parametrize("training", [True, False])
def test_a_shared_expert_can_be_part_of_the_sum(name, training):
    """Weights of the chosen experts and of the shared one sum to the scale; nothing that a rule promises changes."""
    toy = make(name, shared=True)
    properties.well_formed(toy, zoo.ZOO[name].sums, training)
    properties.router_learns(make(name, shared=True), True)
    properties.shapes_are_static(toy, training)
    properties.causality_is(toy, True, training)
    toy.limit = properties.LIMIT
    properties.causality_is(toy, True, training, own_sequence=True)
    plain, toy.limit = make(name), None
    with torch.no_grad():
        plain.routers[0].network.weight.copy_(toy.routers[0].network.weight[:EXPERTS])
    chosen, joint = (one.train(training)(*data())[1][0] for one in (plain, toy))
    assert torch.equal(chosen.ids, joint.ids[:, :2]), "the shared expert changes no choice"
    ratio = joint.weights[:, :2] / chosen.weights
    assert torch.allclose(ratio[:, 0], ratio[:, 1], rtol=1e-4) and (ratio < 1).all()


@pytest.mark.parametrize(("name", "change"), [("softmax_bias_renorm", {"score": "sigmoid"}), ("softk", {})])
def test_a_shared_expert_is_refused_where_no_sum_can_hold_it(name, change):
    with pytest.raises(UserError, match="option for router"):
        build(name, DIM, EXPERTS, 2, shared=True, **change)
    with pytest.raises(
        UserError,
        match=r"^a jointly normalised shared expert for router sigmoid_renorm: got 'softmax'; .* sqrtsoftplus",
    ):
        build("sigmoid_renorm", DIM, EXPERTS, 2, shared=True, score="softmax")


def test_a_proportional_bias_moves_by_what_a_share_lacks():
    """LongCat-Flash: b += mu (k / (k' E) - T_e / (k' T)) for true experts, over all forward passes of a step, and nothing for zero ones."""
    router, expected = make("longcat_zero", rate=0.5).routers[0].train(), [0.0] * EXPERTS
    for step in (1, 3):
        load = [0] * EXPERTS
        for seed in (step, step + 1):
            for chosen in router(*data(seed)).ids.tolist():
                assert len(set(chosen)) == 3
                for e in chosen:
                    if e < EXPERTS:
                        load[e] += 1
        router.after_step()
        expected = [b + 0.5 * (2 / (3 * EXPERTS) - n / (3 * 2 * TOKENS)) for b, n in zip(expected, load, strict=True)]
        assert router.bias.tolist() == pytest.approx([*expected, 0, 0, 0, 0], abs=1e-6)
    before = router.bias.clone()
    router.eval()(*data())
    router.after_step()
    assert torch.equal(router.bias, before), "evaluation leaves no trace"


def loads(router, steps):
    """Loads per token of the true experts after some steps, on tokens that prefer some experts."""
    torch.manual_seed(0)
    with torch.no_grad():
        router.network.weight.copy_(torch.randn_like(router.network.weight) * 0.5)
    x, rest = torch.randn(8, 128, DIM) + 0.3, (torch.zeros(8, 128, dtype=torch.long), torch.arange(128))
    for _ in range(steps):
        load = losses.counts(router(x, *rest).ids, EXPERTS) / 1024
        router.after_step()
    return load


def test_zero_experts_end_with_k_true_ones_a_token():
    assert loads(build("longcat_zero", DIM, EXPERTS, 2), 1).sum() != pytest.approx(2, rel=0.1)
    settled = loads(build("longcat_zero", DIM, EXPERTS, 2, rate=0.5), 400)
    assert settled.sum().item() == pytest.approx(2, rel=0.02) and losses.cv_squared(settled) < 0.01


def test_thresholds_follow_the_tokens_that_an_expert_would_have_taken():
    """Two steps of two forward passes each in plain Python: the moving average and its correction, from the T k / E-th largest logits."""
    router = make("expert_threshold", momentum=0.75).routers[0].train()
    average, cutoff = [0.0] * EXPERTS, [0.0] * EXPERTS
    for step in (1, 2):
        new = [0.0] * EXPERTS
        for seed in (step, step + 10):
            h = router.logits(data(seed)[0]).tolist()
            routing = router(*data(seed))
            for row, ids, weights in zip(h, routing.ids.tolist(), routing.weights.tolist(), strict=True):
                assert ids == [e if row[e] >= cutoff[e] else -1 for e in range(EXPERTS)]
                sigmoids = torch.tensor(row).sigmoid().tolist()
                assert weights == pytest.approx([sigmoids[e] if e in ids else 0 for e in range(EXPERTS)], abs=1e-6)
            new = [n + sorted(row[e] for row in h)[-TOKENS * 2 // EXPERTS] / 2 for e, n in enumerate(new)]
        router.after_step()
        average = [0.75 * a + 0.25 * n for a, n in zip(average, new, strict=True)]
        cutoff = [a / (1 - 0.75**step) for a in average]
        assert router.threshold.tolist() == pytest.approx(cutoff, abs=1e-5)


def test_thresholds_balance_at_once():
    """The first correction is whole: from the second step on experts take T k / E tokens of the same text."""
    first, settled = (loads(build("expert_threshold", DIM, EXPERTS, 2), steps) for steps in (1, 2))
    assert losses.cv_squared(first) > 0.01
    assert settled.sum().item() == pytest.approx(2, abs=1e-3) and losses.cv_squared(settled) < 1e-6


def test_a_hash_layer_weighs_by_what_it_learns_and_chooses_by_the_token():
    router, (x, token_ids, positions) = make("deepseek_v4_hash").routers[0], data()
    one, other = router(x, token_ids, positions), router(-x, token_ids, positions)
    assert torch.equal(one.ids, other.ids) and torch.equal(one.ids, router.table[token_ids.flatten()])
    assert not torch.allclose(one.weights, other.weights)


def test_rules_by_layer():
    """The last named one has all further layers; a rule that is not known, or more of them than layers, are refused."""
    names = lambda name, layers=None: [rule.name for rule in zoo.by_layer(name, layers)]  # noqa: E731
    assert names("softk", 2) == ["softk", "softk"] and names("softk") == ["softk"]
    assert names("deepseek_v4_hash+deepseek_v4_hash+softk", 4) == ["deepseek_v4_hash"] * 2 + ["softk"] * 2
    assert names("deepseek_v4_hash+deepseek_v4_hash+softk") == ["deepseek_v4_hash", "softk"]
    with pytest.raises(UserError, match="did you mean 'softk'"):
        zoo.by_layer("hash_random+softkk", 2)
    with pytest.raises(UserError, match=r"got '3 rules in .*at most one for each of 2 layers"):
        zoo.by_layer("softk+softk+softk", 2)
