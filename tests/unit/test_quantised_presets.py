"""Which modules a quantization_config is of: the weights of a preset are those of its routed experts, or there are none."""

import json
import time

import pytest
from test_huggingface import CONFIGS

from moe_routing_bench.config import checkpoint_formats, huggingface

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
ROW = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
KIMI = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


def preset(tmp_path, quantised, name="deepseek-v3"):
    """DeepSeek-V3 has 61 layers, 58 of them with experts."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | {"quantization_config": quantised}))
    found, notes = huggingface.preset(path)
    return found.get("weights"), notes


def groups_of(*groups):
    named = {
        f"group_{number}": {"targets": targets, "weights": weights} for number, (targets, weights) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": named}


@pytest.mark.parametrize(
    ("kept", "weights"),
    [
        (KIMI, "e4m3_block128"),
        (["gate", "e_score_correction_bias", "lm_head"], "e4m3_block128"),
        (["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"], "e4m3_block128"),
        (["self_attn", "mlp.shared_expert", "mlp.shared_expert_gate", "mlp.gate"], "e4m3_block128"),
        (["re:.*mlp.gate$", "re:.*mlp.gate[.].*"], "e4m3_block128"),
        (["mlp.gate.expert_bias", "mlp.expert_gate"], "e4m3_block128"),
        ([r"re:.*layers\.61\..*", "model.layers.61.mlp.experts"], "e4m3_block128"),
        ([f"model.layers.{layer}.mlp" for layer in range(3)], "e4m3_block128"),
        ([f"model.layers.{layer}.mlp.experts" for layer in range(3, 60)], "e4m3_block128"),
        ([f"model.layers.{layer}.mlp.experts" for layer in range(3, 61)], None),
        (["mlp"], None),
        (["model.layers.*.mlp"], None),
        (["*.mlp.*"], None),
        (["re:.*mlp.*"], None),
        ([r"re:.*\.w2$"], None),
        (["re:.*down_proj"], None),
        (["re:.*block_sparse_moe.*"], None),
        (["re:.*(shared_experts|experts).*"], None),
        (["re:model.layers.*"], None),
        (["re:("], None),  # no pattern at all: what it keeps is unknown
        (["re:" + "(a+)+" * 50], None),
        (["lm_head", 3, None, {"experts": 1}], "e4m3_block128"),
    ],
    ids=lambda each: str(each)[:50],
)
def test_experts_that_stay_as_they_are_have_no_format(kept, weights, tmp_path):
    found, notes = preset(tmp_path, FP8 | {"modules_to_not_convert": kept})
    assert found == weights and any("weights" in note for note in notes)


def test_layers_whose_experts_stay_as_they_are_are_noted(tmp_path):
    _, notes = preset(tmp_path, FP8 | {"ignored_layers": [f"model.layers.{layer}.mlp.experts" for layer in (3, 60)]})
    assert any("experts of 2 layers as they are: [3, 60]" in note for note in notes)


@pytest.mark.parametrize(
    ("groups", "weights"),
    [
        ([(["Linear"], INT4)], "int4_g32"),
        ([(["re:.*self_attn.*"], ROW)], None),
        ([(["re:.*self_attn.*"], ROW), (["re:.*mlp.experts.*"], INT4)], "int4_g32"),
        ([(["re:.*self_attn.*", r"re:.*shared_experts.*"], ROW), (["Linear"], INT4)], "int4_g32"),
        ([(["re:.*experts.*down_proj"], ROW), (["re:.*experts.*"], INT4)], None),
        ([(["self_attn"], INT4)], None),
        ([([], INT4)], None),
    ],
    ids=lambda each: str(each)[:60],
)
def test_the_format_is_that_of_the_group_with_the_experts(groups, weights, tmp_path):
    found, notes = preset(tmp_path, groups_of(*groups))
    assert found == weights and any("weights" in note for note in notes)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*x", ".*" * 5 + "x", "([a-z._0-9]+)+!", "(x{9}){9}{9}", "\\*" * 500, r"\d+\d+\d+\d+\d+!"]
)
def test_no_pattern_of_a_file_takes_long(pattern):
    start = time.process_time()
    assert checkpoint_formats.named_experts([f"re:{pattern}"]) and time.process_time() - start < 5


def test_a_note_on_the_quantisation_is_there_once(tmp_path):
    _, notes = preset(tmp_path, "fp8")
    assert len([note for note in notes if "quantization_config" in note]) == 1
