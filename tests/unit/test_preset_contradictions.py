"""Presets from config.json files whose fields ask for another rule than the architecture's, or have values that say nothing."""

import json

import pytest
from test_huggingface import CONFIGS

from moe_routing_bench.config import huggingface
from moe_routing_kernels.errors import UserError

AFMOE = {
    "model_type": "afmoe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_shared_experts": 1,
    "route_scale": 2.826,
    "route_norm": True,
    "score_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "hidden_size": 2304,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
}
COHERE2 = {
    "model_type": "cohere2_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_shared_experts": 0,
    "expert_selection_fn": "softmax",
    "norm_topk_prob": False,
}
MORE = {
    "llama4-scout-text": CONFIGS["llama4-scout"]["text_config"],
    "trinity-mini": AFMOE,
    "kimi-linear-48b-a3b": KIMI_LINEAR,
    "cohere2": COHERE2,
}
FLAT = {name: fields for name, fields in CONFIGS.items() if "text_config" not in fields} | MORE


def preset(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return huggingface.preset(path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "mixtral-8x7b",
            {"scoring_func": "sigmoid"},
        ),  # the fields of MiniMax-M2 under the model_type of its predecessor
        ("qwen3-30b-a3b", {"scoring_func": "sigmoid"}),
        ("qwen3-30b-a3b", {"score_function": "sigmoid"}),
        ("qwen3-30b-a3b", {"scoring_func": "s" * 10_000}),
        ("qwen3-30b-a3b", {"moe_router_activation": "sigmoid"}),
        ("deepseek-v3", {"route_norm": False}),
        ("jamba-v0.1", {"norm_topk_prob": True}),
        ("mixtral-8x7b", {"norm_topk_prob": False}),
        ("mixtral-8x7b", {"norm_expert_weight": False}),
        ("minimax-m2", {"norm_topk_prob": False}),
        ("minimax-m2", {"n_group": 8, "topk_group": 4}),
        ("qwen3-30b-a3b", {"n_group": 8, "topk_group": 4}),
        ("deepseek-v3", {"score_func": "softmax"}),
        ("deepseek-v2", {"score_function": "sigmoid"}),
        ("deepseek-v4-flash", {"score_func": "sigmoid"}),
        ("llama4-scout-text", {"score_func": "softmax"}),
        ("trinity-mini", {"score_func": "softmax"}),
        ("trinity-mini", {"route_norm": False}),
        ("trinity-mini", {"num_expert_groups": 8, "num_limited_groups": 4}),
        ("kimi-linear-48b-a3b", {"moe_router_activation_func": "softmax"}),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_field_that_asks_for_another_rule_makes_a_model_unsupported(name, changes, tmp_path):
    """Since the architecture's rule does not read it, the file does not prove which of the two is right."""
    found, _ = preset(tmp_path, FLAT[name] | changes)
    field, value = next(iter(changes.items()))
    assert found["router"] is None and f"its {field} is {value!r}"[:40] in found["unsupported"]
    assert len(found["unsupported"]) < 500


@pytest.mark.parametrize(
    ("name", "changes", "router"),
    [
        ("mixtral-8x7b", {"scoring_func": "softmax", "norm_topk_prob": True}, "softmax_topk_renorm"),
        ("jamba-v0.1", {"norm_topk_prob": False, "scoring_func": None}, "softmax_topk"),
        ("minimax-m2", {"n_group": 1, "topk_group": 1}, "sigmoid_renorm"),
        ("qwen3-30b-a3b", {"n_group": 4, "topk_group": 4}, "softmax_topk_renorm"),
        ("qwen3-30b-a3b", {"num_expert_group": 4, "topk_group": 4}, "softmax_topk_renorm"),
        ("deepseek-v2-lite", {"n_group": 8, "topk_group": 3}, "softmax_topk"),  # a method that has no groups
        ("deepseek-v3", {"score_func": "sigmoid"}, "deepseek_v3"),
        ("deepseek-v3", {"route_norm": True, "norm_expert_weight": True}, "deepseek_v3"),
        ("llama4-scout-text", {"score_func": "sigmoid"}, "llama4"),
        ("mixtral-8x7b", {"n_group": 0, "topk_group": None}, "softmax_topk_renorm"),
        ("trinity-mini", {}, "sigmoid_renorm"),
        ("kimi-linear-48b-a3b", {}, "sigmoid_renorm"),
        ("cohere2", {}, "softmax_topk_renorm"),  # a softmax of the chosen logits sums to 1 either way
        ("cohere2", {"expert_selection_fn": "sigmoid", "norm_topk_prob": True}, "sigmoid_renorm"),
    ],
    ids=str,
)
def test_a_field_that_agrees_with_the_rule_is_neither_refused_nor_named(name, changes, router, tmp_path):
    found, notes = preset(tmp_path, FLAT[name] | changes)
    assert found["router"] == router and "unsupported" not in found
    assert not any("leaves out" in note and field in note for note in notes for field in changes)


@pytest.mark.parametrize("value", [0, 0.0, -0.0], ids=repr)
def test_a_factor_of_0_is_refused_under_the_name_in_the_file(value, tmp_path):
    """It was taken for 1."""
    with pytest.raises(UserError, match=r"route_scale of config .*got -?0"):
        preset(tmp_path, AFMOE | {"route_scale": value})


def test_a_factor_that_is_null_is_1_with_a_note(tmp_path):
    found, notes = preset(tmp_path, CONFIGS["deepseek-v3"] | {"routed_scaling_factor": None})
    assert found["routed_scale"] == 1.0 and any("routed_scaling_factor is null" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek-v3", "n_routed_experts"),
        ("mixtral-8x7b", "num_local_experts"),
        ("kimi-linear-48b-a3b", "num_experts_per_token"),
        ("kimi-linear-48b-a3b", "moe_renormalize"),
        ("trinity-mini", "num_shared_experts"),
    ],
)
def test_a_message_has_the_name_of_the_file_for_a_field(name, field, tmp_path):
    """Not the name that another architecture has for it."""
    with pytest.raises(UserError, match=f"^{field} of config "):
        preset(tmp_path, FLAT[name] | {field: "many"})


def test_a_name_that_is_null_does_not_hide_another(tmp_path):
    found, _ = preset(tmp_path, KIMI_LINEAR | {"num_experts_per_token": None, "num_experts_per_tok": 6})
    assert found["top_k"] == 6


HUNYUAN = {
    "model_type": "hunyuan_v1_moe",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "num_hidden_layers": 32,
    "moe_layer_num_skipped": 0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (3072, 1, 3072)),
        ({"moe_intermediate_size": None, "num_shared_expert": None}, (3072, 1, 3072)),
        ({"moe_intermediate_size": [2048] * 32}, (2048, 1, 2048)),
        ({"moe_intermediate_size": 1536, "num_shared_expert": 2}, (1536, 2, 3072)),
        ({"num_shared_expert": [2] * 32}, (3072, 2, 6144)),
        ({"num_shared_expert": 0}, (3072, 0, None)),
    ],
    ids=lambda each: str(each)[:60],
)
def test_lists_of_every_layer_are_sizes(changes, expected, tmp_path):
    """As the files of Hunyuan-A13B have them."""
    found, _ = preset(tmp_path, HUNYUAN | changes)
    assert (found["intermediate"], found["shared_experts"], found["shared_intermediate"]) == expected


def test_lists_that_differ_from_layer_to_layer_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"num_shared_expert of config .*one number for all layers"):
        preset(tmp_path, HUNYUAN | {"num_shared_expert": [1] * 31 + [2]})


def test_layers_that_skip_the_experts_are_counted(tmp_path):
    _, notes = preset(tmp_path, HUNYUAN | {"moe_layer_num_skipped": 4})
    assert any("28 of 32 have experts, by moe_layer_num_skipped 4" in note for note in notes)


@pytest.mark.parametrize(("count", "noted"), [(1, False), (None, False), (2, True), (0, True)])
def test_a_number_of_shared_experts_that_their_width_hides_is_named(count, noted, tmp_path):
    found, notes = preset(tmp_path, CONFIGS["nemotron-3-nano-30b"] | {"n_shared_experts": count})
    assert (found["shared_experts"], found["shared_intermediate"]) == (1, 3712)
    assert any(f"n_shared_experts is {count}" in note for note in notes) == noted


def test_an_empty_part_is_no_language_model(tmp_path):
    fields = CONFIGS["qwen3-30b-a3b"]
    assert preset(tmp_path, fields | {"text_config": {}}) == preset(tmp_path, fields)


LING = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "first_k_dense_replace": 1,
}
LING_LITE = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_shared_experts": 2,
    "norm_topk_prob": True,
}
DEEPSEEK_MOE = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("bailing_moe_v2", LING, ("deepseek_v3", 2.5, 1, 512)),
        ("bailing_moe", LING, ("deepseek_v3", 2.5, 1, 512)),
        ("bailing_moe", LING_LITE, ("softmax_topk_renorm", 1.0, 2, 2816)),
        ("bailing_moe", LING_LITE | {"norm_topk_prob": False}, ("softmax_topk", 1.0, 2, 2816)),
        (
            "bailing_moe",
            LING | {"score_function": "softmax"},
            (None, 2.5, 1, 512),
        ),  # which would have groups of a softmax
        ("bailing_moe", LING | {"score_function": "tanh"}, (None, 2.5, 1, 512)),
        ("bailing_moe_v2", LING | {"score_function": "softmax"}, (None, 2.5, 1, 512)),
        ("deepseek", DEEPSEEK_MOE, ("softmax_topk", 1.0, 2, 2816)),
        ("deepseek", DEEPSEEK_MOE | {"norm_topk_prob": True}, ("softmax_topk_renorm", 1.0, 2, 2816)),
        ("deepseek", DEEPSEEK_MOE | {"scoring_func": "sigmoid"}, (None, 1.0, 2, 2816)),
    ],
)
def test_architectures_of_which_the_library_has_no_class(kind, fields, expected, tmp_path):
    found, _ = preset(tmp_path, fields | {"model_type": kind})
    assert (
        tuple(found[name] for name in ("router", "routed_scale", "shared_experts", "shared_intermediate")) == expected
    )
    assert ("unsupported" in found) == (expected[0] is None)


@pytest.mark.parametrize(
    ("kind", "fields", "missing"),
    [
        ("bailing_moe", LING_LITE, "norm_topk_prob"),
        ("bailing_moe", LING_LITE, "num_shared_experts"),
        ("bailing_moe_v2", LING, "routed_scaling_factor"),
        ("bailing_moe_v2", LING, "topk_group"),
        ("deepseek", DEEPSEEK_MOE, "n_shared_experts"),
        ("deepseek", DEEPSEEK_MOE, "norm_topk_prob"),
    ],
)
def test_a_field_without_a_class_is_asked_for(kind, fields, missing, tmp_path):
    left = {name: value for name, value in fields.items() if name != missing} | {"model_type": kind}
    with pytest.raises(UserError, match=r"^config .*: got 'no "):
        preset(tmp_path, left)


@pytest.mark.parametrize("value", [2**70, 1e300, float("inf"), float("nan")])
def test_no_class_is_made_of_a_number_without_end(value, tmp_path):
    """Classes make a list of all layers: one that was made for another field that is missing took forever."""
    fields = {name: each for name, each in CONFIGS["gpt-oss-20b"].items() if name != "intermediate_size"}
    with pytest.raises(UserError, match=r"^num_hidden_layers of config "):
        preset(tmp_path, fields | {"num_hidden_layers": value})
