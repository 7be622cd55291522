"""What each rule decides, against its published formula in plain Python or against the balance that it is known for."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from router_properties import BATCH, DIM, EXPERTS, SEQUENCE, VOCABULARY, data, make, run
from scipy.optimize import linear_sum_assignment

from moe_routing_kernels.routers import learned, losses
from moe_routing_kernels.routers.learned import ZOO, Learned, build, join
from moe_routing_kernels.routers.rules.selection_bias import balancing_bias
from moe_routing_kernels.routers.rules.whole_batch import balanced_assignment, log_plan

TOKENS = BATCH * SEQUENCE


def decided(name, training=False, **options):
    """Of a rule with random parameters: for each token a list of logits and a dict from id to weight."""
    toy = make(name, **options)
    x, *_ = data()
    routing = run(toy, data(), training)[1][0]
    logits = toy.routers[0].logits(x)
    rows = zip(routing.ids.tolist(), routing.weights.tolist(), strict=True)
    return list(
        zip(logits.tolist(), [{e: w for e, w in zip(*row, strict=True) if e >= 0} for row in rows], strict=True)
    )


def softmax(values):
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def best(scores, count):
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:count]


def renormalised(scores, ids, scale=1.0):
    return {e: scale * scores[e] / sum(scores[i] for i in ids) for e in ids}


def softk(h):
    return renormalised(softmax(h), best(h, 2))


def topk_prenorm(h):
    return {e: softmax(h)[e] for e in best(h, 2)}


def in_two_groups(scores, group_score):
    """The scores of the two best of four groups of two."""
    groups = best([group_score(scores[g : g + 2]) for g in range(0, 8, 2)], 2)
    return [score if e // 2 in groups else -math.inf for e, score in enumerate(scores)]


def deepseek_v2(h):
    p = softmax(h)
    return {e: p[e] for e in best(in_two_groups(p, max), 2)}


def deepseek_v3(h):
    s = [sigmoid(v) for v in h]
    return renormalised(s, best(in_two_groups(s, sum), 2), 2.5)


def sqrtsoftplus_renorm(h):
    return renormalised([math.sqrt(math.log1p(math.exp(v))) for v in h], best(h, 2), 1.5)


def softmax_groups(h):
    p = softmax(h)
    return renormalised(p, best(in_two_groups(p, sum), 2))


def top_p(h):
    p, taken = softmax(h), {}
    for e in best(p, len(p)):
        if sum(taken.values()) < 0.4:
            taken[e] = p[e]
    return taken


def null_experts(h):
    p = softmax(h)
    ids = best(h, 4)
    true = [e for e in ids if e < EXPERTS]
    return (renormalised(p, true) if true else {}) | {e: 0.0 for e in ids if e >= EXPERTS}


def moepp(h):
    p, ids = softmax(h), best(h, 2)
    return renormalised(p, [e for e in ids if e != EXPERTS]) | {e: 0.0 for e in ids if e == EXPERTS}


FORMULAS = {
    "softk": softk,
    "qwen3": softk,
    "noisy_topk": softk,
    "gshard_top2": softk,
    "token_rounding": softk,
    "switch_top1": lambda h: {best(h, 1)[0]: max(softmax(h))},
    "topk_prenorm": topk_prenorm,
    "sinkhorn": topk_prenorm,
    "chain_of_experts": lambda h: {best(h, 1)[0]: max(softmax(h))},
    "base": lambda h: {best(h, 1)[0]: sigmoid(max(h))},
    "deepseek_v2_small": deepseek_v2,
    "deepseek_v3_small": deepseek_v3,
    "sqrtsoftplus_renorm": sqrtsoftplus_renorm,
    "sigmoid_renorm": lambda h: renormalised([sigmoid(v) for v in h], best(h, 2)),
    "quantile_balancing": lambda h: renormalised([sigmoid(v) for v in h], best(h, 2)),
    "loss_free_bias": lambda h: {e: sigmoid(h[e]) for e in best(h, 2)},
    "top_p": top_p,
    "remoe": lambda h: {e: v for e, v in enumerate(h) if v > 0},
    "null_experts": null_experts,
    "moepp": moepp,
    "gpt_oss": softk,
    "softmax_bias_renorm": softk,
    "softmax_bias": topk_prenorm,
    "softmax_groups": softmax_groups,
    "quantile_logits": softk,
    "topk_hard": lambda h: dict.fromkeys(best(h, 2), 0.5),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_evaluation_follows_the_formula(name):
    """With the biases at zero, where they start."""
    for logits, found in decided(name):
        assert found == pytest.approx(FORMULAS[name](logits), rel=1e-5)


@pytest.mark.parametrize("top_k", [2, 4])
def test_expert_choice_gives_every_expert_its_best_tokens(top_k):
    router = build("expert_choice", DIM, EXPERTS, top_k)
    routing = router(*data())
    share = TOKENS * top_k // EXPERTS
    for expert, column in enumerate(router.logits(data()[0]).softmax(1).T.tolist()):
        mine = (routing.ids == expert).any(1).nonzero().flatten().tolist()
        assert sorted(mine) == sorted(best(column, share))
        assert routing.weights[mine, expert].tolist() == pytest.approx([column[t] for t in mine])


def test_pseudo_expert_choice_is_top_k_where_nobody_picked():
    rows = decided("pseudo_expert_choice", picks=3)
    picks = [set(best([h[e] for h, _ in rows], 3)) for e in range(EXPERTS)]
    for token, (h, found) in enumerate(rows):
        mine = [e for e in range(EXPERTS) if token in picks[e]] or list(range(EXPERTS))
        assert found == pytest.approx(renormalised(softmax(h), sorted(mine, key=lambda e: -h[e])[:2]), rel=1e-5)
    assert {len(found) for _, found in rows} == {1, 2}


def test_pseudo_expert_choice_has_at_most_a_full_share_of_picks():
    """10 choices among 8 experts are 2 each where `picks` are more."""
    router = build("pseudo_expert_choice", DIM, EXPERTS, 2, picks=64)
    x, token_ids, positions = data()
    x = x[:1, :5]
    routing, logits = router(x, token_ids[:1, :5], positions[:5]), router.logits(x).tolist()
    picks = [set(best([row[e] for row in logits], 2)) for e in range(EXPERTS)]
    for token, (ids, h) in enumerate(zip(routing.ids.tolist(), logits, strict=True)):
        mine = [e for e in range(EXPERTS) if token in picks[e]] or range(EXPERTS)
        assert [e for e in ids if e >= 0] == sorted(mine, key=lambda e: -h[e])[:2]


def test_soft_moe_normalises_over_tokens_and_over_slots():
    toy = make("soft_moe")
    router, (x, *rest) = toy.routers[0], data()
    routing = router(x, *rest)
    unit = [router.slots / router.slots.norm(dim=0), x / x.norm(dim=2, keepdim=True)]
    logits = unit[1] @ unit[0] * router.scale
    assert routing.combine.shape == (BATCH, SEQUENCE, SEQUENCE * 2)  # S·k/E slots for each of E experts
    assert torch.allclose(routing.dispatch, logits.exp() / logits.exp().sum(1, keepdim=True), atol=1e-6)
    assert torch.allclose(routing.combine, logits.exp() / logits.exp().sum(2, keepdim=True), atol=1e-6)
    assert torch.allclose(routing.scores[:, 1], routing.combine[..., 4:8].sum(2).flatten(), atol=1e-6)  # slots 4 to 7
    new = build("soft_moe", 256, EXPERTS, 2, sequence=64)  # columns of about unit length
    assert new.slots.shape == (256, 128) and new.slots.std().item() == pytest.approx(1 / 16, rel=0.05)


@pytest.mark.parametrize(("tokens", "experts", "skew"), [(64, 8, 0), (100, 7, 1), (256, 4, 3), (9, 3, 0), (5, 8, 1)])
def test_auction_balances_and_is_near_the_best_assignment(tokens, experts, skew):
    rng = torch.Generator().manual_seed(tokens)
    values = torch.randn(tokens, experts, generator=rng) + skew * torch.randn(experts, generator=rng)
    places = -(-tokens // experts)
    owner = balanced_assignment(values, rounds=32)
    assert torch.bincount(owner, minlength=experts).max() <= places
    slots = np.repeat(values.numpy(), places, axis=1)
    optimum = slots[linear_sum_assignment(slots, maximize=True)].sum()
    drawn = torch.arange(tokens) % experts  # balanced, but blind to the values
    found, blind = (values[torch.arange(tokens), one].sum().item() for one in (owner, drawn))
    assert found - blind > 0.9 * (optimum - blind)


def test_an_auction_does_not_depend_on_the_unit_of_the_scores():
    """A bid exceeds indifference by a share of their spread: with a fixed step small scores would all be alike, and large ones take for ever."""
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    owner = balanced_assignment(values, rounds=32)
    for unit in (2.0**-10, 2.0**10):
        assert torch.equal(balanced_assignment(values * unit, rounds=32), owner)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 4), (4, 1)])
def test_auction_of_one(tokens, experts):
    values = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    assert torch.equal(balanced_assignment(values, rounds=4), values.argmax(1))


def test_base_is_balanced_in_training_only():
    toy = make("base")
    loads = [losses.counts(run(toy, data(), training)[1][0].ids, EXPERTS) for training in (True, False)]
    assert (loads[0] == TOKENS / EXPERTS).all() and loads[1].max() > TOKENS / EXPERTS


def test_sinkhorn_plan_is_doubly_stochastic_and_balances():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(512, EXPERTS, generator=rng) + torch.arange(EXPERTS) / 2
    plan = log_plan(logits, 20).exp()
    assert torch.allclose(plan.sum(0), torch.full((EXPERTS,), 1 / EXPERTS))
    assert torch.allclose(plan.sum(1), torch.full((512,), 1 / 512), rtol=0.02)
    loads = [losses.counts(one.topk(2, dim=1).indices, EXPERTS) for one in (logits, plan)]
    assert losses.cv_squared(loads[1]) < 0.02 < 0.5 < losses.cv_squared(loads[0])


def test_token_rounding_keeps_the_best_and_adds_the_next_best():
    toy = make("token_rounding", tile=8)
    plain, training = (run(toy, data(), mode)[1][0] for mode in (False, True))
    p = toy.routers[0].logits(data()[0]).softmax(1)
    for expert in range(EXPERTS):
        before, after = (set((r.ids == expert).any(1).nonzero().flatten().tolist()) for r in (plain, training))
        share = {t: (p[t, expert] / p[t].topk(2).values.sum()).item() for t in range(TOKENS)}
        assert len(after) == 8 * math.floor(len(before) / 8 + 0.5)
        assert after <= before or before <= after
        if after < before:
            assert min([share[t] for t in after], default=math.inf) >= max(share[t] for t in before - after)
        elif before < after:
            assert min(p[t, expert] for t in after - before) >= max(p[t, expert] for t in set(range(TOKENS)) - after)
        assert all(training.weights[t, expert].item() == pytest.approx(share[t], rel=1e-5) for t in after)


def test_gshard_keeps_the_second_expert_by_its_weight():
    """Over many draws the share of kept seconds is the mean of min(1, 2·g2); the first keeps its weight."""
    toy = make("gshard_top2")
    plain = run(toy, data(), False)[1][0]
    drawn = [run(toy, data(), True, seed)[1][0] for seed in range(200)]
    kept = sum((one.ids[:, 1] >= 0).float() for one in drawn) / len(drawn)
    expected = (2 * plain.weights[:, 1]).clamp(max=1)
    assert torch.allclose(kept, expected, atol=4 * 0.5 / math.sqrt(len(drawn)))
    assert all(torch.equal(one.weights[:, 0], plain.weights[:, 0]) for one in drawn)


def test_noise_makes_choices_differ_between_draws_only_in_training():
    for name in ("noisy_topk", "switch_top1"):
        toy = make(name)
        first, second = (run(toy, data(), True, seed)[1][0] for seed in (1, 2))
        assert not torch.equal(first.weights, second.weights)
        first, second = (run(toy, data(), False, seed)[1][0] for seed in (1, 2))
        assert torch.equal(first.weights, second.weights)


def test_noise_has_the_spread_of_its_network(monkeypatch):
    """softplus of its output and a hundredth more, times what is drawn from N(0, 1)."""
    router, (x, *rest) = make("noisy_topk").routers[0], data()
    drawn = torch.randn(TOKENS, EXPERTS)
    monkeypatch.setattr(torch, "randn_like", lambda like: drawn)
    spread = torch.log1p(torch.exp(x.flatten(0, 1) @ router.noise.weight.T)) + 0.01
    expected = (router.logits(x) + drawn * spread).softmax(1)
    assert torch.allclose(router.train()(x, *rest).scores, expected, atol=1e-6)


@pytest.mark.parametrize(("training", "drawn"), [(True, [(0.75, 1.25)]), (False, [])])
def test_jitter_is_to_either_side(training, drawn, monkeypatch):
    found, uniform, toy = [], torch.Tensor.uniform_, make("switch_top1", jitter=0.25)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, *ends: found.append(ends) or uniform(x, *ends))
    run(toy, data(), training)
    assert found == drawn


def test_noisy_top_k_starts_balanced_from_noise_alone():
    router = build("noisy_topk", DIM, EXPERTS, 2)
    assert (router.logits(data()[0]) == 0).all()
    torch.manual_seed(0)
    load = sum(losses.counts(router(*data()).ids, EXPERTS) for _ in range(50))
    assert losses.cv_squared(load) < 0.01


@pytest.mark.parametrize("name", ["deepseek_v3_small", "sigmoid_renorm", "loss_free_bias", "softmax_bias"])
def test_bias_moves_against_the_load(name):
    """By the rate and the sign, over all forward passes of the step; then counting starts anew."""
    toy = make(name, rate=0.125).train()
    router = toy.routers[0]
    load = sum(losses.counts(toy(*data(seed))[1][0].ids, EXPERTS) for seed in (1, 2))
    router.after_step()
    assert torch.equal(router.bias, 0.125 * torch.sign(load.mean() - load)) and (router.load == 0).all()
    toy.eval()(*data())
    assert (router.load == 0).all()  # evaluation leaves no trace
    before = router.bias.clone()
    router.after_step()
    assert torch.equal(router.bias, before)


STATEFUL = [name for name, line in learned.ZOO.items() if line.load().after_step is not learned.Learned.after_step]


@pytest.mark.parametrize("name", STATEFUL)
def test_the_state_of_data_parallel_ranks_is_that_of_one_process(name, monkeypatch):
    """Two ranks, each with a batch of its own, end a step as a process that has seen both batches."""

    def after(*seeds):
        router = make(name).train().routers[0]
        for seed in seeds:
            router(*data(seed))
        return router

    (mine, others, whole), sums = (after(1), after(2), after(1, 2)), []
    before = copy.deepcopy(whole.state_dict())
    whole.after_step()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: sums.append(total.clone()))
    others.after_step()
    assert sums, "a rank keeps its state to itself"
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(sums.pop(0)))
    mine.after_step()
    assert not sums and any(not torch.equal(before[key], one) for key, one in whole.state_dict().items())
    for key, one in whole.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[key], one, msg=key)


def test_the_sequence_loss_can_count_the_scores_of_the_paper():
    """DeepSeek-V3 eq. 17 to 20: f counts the top-k of the plain scores of a sequence, whatever bias and groups chose."""
    found = {}
    for counted in ("routed", "scores"):
        router = make("deepseek_v3_small", counted=counted, losses={"sequence": 1.0}).train().routers[0]
        router.bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
        found[counted] = router(*data()).losses["sequence"].item()
    expected = 0.0
    for rows in router.logits(data()[0]).unflatten(0, (BATCH, SEQUENCE)).tolist():
        s = [[sigmoid(v) for v in row] for row in rows]
        f = [EXPERTS / (2 * SEQUENCE) * sum(e in best(row, 2) for row in s) for e in range(EXPERTS)]
        p = [sum(row[e] / sum(row) for row in s) / SEQUENCE for e in range(EXPERTS)]
        expected += sum(a * b for a, b in zip(f, p, strict=True)) / BATCH
    assert found["scores"] == pytest.approx(expected, rel=1e-5) != pytest.approx(found["routed"], rel=1e-2)


def test_remoe_can_have_one_strength_for_the_model():
    """λ follows the open gates of all layers: one layer is too open and two are closed, which alone would be strengthened and weakened."""
    x, *rest = data()
    for scope, expected in (("layer", [1.5, 1 / 1.5, 1 / 1.5]), ("model", [1.5, 1.5, 1.5])):
        routers = [make("remoe", scope=scope, start=1.0, growth=1.5).routers[0].train() for _ in range(3)]
        join(routers)
        for router, sign in zip(routers, (1, -1, -1), strict=True):
            with torch.no_grad():
                router.network.weight.fill_(0.1 * sign)
            router(x * 0 + 5.0, *rest)
        for router in routers:
            router.after_step()
        assert [router.lead.strength.item() for router in routers] == pytest.approx(expected), scope


def test_balance_losses_of_layers_are_added_up():
    """MegaBlocks takes their mean (`batched_load_balancing_loss`: E · c / (layers · T · k) · Σ n·P), which is our coefficient over the layers."""
    layers, coefficient = 4, 0.01
    toys = [make("softk", seed=seed, losses={"switch": coefficient / layers}).train() for seed in range(layers)]
    ours, theirs = 0.0, 0.0
    for toy in toys:
        routing = toy(*data())[1][0]
        ours += routing.losses["switch"].item()
        theirs += float(losses.counts(routing.ids, EXPERTS) @ routing.scores.mean(0).detach())
    assert ours == pytest.approx(EXPERTS * coefficient / (layers * TOKENS * 2) * theirs, rel=1e-5)


def test_quantile_balancing_of_logits_is_smoothed_and_centred():
    """Megatron-LM's `qb_dual_update` and its update once a step, in plain Python, over two steps of which the second has a bias."""
    router = make("quantile_logits").routers[0].train()
    beta = [0.0] * EXPERTS
    for seed in (1, 2):
        h = router.logits(data(seed)[0]).tolist()
        routing = router(*data(seed))
        moved = [[v - b for v, b in zip(row, beta, strict=True)] for row in h]
        assert [set(ids) for ids in routing.ids.tolist()] == [set(best(row, 2)) for row in moved]
        alpha = [sorted(row)[-3] for row in moved]
        over = [sorted(row[e] - a for row, a in zip(h, alpha, strict=True)) for e in range(EXPERTS)]
        beta = [0.9 * old + 0.1 * column[-(TOKENS * 2 // EXPERTS + 1)] for old, column in zip(beta, over, strict=True)]
        beta = [b - sum(beta) / EXPERTS for b in beta]
        router.after_step()
        assert (-router.bias).tolist() == pytest.approx(beta, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in ZOO if ZOO[name].load().after_step is not Learned.after_step])
def test_a_step_of_two_equal_passes_changes_state_as_one_pass_does(name):
    """As gradients are accumulated over the parts of a batch, what a rule learns without gradients is their mean."""
    after = []
    for passes in (1, 2):
        toy = make(name).train()
        for _ in range(2):
            for _ in range(passes):
                torch.manual_seed(5)  # the same noise
                toy(*data())
            for router in toy.routers:
                router.after_step()
        after.append(toy.state_dict())
    assert after[0].keys() == after[1].keys()
    for key, value in after[0].items():
        torch.testing.assert_close(after[1][key], value)


def skewed_loads(name, steps, **options):
    """Squared CV of the load, before any step and after some, of a router whose logits prefer some experts."""
    torch.manual_seed(0)
    router = build(name, DIM, EXPERTS, 2, **options)
    with torch.no_grad():
        router.network.weight.copy_(torch.randn(EXPERTS, DIM))
    x = torch.randn(8, 128, DIM) + 0.3
    positions, token_ids = torch.arange(128), torch.zeros(8, 128, dtype=torch.long)
    loads = []
    for _ in range(steps):
        loads.append(losses.counts(router(x, token_ids, positions).ids, EXPERTS))
        router.after_step()
    return [losses.cv_squared(load).item() for load in (loads[0], loads[-1])]


def test_a_selection_bias_balances():
    before, after = skewed_loads("sigmoid_renorm", 200, rate=0.005)
    assert before > 0.1 and after < 0.01


def test_quantile_balancing_balances_in_a_few_steps_without_a_rate():
    before, after = skewed_loads("quantile_balancing", 8)
    assert before > 0.1 and after < 0.01
    assert skewed_loads("quantile_balancing", 30, momentum=0.5)[1] < 0.01


def test_quantile_is_the_one_that_gives_each_expert_its_share():
    """With the thresholds held still, T·k/E tokens have a score over β + α, but for ties: an α is a score as well."""
    values = torch.rand(64, EXPERTS, generator=torch.Generator().manual_seed(1))
    old = 0.1 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2))
    alpha = torch.tensor([sorted(row)[-3] for row in (values + old).tolist()])
    over = values + balancing_bias(values, old, 2) - alpha[:, None]
    # 16 = T·k/E, and then there is the quantile itself
    assert ((over > 1e-6).sum(0) <= 16).all() and ((over > -1e-6).sum(0) > 16).all()


def test_remoe_pushes_towards_k_open_gates():
    toy = make("remoe", growth=1.5).train()
    router = toy.routers[0]
    x, *rest = data()
    for shift, factor in ((5.0, 1.5), (-5.0, 1 / 1.5)):  # all gates open, all closed
        with torch.no_grad():
            router.network.weight.fill_(0.1)
        before = router.strength.item()
        router((x * 0 + shift), *rest)
        router.after_step()
        assert router.strength.item() == pytest.approx(before * factor)
    before, closed = router.strength.item(), router.eval()(x * 0 - 5, *rest)
    router.after_step()
    assert router.strength.item() == before and router.seen == 0
    assert (closed.ids == -1).all() and torch.allclose(closed.scores, torch.tensor(1 / EXPERTS))


def test_remoe_loss_weighs_open_gates_by_their_load():
    toy = make("remoe", start=0.5).train()
    router, (x, *rest) = toy.routers[0], data()
    gates = [[max(0.0, v) for v in row] for row in router.logits(x).tolist()]
    load = [sum(row[e] > 0 for row in gates) for e in range(EXPERTS)]
    share = [EXPERTS * n / (2 * TOKENS) for n in load]
    expected = 0.5 * sum(f * row[e] for row in gates for e, f in enumerate(share)) / TOKENS
    assert router(x, *rest).losses["l1"].item() == pytest.approx(expected, rel=1e-5)


def test_null_experts_use_k_true_ones_under_even_loads():
    router = build("null_experts", DIM, EXPERTS, 2)
    assert router.picks == 4 and router.extra == ("zero",) * EXPERTS
    assert build("null_experts", DIM, EXPERTS, 2, nulls=4).picks == 3


@pytest.mark.parametrize(("name", "loss"), [("null_experts", "null_switch"), ("moepp", "heterogeneous")])
def test_balance_with_experts_that_cost_nothing(name, loss):
    """Null experts count as the mean of their loads; MoE++ weighs its zero-computation experts by τ = 0.75."""
    toy = make(name, losses={loss: 1.0}).train()
    routing = toy(*data())[1][0]
    p = [softmax(row) for row in toy.routers[0].logits(data()[0]).tolist()]
    every, true = range(len(p[0])), range(EXPERTS)
    load = [(routing.ids == e).sum().item() for e in every]
    if name == "null_experts":
        nulls = load[EXPERTS:]
        assert len(set(nulls)) > 1
        weighted = [load[e] if e in true else sum(nulls) / len(nulls) for e in every]
    else:
        weighted = [load[e] * (1 if e in true else 0.75) for e in every]
    expected = len(every) * sum(w / sum(load) * sum(row[e] for row in p) / TOKENS for e, w in enumerate(weighted))
    assert routing.losses[loss].item() == pytest.approx(expected, rel=1e-5)


def test_topk_hard_offers_the_optimiser_nothing():
    """Not even weight decay may move it."""
    assert not [p for p in build("topk_hard", DIM, EXPERTS, 2).parameters() if p.requires_grad]


def test_hash_by_token_is_a_table():
    for name, option in (
        ("hash_random", {"vocabulary": VOCABULARY}),
        ("hash_balanced", {"frequencies": [1.0] * VOCABULARY}),
    ):
        router = build(name, DIM, EXPERTS, 2, **option)
        x, token_ids, positions = data()
        ids, elsewhere = (router(one, token_ids, positions).ids for one in (x, -x))
        assert torch.equal(ids, elsewhere) and torch.equal(ids, router.table[token_ids.flatten()])
    tables = [build("hash_random", DIM, EXPERTS, 2, vocabulary=VOCABULARY, seed=seed).table for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])


def test_balanced_hash_balances_a_zipf_text_and_the_random_one_does_not():
    frequencies = [1 / (1 + rank) for rank in range(200)]
    random.Random(0).shuffle(frequencies)
    loads = []
    for name, options in (("hash_balanced", {"frequencies": frequencies}), ("hash_random", {"vocabulary": 200})):
        table = build(name, DIM, EXPERTS, 2, **options).table
        loads.append(
            [sum(f for f, row in zip(frequencies, table.tolist(), strict=True) if e in row) for e in range(EXPERTS)]
        )
    spread = [max(load) / (sum(load) / EXPERTS) for load in loads]
    assert spread[0] < 1.01 < 1.1 < spread[1]


def test_hash_by_position_sees_the_position_alone():
    ids = build("hash_position", DIM, EXPERTS, 3)(*data()).ids.view(BATCH, SEQUENCE, 3)
    assert ids[1, 7].tolist() == [7, 0, 1] and (ids == ids[:1]).all()


@pytest.mark.parametrize(
    ("network", "count"),
    [("linear", 96 * 8), ("mlp", 96 * 64 + 64 + 64 * 8), ("mlp_hadamard", 2 * 96 * 64 + 64 + 96 + 96 * 8)],
)
def test_networks_have_the_predecessors_shapes(network, count):
    one = learned.build_network(network, 96, 8)
    assert sum(p.numel() for p in one.parameters()) == count
    assert one(torch.randn(2, 3, 96)).shape == (2, 3, 8)


@pytest.mark.parametrize(("dim", "hidden"), [(12, 64), (301, 150)])
@pytest.mark.parametrize("network", ["mlp", "mlp_hadamard"])
def test_networks_with_a_hidden_layer_follow_their_formulas(network, dim, hidden):
    """GELU in between; the one gives the logits, the other a gate over the features of x. The last layer starts small."""
    one, x = learned.build_network(network, dim, 400), torch.randn(5, dim)
    weight, bias, *back, last = one.parameters()
    middle = torch.nn.functional.gelu(x @ weight.T + bias)
    assert middle.shape == (5, hidden) and last.std().item() == pytest.approx(0.02, rel=0.05)
    if network == "mlp_hadamard":
        middle = (middle @ back[0].T + back[1]) * x
    assert torch.allclose(one(x), middle @ last.T, atol=1e-6)


def test_a_threshold_has_one_token_at_least():
    """Of fewer tokens than an even load of one: the best of each expert."""
    router = build("expert_threshold", DIM, EXPERTS, 1).train()
    x, tokens = torch.randn(1, EXPERTS // 2, DIM), torch.zeros(1, EXPERTS // 2, dtype=torch.int64)
    router(x, tokens, torch.arange(EXPERTS // 2))
    torch.testing.assert_close(router.pending, router.logits(x).detach().amax(0))
