"""Fields of a config.json that are missing, wrong or beyond what a preset says: nothing is dropped in silence, and nothing is guessed."""

import json
import subprocess
import sys

import pytest
from test_huggingface import CONFIGS

from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import huggingface, presets, schema
from moe_routing_bench.config.expand import config_of, expand
from moe_routing_bench.config.load import load
from moe_routing_kernels.errors import UserError

QWEN = CONFIGS["qwen3-30b-a3b"]
LAYERS = {"num_hidden_layers": 12}
HUGE = 10**30
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
}


def weights_of(**changes):
    """A quantization_config of compressed-tensors with one group of modules."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": GROUP["weights"] | changes}}}


def preset(tmp_path, fields, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | changes))
    return huggingface.preset(path)


def test_a_model_may_take_all_of_its_experts(tmp_path):
    found, _ = preset(tmp_path, QWEN, num_experts=8, num_experts_per_tok=8)
    assert (found["experts"], found["top_k"]) == (8, 8)


def refused(tmp_path, fields, **changes):
    with pytest.raises(UserError) as caught:
        preset(tmp_path, fields, **changes)
    message = str(caught.value)
    assert "\n" not in message and message.isprintable()
    return message


@pytest.mark.parametrize(
    "value",
    [0, -1, True, "2048", 2048.0, float("nan"), float("inf"), HUGE, [2048, 1024], [], {"a": 1}, "\x1b[31m"],
    ids=repr,
)
@pytest.mark.parametrize(
    "name", ["hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_hidden_layers"]
)
def test_a_size_that_is_no_count_is_refused_in_one_line(name, value, tmp_path):
    message = refused(tmp_path, QWEN, **{name: value})
    assert name in message or (name == "num_experts" and value in (0, True))


@pytest.mark.parametrize("value", [-1, True, "2.5", float("nan"), float("inf"), HUGE, [2.5]], ids=repr)
def test_a_factor_that_is_no_positive_number_is_refused_in_one_line(value, tmp_path):
    assert "routed_scaling_factor" in refused(tmp_path, CONFIGS["glm-4.5"], routed_scaling_factor=value)


@pytest.mark.parametrize("value", [-1, True, "1", 1.0, HUGE, float("nan")], ids=repr)
def test_a_number_of_shared_experts_that_is_none_is_refused_in_one_line(value, tmp_path):
    """A text times a width would be a long text."""
    assert "n_shared_experts" in refused(tmp_path, CONFIGS["glm-4.5"], n_shared_experts=value)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "1 to 128, the number of experts"),
        ("qwen3-30b-a3b", {"hidden_act": ["silu"]}, "the name of a function"),
        ("qwen3-30b-a3b", {"norm_topk_prob": "yes"}, "true or false"),
        ("qwen3-30b-a3b", {"num_local_experts": 64}, "the same value in both"),
        ("deepseek-v4-flash", {"swiglu_limit": -10.0}, "swiglu_limit"),
        ("deepseek-v4-flash", {"swiglu_limit": "10"}, "swiglu_limit"),
        ("deepseek-v4-flash", {"swiglu_limit": 1e-9}, "swiglu"),
        ("deepseek-v3", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("deepseek-v3", {"n_routed_experts": 250}, "8 groups"),
        ("deepseek-v3", {"n_group": "8"}, "n_group"),
        ("kimi-k2", {"n_group": True}, "n_group"),
        ("deepseek-v2", {"topk_group": 3.0}, "topk_group"),
    ],
)
def test_what_makes_no_layer_is_refused_in_one_line(name, changes, words, tmp_path):
    assert words in refused(tmp_path, CONFIGS[name], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0},
        {"num_experts": 1},
        {"num_experts": None},
        {"mlp_only_layers": [*range(48)]},
        {"decoder_sparse_step": 49},
        {"moe_layer_freq": [0] * 48},
        {"first_k_dense_replace": 48},
        {"mlp_layer_types": ["dense"] * 48},
        {"hybrid_override_pattern": "M-" * 24},
        {"layers_block_type": ["mlp"] * 48},
    ],
    ids=str,
)
def test_a_dense_model_has_no_preset(changes, tmp_path):
    assert "a mixture" in refused(tmp_path, QWEN, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_of_a_class_makes_no_mixture(name, tmp_path):
    """The number of experts is of the file."""
    fields = CONFIGS[name].get("text_config", CONFIGS[name])
    left = {key: value for key, value in fields.items() if "experts" not in key or "tok" in key or "shared" in key}
    assert "a mixture" in refused(tmp_path, left | {"ffn_config": {}})


def test_a_class_without_experts_is_dense_whatever_a_file_adds(tmp_path):
    pytest.importorskip("transformers", reason="needs the transformers library")
    assert "whose class has no experts" in refused(tmp_path, QWEN, model_type="llama")


def test_a_method_of_choice_that_the_rule_has_not_is_unsupported(tmp_path):
    found, _ = preset(tmp_path, CONFIGS["deepseek-v3"], topk_method="greedy")
    assert found["router"] is None and "greedy" in found["unsupported"]


def test_a_mixture_that_a_config_switches_off_is_dense(tmp_path):
    fields = CONFIGS["gemma-4-26b-a4b"]["text_config"]
    assert "enable_moe_block" in refused(tmp_path, fields, enable_moe_block=False)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"mlp_only_layers": [0, 1, 2]}, 9),
        ({"mlp_only_layers": []}, None),
        ({"decoder_sparse_step": 2}, 6),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 5),
        ({"first_k_dense_replace": 3}, 9),
        ({"first_k_dense_replace": 0}, None),
        ({"num_dense_layers": 2}, 10),
        ({"moe_layer_freq": [0] + [1] * 11}, 11),
        ({"moe_layer_freq": [1] * 12}, None),
        ({"moe_layer_freq": 1}, None),
        ({"moe_layer_freq": 3}, 4),
        ({"interleave_moe_layer_step": 4}, 3),
        ({"moe_layers": [1, 5]}, 2),
        ({"moe_layers_enum": "3,4,5,6"}, 4),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 6),
        ({"expert_layer_period": 4}, 3),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, 11),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 4}, 3),
        ({"moe_layer_interval": 2}, 6),
        ({"moe_layer_interval": 5}, 2),  # layers 4 and 9: steps that do not divide 12 tell where counting begins
        ({"interleave_moe_layer_step": 5}, 2),
        ({"moe_layer_freq": 5}, 3),
        ({"expert_layer_period": 5}, 3),
        ({"expert_layer_period": 5, "expert_layer_offset": 3}, 2),
        ({"decoder_sparse_step": 5}, 2),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10}, 10),
        ({"hybrid_override_pattern": "ME*-" * 3}, 3),
        ({"layers_block_type": ["moe", "mamba", "attention"] * 4}, 4),
        ({"layers_block_type": ["mamba", "attention"] * 6}, None),
    ],
    ids=str,
)
def test_layers_without_experts_are_named_and_counted(changes, count, tmp_path):
    found, notes = (
        preset(tmp_path, QWEN | LAYERS, decoder_sparse_step=1, **{})
        if not changes
        else preset(tmp_path, QWEN | LAYERS | changes)
    )
    said = [note for note in notes if note.startswith("layers ")]
    assert found["layers"] == 12 and len(said) == (count is not None)
    assert not said or (
        f"{count} of 12 have experts" in said[0]
        and all(name in said[0] for name in changes if "offset" not in name and changes[name] != -1)
    )


@pytest.mark.parametrize("value", ["some", 0, -2, [0, 7], {"a": 1}, 1.5], ids=repr)
def test_a_field_of_layers_that_is_not_understood_is_named(value, tmp_path):
    _, notes = preset(tmp_path, QWEN, moe_layer_freq=value)
    assert any("layers" in note and "moe_layer_freq" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek-v4-flash", {"num_hash_layers": 3}, "num_hash_layers 3"),
        ("deepseek-v4-flash", {"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40}, "num_hash_layers 3"),
        ("deepseek-v4-flash", {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ("gemma-4-26b-a4b", {}, "per_expert_scale"),
        ("gemma-4-26b-a4b", {}, "input scaling"),
        ("llama4-scout", {}, "multiplies an expert's input"),
        ("qwen3-30b-a3b", {"some_new_expert_bias_rule": 4}, "some_new_expert"),
        ("mixtral-8x7b", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
        ("mixtral-8x7b", {"n_shared_experts": 2}, "n_shared_experts 2"),
        ("mixtral-8x7b", {"moe_layer\x1b[31m": "a\x1b]0;b"}, "moe_layer"),
    ],
)
def test_what_a_preset_cannot_say_is_named(name, changes, words, tmp_path):
    fields = CONFIGS[name].get("text_config", CONFIGS[name])
    _, notes = preset(tmp_path, fields | changes)
    assert any(words in note for note in notes)


@pytest.mark.parametrize("name", ["router_aux_loss_coef", "output_router_logits", "router_jitter_noise"])
def test_what_is_of_training_alone_is_not_named(name, tmp_path):
    _, notes = preset(tmp_path, QWEN, **{name: 0.5})
    assert not any(name in note for note in notes)


def test_a_limit_is_of_the_activation(tmp_path):
    found, _ = preset(tmp_path, CONFIGS["deepseek-v4-flash"], swiglu_limit=7.5)
    assert found["activation"] == "swiglu_limit7.5"


@pytest.mark.parametrize(
    ("changes", "router"),
    [
        (
            {
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "n_group": 1,
                "topk_group": 1,
            },
            "sigmoid_renorm",
        ),
        (
            {
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "n_group": 8,
                "topk_group": 4,
            },
            "deepseek_v3",
        ),
        ({"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": False}, None),
        ({"topk_method": "noaux_tc", "scoring_func": "softmax"}, None),
        ({"topk_method": "greedy", "norm_topk_prob": True}, "softmax_topk_renorm"),
        ({"topk_method": "greedy", "norm_topk_prob": False}, "softmax_topk"),
        ({"topk_method": "greedy", "scoring_func": "sigmoid"}, None),
    ],
    ids=str,
)
def test_the_methods_of_deepseek_v2_are_told_apart(changes, router, tmp_path):
    found, _ = preset(tmp_path, CONFIGS["deepseek-v2-lite"] | changes)
    assert found["router"] == router and ("unsupported" in found) == (router is None)


@pytest.mark.parametrize(
    ("quantised", "weights"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, "e4m3_block128"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, None),
        ({"quant_method": "fp8", "weight_block_size": None}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, None),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
            "mxfp4",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, None),
        ({"quant_method": "fbgemm_fp8"}, "e4m3_row"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4_g128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4_g128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, "int4z_g64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, "int8_row"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"x": {"bits": 8}}}, None),
        ({"quant_method": "gptq", "bits": True, "group_size": 128}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4z_g128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, "int4_g64"),
        (weights_of(), "int4_g32"),
        (weights_of(symmetric=False), "int4z_g32"),
        (weights_of(num_bits=8, strategy="channel", group_size=None), "int8_row"),
        (weights_of(type="float", num_bits=8, strategy="channel"), "e4m3_row"),
        (weights_of(type="float", num_bits=8, strategy="block", block_structure=[128, 128]), "e4m3_block128"),
        (weights_of(type="float", num_bits=8, strategy="tensor"), None),
        (weights_of(type="float", strategy="tensor_group", group_size=16), "nvfp4"),
        (weights_of(strategy=["group"]), None),
        (weights_of() | {"ignore": ["re:.*experts.*"]}, None),
        (weights_of() | {"ignore": ["lm_head", "re:.*shared_experts.*", "model.layers.61.mlp.experts"]}, "int4_g32"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": GROUP, "b": weights_of(num_bits=8)["config_groups"]["group_0"]},
            },
            None,
        ),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ({"quant_method": ["gptq"]}, None),
        ({"bits": 4}, None),
        ("int4", None),
    ],
    ids=str,
)
def test_the_weights_of_a_checkpoint_are_named_or_it_is_said_why_not(quantised, weights, tmp_path):
    found, notes = preset(tmp_path, QWEN, quantization_config=quantised)
    assert found.get("weights") == weights
    assert any("weights" in note for note in notes)


def test_the_quantisation_of_several_parts_is_that_of_the_whole(tmp_path):
    found, _ = preset(tmp_path, CONFIGS["qwen3.5-35b-a3b"], quantization_config={"quant_method": "mxfp4"})
    assert found["weights"] == "mxfp4"


def test_a_cell_has_the_weights_of_its_model_unless_an_entry_names_others(tmp_path):
    found, _ = preset(tmp_path, QWEN, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    model = schema.validated(presets.Preset, found, "preset")

    def weights(**values):
        (job,) = expand(
            load(config_of("experts", {"model": "own", "tokens": 16, "capacity_factor": "none"} | values)),
            {"own": model},
        )
        return job.cell.get("weights")

    assert weights() == "int4z_g128" and weights(weights="bf16") == "bf16" and weights(dtype="fp16") == "int4z_g128"


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("int4", "int4_g128"),
        ("fp8", "e4m3_block128"),
        ("FP8_E4M3", "e4m3_block128"),
        ("torch.float8_e4m3fn", "e4m3_block128"),
        ("awq", "int4z_g128"),
        ("gptq", "int4_g128"),
        ("w4a16", "int4_g128"),
        ("W8A8", "int8_row"),
        ("fp4", "mxfp4"),
        ("NVFP4", "nvfp4"),
    ],
)
def test_a_name_of_weights_that_others_use_has_a_hint(name, format):
    with pytest.raises(UserError, match=f"hint: .*{format}"):
        load(config_of("experts", {"weights": name}))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
def test_a_complete_config_is_read_without_the_library(name, tmp_path):
    """Importing it takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    script = "import pathlib, sys; from moe_routing_bench.config import huggingface; huggingface.preset(pathlib.Path(sys.argv[1])); sys.exit('transformers' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", script, str(tmp_path / "config.json")], check=False).returncode


def test_a_part_of_a_part_is_found(tmp_path):
    inner = {key: value for key, value in QWEN.items() if key != "model_type"} | {"model_type": "qwen3_omni_moe_text"}
    outer = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": inner},
    }
    found, notes = preset(tmp_path, outer)
    assert (found["hidden"], found["experts"], found["router"]) == (2048, 128, "softmax_topk_renorm")
    assert any("thinker_config" in note for note in notes) and any("text_config" in note for note in notes)


@pytest.mark.parametrize("kind", ["qwen3_mo", "mixtra", "deepseek_v5", "\x1b[31mqwen", "a" * 1000])
def test_an_unknown_architecture_is_answered_with_how_to_write_a_preset(kind, tmp_path):
    """No other architecture is proposed: its rule would be taken for this one's."""
    message = refused(tmp_path, QWEN, model_type=kind)
    assert "hidden, intermediate, experts, top_k, router, activation" in message and "did you mean" not in message
    assert not any(name in message.replace(kind[:50], "") for name in ("mixtral", "qwen3_moe", "deepseek_v3"))


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"a": ' * 100_000, "{", "3", "null", '{"a": ' + "9" * 5000 + "}", "\x00"]
)
def test_a_file_that_is_no_object_is_refused_in_one_line(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        huggingface.preset(path)
    assert "\n" not in str(caught.value)


def test_text_of_a_file_reaches_the_terminal_escaped(tmp_path, monkeypatch, capsys):
    changes = {"hidden_act": "x\x1b]0;title\x07", "moe_\x1b[2J": "y\x9b3J\u202e"}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "preset", str(tmp_path / "config.json")])
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr()
    assert (printed.out + printed.err).replace("\n", "").isprintable() and "\\x1b" in printed.out
