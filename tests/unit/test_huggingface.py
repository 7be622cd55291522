"""Presets from config.json files: those of published models give what config/models.yaml holds of them."""

import json
import sys
from pathlib import Path

import pytest

from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import huggingface, presets
from moe_routing_bench.config.load import parse_yaml
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
MODELS = parse_yaml((ROOT / "config/models.yaml").read_text())
NOT_OF_A_CONFIG = ("note", "source")


def sizes(kind, hidden, experts, k, layers, **fields):
    """The fields that most architectures have, under the names that each has."""
    common = {"model_type": kind, "hidden_size": hidden, "num_experts_per_tok": k, "num_hidden_layers": layers}
    count = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "minimax_m2": "num_local_experts"}
    count |= {"phimoe": "num_local_experts", "llama4_text": "num_local_experts"}
    count |= dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "jamba"), "num_experts"
    )
    return common | {count.get(kind, "n_routed_experts"): experts, "hidden_act": "silu"} | fields


def deepseek(kind, hidden, width, experts, k, layers, shared, scale, **fields):
    common = {
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "routed_scaling_factor": scale,
        "norm_topk_prob": True,
    }
    groups = {"n_group": 1, "topk_group": 1, "intermediate_size": 10944, "first_k_dense_replace": 1}
    return sizes(kind, hidden, experts, k, layers, **common | groups | fields)


QWEN3 = {"norm_topk_prob": True, "intermediate_size": 6144, "decoder_sparse_step": 1}
V2 = {"norm_topk_prob": False, "scoring_func": "softmax"}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
NEMOTRON = {"hidden_act": None, "mlp_hidden_act": "relu2"}
CONFIGS = {
    "mixtral-8x7b": sizes("mixtral", 4096, 8, 2, 32, intermediate_size=14336),
    "mixtral-8x22b": sizes("mixtral", 6144, 8, 2, 56, intermediate_size=16384),
    "qwen1.5-moe-a2.7b": sizes(
        "qwen2_moe",
        2048,
        60,
        4,
        24,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
    ),
    "qwen3-30b-a3b": sizes("qwen3_moe", 2048, 128, 8, 48, moe_intermediate_size=768, **QWEN3),
    "qwen3-235b-a22b": sizes("qwen3_moe", 4096, 128, 8, 94, moe_intermediate_size=1536, **QWEN3),
    "qwen3-coder-480b-a35b": sizes(
        "qwen3_moe", 6144, 160, 8, 62, moe_intermediate_size=2560, shared_expert_intermediate_size=0, **QWEN3
    ),
    "qwen3-next-80b-a3b": sizes(
        "qwen3_next", 2048, 512, 10, 48, moe_intermediate_size=512, shared_expert_intermediate_size=512, **QWEN3
    ),
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": sizes(
            "qwen3_5_moe_text", 2048, 256, 8, 40, moe_intermediate_size=512, shared_expert_intermediate_size=512
        ),
    },
    "olmoe-1b-7b": sizes("olmoe", 2048, 64, 8, 16, intermediate_size=1024, norm_topk_prob=False),
    "jamba-v0.1": sizes(
        "jamba", 4096, 16, 2, 32, intermediate_size=14336, expert_layer_period=2, expert_layer_offset=1
    ),
    "phi-3.5-moe": sizes("phimoe", 4096, 16, 2, 32, intermediate_size=6400, router_jitter_noise=0.01),
    "gpt-oss-20b": sizes("gpt_oss", 2880, 32, 4, 24, intermediate_size=2880, swiglu_limit=7.0),
    "gpt-oss-120b": sizes("gpt_oss", 2880, 128, 4, 36, intermediate_size=2880, swiglu_limit=7.0),
    "llama4-scout": {
        "model_type": "llama4",
        "text_config": sizes("llama4_text", 5120, 16, 1, 48, intermediate_size=8192, intermediate_size_mlp=16384),
    },
    "llama4-maverick": {
        "model_type": "llama4",
        "text_config": sizes("llama4_text", 5120, 128, 1, 48, intermediate_size=8192, interleave_moe_layer_step=2),
    },
    "deepseek-v2-lite": deepseek("deepseek_v2", 2048, 1408, 64, 6, 27, 2, 1.0, topk_method="greedy", **V2),
    "deepseek-v2": deepseek(
        "deepseek_v2",
        5120,
        1536,
        160,
        6,
        60,
        2,
        16.0,
        topk_method="group_limited_greedy",
        **V2 | {"n_group": 8, "topk_group": 3},
    ),
    "deepseek-v3": deepseek(
        "deepseek_v3",
        7168,
        2048,
        256,
        8,
        61,
        1,
        2.5,
        **SIGMOID | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    ),
    "deepseek-v4-flash": deepseek("deepseek_v4", 4096, 2048, 256, 6, 43, 1, 1.5, scoring_func="sqrtsoftplus"),
    "deepseek-v4-pro": deepseek("deepseek_v4", 7168, 3072, 384, 6, 61, 1, 2.5, scoring_func="sqrtsoftplus"),
    "kimi-k2": deepseek("kimi_k2", 7168, 2048, 384, 8, 61, 1, 2.827, **SIGMOID),
    "glm-4.5": deepseek("glm4_moe", 5120, 1536, 160, 8, 92, 1, 2.5),
    "glm-4.5-air": deepseek("glm4_moe", 4096, 1408, 128, 8, 46, 1, 1.0),
    "glm-5": deepseek("glm_moe_dsa", 6144, 2048, 256, 8, 78, 1, 2.5),
    "minimax-m2": sizes(
        "minimax_m2", 3072, 256, 8, 62, intermediate_size=1536, scoring_func="sigmoid", use_routing_bias=True
    ),
    "mimo-v2-flash": deepseek("mimo_v2_flash", 4096, 2048, 256, 8, 48, None, None, **SIGMOID),
    "nemotron-3-nano-30b": deepseek(
        "nemotron_h", 2688, 1856, 128, 6, 52, 1, 2.5, moe_shared_expert_intermediate_size=3712, **NEMOTRON
    ),
    "nemotron-3-super-120b": deepseek(
        "nemotron_h",
        4096,
        2688,
        512,
        22,
        88,
        1,
        5.0,
        moe_shared_expert_intermediate_size=5376,
        moe_latent_size=1024,
        **NEMOTRON,
    ),
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 6144,
        "n_layers": 40,
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "moe_num_experts": 16,
            "moe_top_k": 4,
            "hidden_size": 2048,
            "moe_normalize_expert_weights": 1.0,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_experts": 128,
            "top_k_experts": 8,
            "num_hidden_layers": 30,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    },
    "longcat-flash": {
        "model_type": "longcat_flash",
        "hidden_size": 6144,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "num_layers": 28,
        "routed_scaling_factor": 6.0,
        "hidden_act": "silu",
    },
}


@pytest.fixture
def config(tmp_path):
    """Writes a config.json into a folder of some name."""

    def write(fields, name="some-model"):
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(fields))
        return path

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_published_model_gives_its_preset(name, config):
    found, _ = huggingface.preset(config(CONFIGS[name]))
    assert found.pop("source") == f"config.json of some-model, model_type {_kind(CONFIGS[name])}"
    assert found == {key: value for key, value in MODELS[name].items() if key not in NOT_OF_A_CONFIG}


def test_the_command_prints_what_models_yaml_takes(config, monkeypatch, capsys, tmp_path):
    """With what was assumed as comments; it is named by the folder of its file, or as it is told."""
    path = config({**CONFIGS["llama4-maverick"]["text_config"], "hidden_act": "silu"}, "Llama-4 Maverick")
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "preset", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    assert not ended.value.code
    assert (
        "# assumed: router llama4" in out
        and "interleave_moe_layer_step 2" in out
        and "# assumed: shared_experts 1" in out
    )
    models = tmp_path / "models.yaml"
    models.write_text((ROOT / "config/models.yaml").read_text() + "\n" + out)
    loaded = presets.load(models)
    assert presets.values(loaded["llama-4-maverick"]) == presets.values(loaded["llama4-maverick"])
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "preset", str(path), "--name", "mine"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "\nmine:\n" in capsys.readouterr().out


def test_what_a_file_does_not_say_is_assumed_aloud(config):
    """OLMoE's default is not to renormalise; the preset says which fields were absent."""
    fields = {
        name: value for name, value in CONFIGS["olmoe-1b-7b"].items() if name not in ("norm_topk_prob", "hidden_act")
    }
    found, assumed = huggingface.preset(config(fields))
    assert (found["router"], found["activation"]) == ("softmax_topk", "swiglu")
    assert [one.split()[0] for one in assumed] == ["norm_topk_prob", "hidden_act"]


def test_a_field_that_is_null_is_not_one_that_is_absent(config):
    """DBRX divides the weights by their sum, unless its file says null."""
    fields = CONFIGS["dbrx"]["ffn_config"]
    (null, _), (absent, assumed) = (
        huggingface.preset(config(CONFIGS["dbrx"] | {"ffn_config": one}, name))
        for name, one in {
            "null": fields | {"moe_normalize_expert_weights": None},
            "absent": {key: fields[key] for key in fields if key != "moe_normalize_expert_weights"},
        }.items()
    )
    assert (null["router"], absent["router"]) == ("softmax_topk", "softmax_topk_renorm")
    assert [one.split()[0] for one in assumed] == ["ffn_config.moe_normalize_expert_weights"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("mixtral-8x7b", {"hidden_act": "gelu"}, "its activation, 'gelu'"),
        ("nemotron-3-nano-30b", {"mlp_hidden_act": "silu"}, "'silu' without a gate"),
        ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek-v2", {"topk_method": "mystery"}, "topk_method 'mystery'"),
        ("qwen3-30b-a3b", {"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
        ("deepseek-v4-flash", {"swiglu_limit": 0}, "swiglu_limit is None"),
        ("deepseek-v4-flash", {"hidden_act": "gelu_pytorch_tanh"}, "with activation geglu"),
        ("deepseek-v4-flash", {"scoring_func": "softmax"}, "its scoring_func is 'softmax'"),
        ("gpt-oss-20b", {"swiglu_limit": 8.0}, "swiglu_limit is 8.0"),
        ("deepseek-v3", {"n_group": 16}, "keeps 4 of 16 groups"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "its scoring_func is 'softmax'"),
        ("kimi-k2", {"norm_topk_prob": False}, "does not renormalise"),
        ("deepseek-v2", {"topk_group": 4}, "keeps 4 of 8 groups"),
        (
            "dbrx",
            {"ffn_config": CONFIGS["dbrx"]["ffn_config"] | {"moe_normalize_expert_weights": 2}},
            "norm of order 2",
        ),
        ("longcat-flash", {"zero_expert_num": 0}, "selection bias"),
    ],
)
def test_what_no_rule_or_kernel_does_is_unsupported(name, change, reason, config):
    """Not taken for the nearest that there is."""
    found, _ = huggingface.preset(config(CONFIGS[name] | change))
    assert reason in found["unsupported"] and None in (found["router"], found["activation"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "qwen3_mo"}, "write it by hand"),
        ({"model_type": ["qwen3_moe"]}, "the name of an architecture"),
        ({"hidden_size": 4096}, "the name of an architecture"),
        ({"model_type": "llama", "hidden_size": 4096}, "model_type"),
        ({**CONFIGS["qwen3-30b-a3b"], "moe_intermediate_size": None}, "no moe_intermediate_size"),
        ({**CONFIGS["mixtral-8x7b"], "hidden_size": -1}, "hidden"),
        ({**CONFIGS["dbrx"], "d_model": None}, "no d_model"),
        ({**CONFIGS["dbrx"], "ffn_config": 3}, "no ffn_config.moe_num_experts"),
        *[
            ({**CONFIGS["kimi-k2"], "routed_scaling_factor": scale}, "routed_scaling_factor")
            for scale in (0, 0.0, -1, True, "2.5", [2.5], 10**400)
        ],
        ([], "a JSON object"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_one_line(fields, words, config):
    with pytest.raises(UserError) as caught:
        huggingface.preset(config(fields))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def _kind(fields):
    return fields.get("text_config", fields)["model_type"].removesuffix("_text")
