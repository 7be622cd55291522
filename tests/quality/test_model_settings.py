"""Settings of a model around its routers: how a shared expert is weighted, and which rule each layer has."""

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from moe_routing_bench.config import load as config
from moe_routing_bench.grid.run_spec import ATTENTIONS, Run
from moe_routing_bench.quality import compare, language_model, plan, run_rows, train
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers.zoo import ZOO

V4 = "deepseek_v4_hash+sqrtsoftplus_renorm"
DIM, HIDDEN, EXPERTS, VOCABULARY = 16, 8, 4, 32
RUN = Run(experts=EXPERTS, dim=DIM, heads=2, layers=2, expert_hidden=HIDDEN, sequence=16, batch=2, shared_hidden=HIDDEN)
GRID = {"grid": [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]}


def model(**change: Any) -> language_model.TinyLM:
    """With weights that are large enough for outputs of size one."""
    built = language_model.build(dataclasses.replace(RUN, **change), [1] * 256).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return built


BLOCKS = {  # settings, module, block, router in it, shared expert, and fields of its configuration
    "gated": (
        {"router": "softk", "shared_gate": "gated"}, "qwen3_next", "Qwen3NextSparseMoeBlock",
        {"num_experts": EXPERTS, "norm_topk_prob": True, "shared_expert_intermediate_size": HIDDEN},
    ),
    "plain": (
        {"router": V4, "options": {"vocabulary": VOCABULARY}}, "deepseek_v4", "DeepseekV4SparseMoeBlock",
        {"mlp_layer_types": ["hash_moe", "moe"], "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "vocab_size": VOCABULARY,
         "swiglu_limit": 1e9, "mlp_bias": False},
    ),
    "joint": (
        {"router": "sigmoid_renorm", "shared_gate": "joint", "options": {"scale": 8.0}}, "inkling", "InklingMoE",
        {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "route_scale": 8.0},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", BLOCKS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_is_the_block_of_its_model_in_transformers(way: str, number: int) -> None:
    """Qwen3-Next's gated shared expert, Inkling's jointly normalised one, and both kinds of layers of DeepSeek-V4: outputs from the same weights."""
    pytest.importorskip("transformers")
    change, module, name, more = BLOCKS[way]
    layer = model(capacity_factor=None, **change).layers[number]
    fields = {"num_experts_per_tok": 2, "hidden_size": DIM, "num_local_experts": EXPERTS, "hidden_act": "silu"}
    fields |= {"moe_intermediate_size": HIDDEN, "intermediate_size": HIDDEN, "_experts_implementation": "eager"} | more
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    block = getattr(found, name)(SimpleNamespace(**fields), *([number] if way == "plain" else [])).float().eval()
    x, token_ids = torch.randn(2, 16, DIM), torch.randint(VOCABULARY, (2, 16))
    (router,), own = layer.routers, layer.experts
    assert layer.shared is not None
    with torch.no_grad():
        block.gate.weight.copy_(router.get_parameter("network.weight"))
        if hasattr(router, "table"):
            block.gate.tid2eid.copy_(router.table)
        if way == "joint":
            block.gate.global_scale.fill_(1.0)
        if layer.gate is not None:
            block.shared_expert_gate.weight.copy_(layer.gate.weight)
        block.experts.gate_up_proj.copy_(own.w13_EDH.transpose(1, 2))
        block.experts.down_proj.copy_(own.w2_EHD.transpose(1, 2))
        shared = block.shared_expert if way == "gated" else block.shared_experts
        first, second = layer.shared.w13_EDH[0].T.chunk(2)
        for part, value in (("gate_proj", first), ("up_proj", second), ("down_proj", layer.shared.w2_EHD[0].T)):
            target = getattr(shared, part)
            (target if way == "joint" else target.weight).copy_(value[None] if way == "joint" else value)
        wanted = block(x, token_ids) if way == "plain" else block(x)
        found = layer(x, token_ids, torch.arange(16))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_each_gate_is_counted() -> None:
    """A gate has D weights a layer, which every token multiplies; two passes compute the shared expert twice."""
    alone = language_model.build(dataclasses.replace(RUN, router="sigmoid_renorm", shared_hidden=0), [1] * 256)
    found = {}
    for way in ("plain", "gated", "joint"):
        run = dataclasses.replace(RUN, router="sigmoid_renorm", shared_gate=way)
        one = language_model.build(run, [1] * 256)
        more = [b - a for a, b in zip(language_model.parameters(alone), language_model.parameters(one), strict=True)]
        active = language_model.parameters(one)[1]
        found[way] = (*more, language_model.flops_per_token(one, run, active))
        assert found[way][2] == 6 * (active - 256 * DIM) + 6 * 2 * 16 * DIM
    shared, gate = 2 * 3 * DIM * HIDDEN, 2 * DIM
    assert found["plain"][:2] == (shared, shared) and found["gated"] == found["joint"]
    assert found["gated"][:2] == (shared + gate, shared + gate)
    twice = dataclasses.replace(RUN, router="chain_of_experts")
    one = language_model.build(twice, [1] * 256)
    active = language_model.parameters(one)[1]
    assert language_model.flops_per_token(one, twice, active) == 6 * (active + shared - 256 * DIM) + 6 * 2 * 16 * DIM


def test_attention_normalises_queries_and_keys_or_mixes_each_key_with_the_one_before() -> None:
    """Against the formulas, with weights that are not those of the start; what all kinds share starts equal."""
    built = {kind: language_model.build(dataclasses.replace(RUN, attention=kind), [1] * 256) for kind in ATTENTIONS}
    plain = built["plain"].state_dict()
    added = {
        kind: {name: value for name, value in one.state_dict().items() if name not in plain}
        for kind, one in built.items()
    }
    assert [len(added[kind]) for kind in ATTENTIONS] == [0, 2 * RUN.layers, RUN.layers]
    assert all(torch.equal(one.state_dict()[name], value) for one in built.values() for name, value in plain.items())
    x, heads, width = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1)), RUN.heads, DIM // RUN.heads
    cos, sin = language_model.turns(torch.arange(5), width)
    for kind in ATTENTIONS:
        layer = built[kind].blocks[0].attention
        with torch.no_grad():
            for parameter in (p for name, p in layer.named_parameters() if "norm" in name or "own" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
        q, k, v = layer.qkv(x).view(2, 5, 3, heads, width).unbind(2)
        if kind == "qk_norm":
            q, k = [
                one / (one.square().mean(-1, keepdim=True) + torch.finfo(one.dtype).eps).sqrt() * norm.weight
                for one, norm in ((q, layer.q_norm), (k, layer.k_norm))
            ]
        if kind == "key_shift":
            own = layer.own_N11.sigmoid().view(heads, 1)
            k = torch.stack([k[:, 0], *(own * k[:, i] + (1 - own) * k[:, i - 1] for i in range(1, 5))], 1)
        q, k = (language_model.rotate(one.transpose(1, 2), cos, sin) for one in (q, k))
        scores = (q @ k.mT / width**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected = layer.out((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x, cos, sin), expected)


def test_gates_change_no_other_weight_at_the_start() -> None:
    states = [
        language_model.build(dataclasses.replace(RUN, router="softk", shared_gate=way), [1] * 256).state_dict()
        for way in ("plain", "gated")
    ]
    plain, gated = states
    assert {name for name in gated if name not in plain} == {f"blocks.{layer}.ffn.gate.weight" for layer in (0, 1)}
    assert all(torch.equal(value, gated[name]) for name, value in plain.items())


@pytest.mark.parametrize(
    "change",
    [
        {"shared_gate": "gated"},
        {"router": "sigmoid_renorm", "shared_gate": "joint"},
        {"router": V4},
        {"attention": "key_shift"},
    ],
)
@pytest.mark.parametrize("factor", [None, 0.75])
@pytest.mark.parametrize("training", [True, False])
def test_these_models_are_causal(change: dict, factor: float | None, training: bool) -> None:
    """Logits up to a position do not move with later tokens of their sequence, with a capacity neither; other sequences move them with one alone."""
    one = model(**change, capacity_factor=factor).train(training)
    torch.manual_seed(3)
    ids = torch.randint(256, (2, 16))
    later, other = ids.clone(), ids.clone()
    later[1, 8:], other[0] = (later[1, 8:] + 7) % 256, (other[0] + 7) % 256
    with torch.no_grad():
        before, after, elsewhere = (one(tokens) for tokens in (ids, later, other))
    torch.testing.assert_close(before[1, :8], after[1, :8], atol=1e-5, rtol=1e-4)
    assert torch.allclose(before[1], elsewhere[1], atol=1e-5, rtol=1e-4) == (factor is None)


def test_the_shared_expert_takes_no_place_and_is_no_choice() -> None:
    """Of a joint gate: loads, drops and traces are those of chosen experts."""
    one = model(router="sigmoid_renorm", shared_gate="joint", capacity_factor=1.0)
    one(torch.randint(256, (2, 16)))
    (seen,) = one.layers[0].seen
    assert seen.ids_TK is not None and seen.ids_TK.shape == (32, 2) and int(seen.ids_TK.max()) < EXPERTS


@pytest.mark.parametrize("way", ["plain", "gated", "joint"])
def test_the_shared_expert_has_its_weight(way: str) -> None:
    """1, the sigmoid of its logit, or its share of the sum: what is taken away from a layer whose shared expert gives nothing."""
    layer = model(router="sigmoid_renorm", shared_gate=way, capacity_factor=None).layers[0]
    x, rest = torch.randn(1, 8, DIM), (torch.zeros(1, 8, dtype=torch.long), torch.arange(8))
    assert layer.shared is not None
    with torch.no_grad():
        out, whole = layer.shared.padded(x)[0], layer(x, *rest)[0]
        weights = {
            "plain": lambda: torch.ones(8, 1),
            "gated": lambda: layer.gate(x[0]).sigmoid(),
            "joint": lambda: layer.routers[0](x, *rest).weights[:, -1:],
        }  # type: ignore[misc]
        wanted = weights[way]() * out
        layer.shared.w2_EHD.zero_()
        torch.testing.assert_close(whole - layer(x, *rest)[0], wanted, atol=1e-5, rtol=1e-3)


def test_identity_experts_are_one_sum() -> None:
    """LongCat: the weights of all identity experts of a token multiply it; no row is computed for them."""
    one = model(router="longcat_zero", shared_hidden=0, capacity_factor=None)
    layer, x = one.layers[0], torch.randn(1, 8, DIM)
    routing = layer.routers[0](x, torch.zeros(1, 8, dtype=torch.long), torch.arange(8))
    share = (routing.weights * (routing.ids >= EXPERTS)).sum(1, keepdim=True)
    experts = torch.stack([layer.experts.padded(x.expand(EXPERTS, 8, DIM))[e] for e in range(EXPERTS)])
    weights = torch.zeros(8, EXPERTS + 2).scatter(1, routing.ids.long(), routing.weights)[:, :EXPERTS]
    wanted = torch.einsum("te,etd->td", weights, experts) + share * x[0]
    assert share.max() > 0
    torch.testing.assert_close(
        layer(x, torch.zeros(1, 8, dtype=torch.long), torch.arange(8))[0], wanted, atol=1e-5, rtol=1e-4
    )


def test_a_layer_has_the_rule_of_its_place(shared_text: str, tmp_path: Path) -> None:
    """In the model, in its rows and in the name of its file; options go to the rules that have them."""
    run = dataclasses.replace(
        RUN,
        router=V4,
        layers=3,
        corpora={shared_text: None},
        steps=3,
        warmup=1,
        altered=False,
        options={"rate": 0.5, "seed": 4},
    )
    routers = language_model.build(run, [1] * 256).routers
    assert [router.rule.name for router in routers] == ["deepseek_v4_hash", *["sqrtsoftplus_renorm"] * 2]  # type: ignore[union-attr]
    assert routers[1].rate == 0.5 and Run.from_spec(run.spec) == run and f"-{V4}-" in run.name
    train.train(run, tmp_path / "run.parquet", "cpu")
    stored = run_rows.last(tmp_path / "run.parquet")
    assert (stored["router"], stored["causal"], stored["learns"], stored["shared_gate"]) == (V4, True, True, "plain")
    assert not train.is_causal(dataclasses.replace(run, router="softk+expert_choice"))
    assert not train.is_causal(dataclasses.replace(run, router="gshard_top2+softk", capacity_factor=1.0))
    with pytest.raises(UserError, match="option for router sqrtsoftplus_renorm: got 'rated'"):
        language_model.build(dataclasses.replace(run, router="sqrtsoftplus_renorm", options={"rated": 1}), [1] * 256)


def entry(**change: Any) -> dict[str, Any]:
    return {"label": "e", "router": ["softk"], "seed": [1], "corpora": {"stdlib": 1000}, "lr": 0.1} | change


def test_a_config_lists_gates_and_rules_by_layer() -> None:
    """Runs of an entry differ in them and are compared: they have one config hash, and names that say which is which."""
    routers = ["sigmoid_renorm", f"{V4}"]
    made = plan.expand(
        config.load(GRID | {"quality": [entry(router=routers, shared_gate=["plain", "gated"], shared_hidden=8)]})[
            "quality"
        ]
    )
    runs = list(made.finals.values())
    assert {(run.router, run.shared_gate) for run in runs} == {
        (name, way) for name in routers for way in ("plain", "gated")
    }
    assert len({run.config_hash for run in runs}) == 1 and sum("shared-gated" in run.name for run in runs) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_gate": ["gated"]}, "shared_gate: got 'gated'; allowed: plain; hint: without shared_hidden"),
        (
            {"shared_gate": ["joint"], "shared_hidden": 8},
            "for router softk: got 'joint'; .* joint is for deepseek_v3_small, sigmoid_renorm",
        ),
        ({"router": ["softk+softk+softk"]}, "3 rules in softk.*at most one for each of 2 layers"),
        ({"router": ["softk+dense"]}, "router"),
    ],
)
def test_what_a_model_cannot_have_is_refused_when_it_is_planned(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan.expand(config.load(GRID | {"quality": [entry(**change)]})["quality"])


def test_contestants_say_how_their_shared_expert_is_weighted() -> None:
    """Where it varies within an entry."""
    rows = pd.DataFrame(
        {
            "run": ["a", "b", "c"],
            "label": ["x", "x", "y"],
            "purpose": "final",
            "step": 1,
            "router": "softk",
            "network": "linear",
        }
        | {
            "capacity_factor": 1.0,
            "drop_policy": "position",
            "train_mode": "joint",
            "shared_gate": ["plain", "gated", "plain"],
        }
    )
    assert list(compare.finals(rows)["contestant"]) == ["softk shared plain", "softk shared gated", "softk"]


def test_every_rule_that_sums_over_its_own_scores_can_be_joint() -> None:
    assert {name for name, rule in ZOO.items() if "shared" in rule.options} == {
        "sigmoid_renorm",
        "sqrtsoftplus_renorm",
        "deepseek_v3_small",
    }
