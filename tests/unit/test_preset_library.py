"""Presets through the classes of the transformers library: every architecture that it has, and every preset that is of one of them."""

import dataclasses
import importlib
import inspect
import json
import re

import pytest
from test_huggingface import CONFIGS, MODELS

from moe_routing_bench.config import config_files, huggingface
from moe_routing_bench.config.architectures import ARCHITECTURES
from moe_routing_bench.config.model_fields import ALIASES
from moe_routing_kernels.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs the transformers library")
MAPPING = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
NAMES = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
# Classes whose own defaults leave out what makes a mixture of them, and what a checkpoint has there.
COMPLETED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "diffusion_gemma_text": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "norm_topk_prob": True},
    "doge": {"is_moe": True},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8},
}
# What no modeling file has as a tensor (E, N, H): experts of single rows, one module per expert, or a class of their own.
OF_REPOSITORIES = {
    "kimi_k2",
    "deepseek",
    "bailing_moe",
    "bailing_moe_v2",
}  # architectures of which the library has no class
UNLIKE = ("doge", "jetmoe", "nllb-moe", "switch_transformers", "dbrx")
# Defaults that no class has: those of the modeling file, or of the code that a checkpoint brings.
OF_CODE = {("deepseek_ocr2", "norm_topk_prob")}
PARTS = r"_vision|_audio|_talker|_encoder|vitpose|_thinker|_omni$|^nemo_speechlm|^kimi_k25$"


def kinds():
    """The model types of language models with a field for a number of experts, in the installed library."""
    found = []
    for kind in NAMES:
        fields = {each.name for each in dataclasses.fields(MAPPING[kind])} if not re.search(PARTS, kind) else set()
        if fields & {*ALIASES["num_experts"], "ffn_config"} - {"ffn_config"} or kind == "dbrx":
            found.append(kind)
    return found


def written(path, made):
    """The config.json of a class's instance."""
    path.write_text(made.to_json_string(use_diff=False))
    return path


def made_of(kind):
    return MAPPING[kind](**COMPLETED.get(kind, {}))


def first_or_none(made, *names):
    """The value of the first attribute that an instance has, or None."""
    return next((value for name in names if (value := getattr(made, name, None)) is not None), None)


def first(made, *names):
    """The value of the first attribute that an instance has."""
    return next(value for name in names if (value := getattr(made, name, None)) is not None)


@pytest.mark.slow
@pytest.mark.campaign
def test_every_architecture_of_the_library_gives_the_sizes_of_its_class(subtests, tmp_path):
    """One test of all of them: finding them imports a thousand modules, which each worker would do to collect a test of each."""
    known = kinds()
    assert len({kind.removesuffix("_text") for kind in known}) >= 65 and {"qwen3_moe", "hy_v4", "dbrx"} <= {*known}
    for kind in known:
        with subtests.test(kind=kind):
            check_sizes(kind, tmp_path / "config.json")


def check_sizes(kind, path):
    """Those of the experts' own tensors, where the modeling file has them."""
    made = made_of(kind)
    found, _ = huggingface.preset(written(path, made))
    if kind in UNLIKE:
        inner = made.ffn_config if kind == "dbrx" else made
        experts, width = (
            first(inner, *ALIASES["num_experts"]),
            first(inner, "ffn_hidden_size", "d_ff", "encoder_ffn_dim", "intermediate_size"),
        )
        assert (found["experts"], found["intermediate"], found["hidden"]) == (experts, width, made.hidden_size)
        return
    experts = _experts(made)
    up = getattr(experts, "gate_up_proj", None)
    gated = up is not None
    shape = sorted((up if gated else experts.up_proj).shape)
    inner = getattr(made, "moe_hidden_size", None) or found["hidden"]
    identities = getattr(made, "zero_expert_num", None) or 0  # have unused weights
    assert sorted((found["experts"] + identities, found["intermediate"] * (2 if gated else 1), inner)) == shape
    assert found["hidden"] == made.hidden_size and found["layers"] == getattr(
        made, "num_layers", made.num_hidden_layers
    )
    assert found["top_k"] == first(made, *ALIASES["num_experts_per_tok"])
    assert ("unsupported" in found) == (
        found["router"] is None or found["activation"] is None or inner != found["hidden"]
    )


def _experts(made):
    """The experts of a layer, without storage."""
    import torch

    module = importlib.import_module(type(made).__module__.replace("configuration_", "modeling_"))
    owner = type(made).__name__.removesuffix("Config")
    fitting = [each for name, each in vars(module).items() if inspect.isclass(each) and name.endswith("Experts")]
    fitting = [each for each in fitting if each.__name__ != f"{owner}SharedExperts"]
    widths = (
        [made.moe_intermediate_size[:1]] if isinstance(getattr(made, "moe_intermediate_size", None), list) else [[]]
    )
    with torch.device("meta"):
        for each in sorted(fitting, key=lambda each: (not each.__name__.startswith(owner), len(each.__name__))):
            try:
                return each(made, *widths[0])
            except (AttributeError, TypeError):
                continue
    raise AssertionError(f"no experts in {module}")


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_the_table_has_the_defaults_of_the_classes(kind):
    """So that a config gives the same preset where the library is not installed."""
    known = MAPPING[f"{kind}_text"] if f"{kind}_text" in NAMES else MAPPING[kind] if kind in NAMES else None
    if kind == "inkling":
        known = MAPPING["inkling_text"]
    if known is None:
        assert kind in OF_REPOSITORIES
        return
    made = known()
    architecture = ARCHITECTURES[kind]
    for name, default in architecture.defaults.items():
        paths = (architecture.names.get(name, name), *ALIASES.get(name, ()))
        values = [value for path in paths for there, value in [config_files.field_at(made, path)] if there]
        assert not values or values[0] == default, name
        assert values or (kind, name) in OF_CODE


OF_CLASSES = {
    name: source[-1]
    for name, each in MODELS.items()
    if (source := re.findall(r"transformers [\d.]+ (\w+)$", each["source"]))
}
TOLD = {  # what a public table has of models whose class has other defaults
    "qwen3.8-2.4t-a95b": {
        "hidden_size": 8192,
        "moe_intermediate_size": 2048,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 2048,
        "num_hidden_layers": 92,
    },
    "deepseek-v4.1-flash": {
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
    },
}


def test_there_are_seventy_presets():
    assert len(MODELS) >= 70


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_preset_of_a_class_is_what_the_class_gives(name, tmp_path):
    (known,) = {MAPPING[kind] for kind in NAMES if NAMES[kind] == OF_CLASSES[name]}
    found, _ = huggingface.preset(written(tmp_path / "config.json", known(**TOLD.get(name, {}))))
    recorded = {key: value for key, value in MODELS[name].items() if key not in ("note", "source")}
    assert {key: value for key, value in found.items() if key != "source"} == recorded
    assert "assumed: " in MODELS[name]["note"]


CHECKPOINTS = {  # models without a class of their own sizes, and where their checkpoints differ from the class
    "qwen3.5-122b-a10b": (
        "qwen3_5_moe_text",
        {
            "hidden_size": 3072,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "num_hidden_layers": 48,
        },
    ),
    "qwen3.5-397b-a17b": (
        "qwen3_5_moe_text",
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "num_hidden_layers": 60,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
    ),
    "minimax-m3": ("minimax_m3_vl", {}),
    "step-3.7-flash": ("step3p5", {"moe_router_scaling_factor": 3.0}),
}
UNREAD = {"kimi-k3", "nemotron-3-ultra-550b"}  # unsupported, of no class or without a number of layers


def test_every_preset_whose_source_is_a_configuration_is_compared_with_one():
    sourced = {name for name, preset in MODELS.items() if "config" in preset["source"].lower()}
    assert len(sourced) >= 73 and sourced - {*CONFIGS} - {*OF_CLASSES} - {*CHECKPOINTS} == UNREAD
    assert all(MODELS[name]["unsupported"] for name in UNREAD)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_preset_is_what_its_class_gives_with_the_fields_of_its_checkpoint(name, tmp_path):
    kind, fields = CHECKPOINTS[name]
    found, _ = huggingface.preset(written(tmp_path / "config.json", MAPPING[kind](**fields)))
    recorded = {key: value for key, value in MODELS[name].items() if key not in ("note", "source")}
    assert {key: value for key, value in found.items() if key != "source"} == recorded


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "kimi-k2"])
def test_a_preset_of_a_checkpoint_has_the_sizes_that_its_class_reads(name):
    fields = CONFIGS[name].get("text_config", CONFIGS[name])
    kind = fields["model_type"]
    made = MAPPING[kind](**{key: value for key, value in fields.items() if value is not None and key != "model_type"})
    inner = made.ffn_config if kind == "dbrx" else made
    experts = first(inner, *ALIASES["num_experts"])
    top_k = first(inner, *ALIASES["num_experts_per_tok"])
    recorded = MODELS[name]
    assert (recorded["hidden"], recorded["experts"], recorded["top_k"]) == (made.hidden_size, experts, top_k)


MISSING = {
    "num_experts_per_tok": "top_k",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "scale": "routed_scale",
    "shared": "shared_experts",
}


def named(name, concept):
    """The field of a model's architecture for a concept, and the fields and model type of the model; None where it has no such field."""
    fields = CONFIGS[name].get("text_config", CONFIGS[name])
    architecture = ARCHITECTURES[fields["model_type"].removesuffix("_text")]
    field = getattr(architecture, concept, concept)
    return field and (architecture.names.get(field, field), *ALIASES.get(field, ())), fields


PAIRS = [
    (name, concept)
    for name in CONFIGS
    for concept in MISSING
    if name not in ("dbrx", "kimi-k2") and named(name, concept)[0]
]


@pytest.mark.parametrize(("name", "concept"), PAIRS)
def test_a_field_that_is_missing_has_the_default_of_its_class(name, concept, tmp_path):
    """With a line that names it, or it is asked for where the class has none."""
    aliases, fields = named(name, concept)
    kind = fields["model_type"]
    left = {key: value for key, value in fields.items() if key not in aliases}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(left))
    default = first_or_none(MAPPING[kind](), *aliases)
    if default is None:
        with pytest.raises(UserError, match=f"no {aliases[0]}"):
            huggingface.preset(path)
        return
    found, notes = huggingface.preset(path)
    assert found[MISSING[concept]] == default
    assert any(note.split()[0] in aliases and str(default) in note for note in notes)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_the_library_a_config_gives_the_same_preset(name, tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    with_library = huggingface.preset(path)
    monkeypatch.setattr(config_files, "library_installed", lambda: False)
    assert huggingface.preset(path) == with_library


def test_without_the_library_a_default_that_the_table_lacks_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(config_files, "library_installed", lambda: False)
    fields = {
        name: value
        for name, value in CONFIGS["qwen3-next-80b-a3b"].items()
        if name != "shared_expert_intermediate_size"
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"no shared_expert_intermediate_size.*install transformers"):
        huggingface.preset(tmp_path / "config.json")


def test_a_class_that_refuses_its_fields_is_named_in_one_line():
    with pytest.raises(UserError) as caught:
        config_files.instance_of(MAPPING["qwen3_moe"], {"hidden_size": "wide"}, "some/config.json")
    assert "Qwen3MoeConfig" in str(caught.value) and "\n" not in str(caught.value)


def test_an_architecture_that_only_the_library_knows_has_sizes_and_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "ARCHITECTURES", {})
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-30b-a3b"]))
    found, _ = huggingface.preset(tmp_path / "config.json")
    assert (found["hidden"], found["intermediate"], found["experts"], found["top_k"]) == (2048, 768, 128, 8)
    assert found["router"] is None and "routing rule" in found["unsupported"]
