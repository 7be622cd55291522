"""Configs, presets and the rules of published models, each field and size different: which value counts, and exactly where a limit is."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import (
    axes,
    by_hand,
    checkpoint_formats,
    claims,
    config_files,
    expand,
    huggingface,
    load,
    model_layers,
    presets,
    routing_rules,
)
from moe_routing_bench.config.architectures import Architecture
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.model_fields import Fields
from moe_routing_bench.fields import file_name
from moe_routing_bench.grid.cell import Settings
from moe_routing_kernels.errors import UserError


def fields(known=None, **given):
    """The fields of a file, with the architecture's defaults for those that it lacks."""
    made = Architecture(routing_rules.softmax, defaults=known or {})
    return Fields(given, "kind", lambda: None, made, "here")


V3 = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True}
ONE = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
SIGMOID = routing_rules.scored("sigmoid")
GROUPED = routing_rules.scored("sigmoid", "sqrtsoftplus", groups=True)


@pytest.mark.parametrize(
    ("rule", "given", "router"),
    [
        (routing_rules.softmax, {"norm_topk_prob": True}, "softmax_topk_renorm"),
        (routing_rules.softmax, {"norm_topk_prob": False}, "softmax_topk"),
        (SIGMOID, V3, "sigmoid_renorm"),  # an architecture without groups
        (SIGMOID, ONE | {"norm_topk_prob": False}, None),
        (SIGMOID, {"scoring_func": "softmax", "norm_topk_prob": True}, None),
        (SIGMOID, {"topk_method": "noaux_tc", "norm_topk_prob": True}, "sigmoid_renorm"),
        (SIGMOID, {"topk_method": "greedy", "norm_topk_prob": True}, None),
        (routing_rules.scored("sigmoid", renormalised=True), {"norm_topk_prob": False}, "sigmoid_renorm"),
        (routing_rules.scored("sigmoid", renormalised=True), {}, "sigmoid_renorm"),
        (GROUPED, V3 | {"scoring_func": "sigmoid"}, "deepseek_v3"),
        (GROUPED, V3 | {"scoring_func": "sqrtsoftplus"}, None),
        (GROUPED, ONE | {"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus_renorm"),
        (GROUPED, {"n_group": 4, "topk_group": 8, "norm_topk_prob": True, "scoring_func": "sigmoid"}, None),
        (GROUPED, {"n_group": 8, "topk_group": 3, "norm_topk_prob": True, "scoring_func": "sigmoid"}, None),
        (GROUPED, {"n_group": 4, "topk_group": 4, "norm_topk_prob": True, "scoring_func": "sigmoid"}, "sigmoid_renorm"),
        (GROUPED, {"n_group": None, "topk_group": 0, "norm_topk_prob": True, "scoring_func": "sigmoid"}, "sigmoid_renorm"),
        (routing_rules.deepseek_v2, V3 | {"topk_method": "group_limited_greedy", "topk_group": 3, "norm_topk_prob": False}, "deepseek_v2"),
        (routing_rules.deepseek_v2, V3 | {"topk_method": "group_limited_greedy", "topk_group": 3}, None),
        (routing_rules.deepseek_v2, V3 | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}, None),
        (routing_rules.deepseek_v2, {"topk_method": "greedy", "n_group": 8, "topk_group": 3}, "softmax_topk"),
        (routing_rules.deepseek_v2, {"topk_method": "greedy", "norm_topk_prob": True}, "softmax_topk_renorm"),
        (routing_rules.deepseek_v2, {"topk_method": "other"}, None),
        (routing_rules.bailing, {"norm_topk_prob": False}, "softmax_topk"),
        (routing_rules.bailing, V3 | {"score_function": "sigmoid"}, "deepseek_v3"),
        (routing_rules.bailing, {"score_function": "tanh"}, None),
        (routing_rules.softmax_groups, {"n_group": 4, "topk_group": 4, "norm_topk_prob": False}, "softmax_topk"),
        (routing_rules.softmax_groups, {"n_group": 1, "topk_group": 1}, "softmax_topk_renorm"),
        (routing_rules.softmax_groups, {"n_group": 4, "topk_group": 2}, None),
        (routing_rules.dbrx, {"moe_normalize_expert_weights": 1}, "softmax_topk_renorm"),
        (routing_rules.dbrx, {"moe_normalize_expert_weights": None}, "softmax_topk"),
        (routing_rules.dbrx, {"moe_normalize_expert_weights": 2}, None),
        (routing_rules.cohere2, {"expert_selection_fn": "softmax", "num_shared_experts": 0}, "softmax_topk_renorm"),
        (routing_rules.cohere2, {"expert_selection_fn": "sigmoid", "num_shared_experts": 0, "norm_topk_prob": True}, "sigmoid_renorm"),
        (routing_rules.cohere2, {"expert_selection_fn": "sigmoid", "num_shared_experts": 0, "norm_topk_prob": False}, "llama4"),
        (routing_rules.cohere2, {"expert_selection_fn": "tanh", "num_shared_experts": 0}, None),
        (routing_rules.laguna, {"moe_router_logit_softcapping": 0, "moe_apply_router_weight_on_input": False}, "sigmoid_renorm"),
        (routing_rules.laguna, {"moe_router_logit_softcapping": 2.0, "moe_apply_router_weight_on_input": False}, None),
    ],
)  # fmt: skip
def test_the_router_that_fields_ask_for(rule, given, router):
    """With a reason where there is none."""
    read = fields(**given)
    assert rule(read) == router and bool(read.unsupported) == (router is None)


@pytest.mark.parametrize(
    ("router", "given", "kept"),
    [
        ("softmax_topk", {}, True),
        ("softmax_topk", {"scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1}, True),
        ("softmax_topk", {"score_func": "sigmoid"}, False),
        ("softmax_topk", {"route_norm": True}, False),
        ("softmax_topk_renorm", {"moe_renormalize": True}, True),
        ("softmax_topk_renorm", {"norm_expert_weight": False}, False),
        ("deepseek_v3", {"score_function": "sigmoid", "norm_topk_prob": True}, True),
        ("deepseek_v3", {"norm_topk_prob": False}, False),
        ("deepseek_v2", {"scoring_func": "softmax", "norm_topk_prob": False}, True),
        ("deepseek_v2", {"norm_topk_prob": True}, False),
        ("llama4", {"moe_router_activation": "sigmoid"}, True),
        ("sqrtsoftplus_renorm", {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True}, True),
        ("sigmoid_renorm", {"n_group": 8, "topk_group": 4}, False),
        ("sigmoid_renorm", {"n_group": 8, "topk_group": 8}, True),
        ("sigmoid_renorm", {"num_expert_groups": 1, "num_limited_groups": 4}, True),
        ("sigmoid_renorm", {"num_expert_group": 2}, False),
    ],
)
def test_a_field_that_the_rule_does_not_read_may_not_contradict_it(router, given, kept):
    read = fields(**given)
    assert routing_rules.uncontradicted(read, router) == (router if kept else None) and bool(read.unsupported) != kept


@pytest.mark.parametrize(
    ("shared", "strategy", "refused"), [(2, "mean", True), (2, "sum", False), (0, "mean", False), (None, "mean", False)]
)
def test_shared_experts_that_are_averaged_are_refused(shared, strategy, refused):
    read = fields(num_shared_experts=shared, shared_expert_combination_strategy=strategy, expert_selection_fn="softmax")
    assert routing_rules.cohere2(read) == "softmax_topk_renorm" and bool(read.unsupported) == refused


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"moe_layer_freq": [0, 1, 1]}, 2),  # 10 layers, of which the list has three
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
        ({"mlp_layer_types": ["hash_moe", "sparse", "moe"]}, 3),
        ({"layers_block_type": ["mamba", "moe", "mlp", "attention", "moe"]}, 2),
        ({"layers_block_type": ["mamba", "mlp", "mamba"]}, None),
        ({"hybrid_override_pattern": "|ME|*E-|E"}, 3),
        ({"hybrid_override_pattern": "MMM"}, None),
        ({"expert_layer_period": 1, "expert_layer_offset": 0}, 10),
        ({"expert_layer_period": 3, "expert_layer_offset": 2}, 3),
        ({"expert_layer_period": 3}, 4),
        ({"moe_layer_end_index": 0}, 1),
        ({"moe_layer_end_index": -1}, 10),
        ({"first_k_dense_replace": 3, "decoder_sparse_step": 2}, 4),
        ({"mlp_only_layers": [0, 9, 77]}, 8),
        ({"moe_layers_enum": "3, 4,12"}, 2),
        ({"moe_layer_freq": 4}, 3),
        ({"moe_layer_interval": 4}, 2),
    ],
)
def test_layers_with_experts_are_counted(given, count):
    read = fields(**given)
    if count is None:
        with pytest.raises(UserError, match="no layer with experts"):
            model_layers.noted(read, 10)
        return
    assert model_layers.noted(read, 10) == count
    assert any(f"{count} of 10 have experts" in note for note in read.notes) == (count < 10)


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({"layers_block_type": ["moe"] * 3, "hybrid_override_pattern": "ME*E"}, 3),
        ({"hybrid_override_pattern": "ME*E"}, 4),
        ({"layers_block_type": [], "hybrid_override_pattern": "ME*E"}, 4),
        ({"num_hidden_layers": 9, "hybrid_override_pattern": "ME*E"}, None),
        ({}, None),
    ],
)
def test_a_list_of_layers_stands_for_their_number(given, layers):
    assert model_layers.listed(fields(**given)) == layers


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_hash_layers": 3, "mlp_layer_types": ["moe"]}, "3"),
        ({"mlp_layer_types": ["hash_moe", "moe", "hash_moe"]}, "2"),
        ({"num_hash_layers": 0}, None),
    ],
)
def test_layers_that_choose_by_the_token_are_noted(given, said):
    read = fields(**given)
    model_layers._note_hashes(read)
    assert [f"num_hash_layers {said}:" in note for note in read.notes] == [True] * (said is not None)


@pytest.mark.parametrize(
    ("stated", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4_g128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, "int4z_g128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, "int8_row"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"a": 1}}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4z_g128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": False}, "int4_g128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "e4m3_block128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, None),
        ({"quant_method": "fp8", "expert_dtype": "fp4", "scale_fmt": "ue8m0"}, "mxfp4"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, None),
        ({"quant_method": "fp8", "expert_dtype": "fp8", "weight_block_size": [128, 128]}, "e4m3_block128"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "e4m3_block128"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        ({"quant_method": "fbgemm_fp8"}, "e4m3_row"),
        ({"quant_method": "other"}, None),
    ],
)
def test_the_format_of_a_checkpoint(stated, weights):
    read = fields()
    assert checkpoint_formats.weights({"quantization_config": stated}, read, 9) == weights
    assert len(read.notes) == 1 and (weights or "no weights are set") in read.notes[0]


def test_an_order_of_columns_is_noted_where_the_file_has_one():
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for value, noted in ((True, 2), (False, 1), ("no", 1), (None, 1)):
        read = fields()
        checkpoint_formats.weights({"quantization_config": stated | {"desc_act": value}}, read, 9)
        assert len(read.notes) == noted, value
    read = fields(expert_dtype="fp4", quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0"})
    assert checkpoint_formats.weights(read.fields, read, 9) == "mxfp4", "the dtype of experts next to the section"
    read = fields(
        expert_dtype="fp4",
        quantization_config={"quant_method": "fp8", "expert_dtype": "fp8", "weight_block_size": [128, 128]},
    )
    assert checkpoint_formats.weights(read.fields, read, 9) == "e4m3_block128"


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}, "int4_g32"),
        ({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, "int4z_g32"),
        ({"type": "int", "num_bits": 8, "strategy": "channel", "group_size": 32}, "int8_row"),
        ({"type": "float", "num_bits": 8, "strategy": "channel"}, "e4m3_row"),
        ({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": "128x128"}, "e4m3_block128"),
        ({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [64, 64]}, None),
        ({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}, "nvfp4"),
        ({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 32}, None),
        (
            {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "format": "mxfp4-pack-quantized"},
            "mxfp4",
        ),
        ({"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}, None),
        ({"type": "int", "num_bits": 4, "strategy": "tensor"}, None),
    ],
)
def test_a_scheme_of_compressed_tensors(kind, weights):
    found = checkpoint_formats._scheme(kind)
    assert (found if found in checkpoint_formats.WEIGHTS else None) == weights
    other = {"targets": ["re:.*self_attn.*"], "weights": {"type": "int", "num_bits": 2}}
    groups = {"a": {"targets": ["Linear"], "weights": kind}, "b": other}
    read = fields()
    assert (
        checkpoint_formats.weights(
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}, read, 9
        )
        == weights
    )
    groups["c"] = {
        "targets": ["re:.*experts.*"],
        "weights": {"type": "int", "num_bits": 8, "strategy": "group", "group_size": 999},
    }
    assert (
        checkpoint_formats.weights(
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}, fields(), 9
        )
        is None
    )


@pytest.mark.parametrize(
    ("pattern", "holds"),
    [
        (r".*q.*z.*q.*", False),  # four repetitions, as many as are tried
        (r".*q.*z.*q.*z.*", True),  # five could take for ever: it may be of experts
        (r".*self_attn.*", False),
        (r".*mlp\.experts.*", True),
        (r"model\.layers\.\d+\.mlp\.experts\.[0-9]+\.w2", True),
        (r"model\.layers\.\d+\.mlp\.gate", False),
        (r"(a+)+", True),
        (r"x{2}", True),
        (r"(", True),  # which cannot be tried
        ("a" * 200, False),
        ("a" * 201, True),
    ],
)
def test_a_pattern_that_cannot_be_tried_in_a_short_time_may_be_of_experts(pattern, holds):
    assert checkpoint_formats._matches(pattern) == holds


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"grid": [{"bench": ["gate"]}]}, r"config.grid\[0\] key: got 'bench'.*did you mean 'benches'"),
        ({"device": 5, "grid": [{"benches": ["gate"], "tokenz": [4]}]}, r"config.grid\[0\] key: got 'tokenz'"),
        ({"device": 5, "grid": [{"benches": ["gat"]}]}, "config.device: got 5"),
        ({"grid": [{"tokens": [4]}]}, r"config.grid\[0\]: got .no 'benches'"),
    ],
)
def test_of_several_mistakes_an_unknown_key_is_said_first_then_the_first_by_place(content, says):
    """A misspelt key is a missing one, too."""
    with pytest.raises(UserError, match=says):
        load.load(content)


def test_layers_whose_experts_stay_are_numbered():
    assert checkpoint_formats.layers_of(["model.layers.3.mlp", r"layers\.12\.", "x.layers.7"]) == {3, 12, 7}
    for other in ("mlp.experts", "layers.1.layers.2."):
        assert checkpoint_formats.layers_of(["model.layers.3.mlp", other]) is None
    stated = {"quant_method": "fbgemm_fp8", "ignore": [f"model.layers.{n}.mlp.experts" for n in range(4)]}
    for layers, weights in ((4, None), (5, "e4m3_row")):
        assert checkpoint_formats.weights({"quantization_config": stated}, fields(), layers) == weights


def test_the_name_of_a_model_in_a_cache(tmp_path):
    """In a cache of the hub that above the revision, whatever dashes it has."""
    cached = tmp_path / "models--org--name-1.5--it" / "snapshots" / "abc" / "config.json"
    assert config_files.model_name(cached) == "it"
    assert config_files.model_name(tmp_path / "other--x" / "snapshots" / "abc" / "config.json") == "abc"
    assert config_files.model_name(tmp_path / "models--a--b" / "other" / "abc" / "config.json") == "abc"
    assert config_files.model_name(tmp_path / "plain" / "config.json") == "plain"
    with pytest.raises(ValueError, match="twice"):
        config_files._object([("a", 1), ("a", True)])
    assert config_files._object([("a", 1), ("b", 2), ("a", 1)]) == {"a": 1, "b": 2}


def test_values_of_fields():
    read = fields(
        {"norm_topk_prob": True},
        d_model=64,
        num_experts=[8, 8],
        moe_k=2,
        n_shared_experts=None,
        num_shared_experts=3,
        route_scale=0,
        moe_latent_size=5,
    )
    assert read.count("hidden_size") == 64 and read.count("num_experts") == 8 and read.count("num_experts_per_tok") == 2
    assert read.count("n_shared_experts") == 3 and read.label("n_shared_experts") == "num_shared_experts"
    assert read.number("routed_scaling_factor") is None and read.flag("norm_topk_prob") is True
    assert read.unread() == ["moe_latent_size 5"]
    for name, given in (
        ("hidden_size", {"hidden_size": [8, 16]}),
        ("hidden_size", {"hidden_size": 8, "d_model": 16}),
        ("hidden_size", {"hidden_size": 0}),
        ("hidden_size", {"hidden_size": 2**20 + 1}),
    ):
        with pytest.raises(UserError, match="hidden_size"):
            fields(**given).count(name)
    assert fields(hidden_size=2**20).count("hidden_size") == 2**20
    assert fields(moe_aux_loss=1, router_dtype="x", moe_thing=0, expert_thing={"a": 1}).unread() == [
        "expert_thing {'a': 1}"
    ]
    read = fields(norm_topk_prob=False)
    assert read.left("norm_topk_prob") is False and read.left("norm_topk_prob") is None and read.value("absent", 7) == 7


@pytest.mark.parametrize("value", [[8, 16], [8, 16, 8], [16, 8, 8], [8, 8, 16], [], [8, None, 8], 8.0, "8", True, -1])
def test_a_number_of_things_is_that_of_every_layer(value):
    """No entry of a list stands for the others: a preset is of one layer."""
    with pytest.raises(UserError, match="num_experts of config here: got"):
        fields(num_experts=value).count("num_experts")
    read = fields(num_experts=[8, 8, 8])
    assert read.count("num_experts") == 8 and read.notes == [
        "num_experts is 8: the file has a list with one number for all layers"
    ]


def test_a_name_of_a_file_has_at_most_150_letters():
    assert file_name("a", "x" * 150) == "x" * 150
    for name in ("x" * 151, "", ".x", "a/b"):
        with pytest.raises(UserError, match="at most 150 letters"):
            file_name("a", name)


def test_numbers_have_bounds_and_null_is_none_or_missing():
    assert fields(n_group=None).count("n_group", 0) == 0 and fields(n_group=0).count("n_group", 0) == 0
    for given in ({"n_group": None}, {}):
        with pytest.raises(UserError, match="no n_group"):
            fields(**given).count("n_group")
    assert fields().count("absent", otherwise=3) == 3
    for value, number in ((None, None), (0, None), (0.0, None), (2, 2.0), (0.25, 0.25), (2**20, 2.0**20)):
        assert fields(swiglu_limit=value).number("swiglu_limit") == number
    for value in (-0.5, -1, math.inf, math.nan, 2**20 + 1, True, "2"):
        with pytest.raises(UserError, match="swiglu_limit of config here: got"):
            fields(swiglu_limit=value).number("swiglu_limit")
    for value in (1, 0, "true", None):
        with pytest.raises(UserError, match="true or false"):
            fields(norm_topk_prob=value).flag("norm_topk_prob")


def test_a_field_of_two_names_has_one_value_and_the_architectures_name_comes_first():
    """A name that the architecture has for it decides alone: the others may be something else there."""
    for given in ({"a": 1, "b": 1}, {"a": None, "b": 1}, {"b": 1}):
        read = fields(**{{"a": "num_experts", "b": "n_routed_experts"}[name]: value for name, value in given.items()})
        assert read.given("num_experts") == (True, 1)
        assert read.label("num_experts") == ("num_experts" if given.get("a") else "n_routed_experts")
    assert fields(num_experts=None).given("num_experts") == (True, None) and fields().given("num_experts") == (
        False,
        None,
    )
    with pytest.raises(UserError, match="num_experts and num_local_experts"):
        fields(num_experts=8, num_local_experts=16).given("num_experts")
    with pytest.raises(UserError, match="the same value in both"):
        fields(num_experts=1, num_local_experts=True).given("num_experts")
    made = Architecture(routing_rules.softmax, names={"num_experts": "moe.count"})
    read = Fields({"moe": {"count": 4}, "num_experts": 99}, "kind", lambda: None, made, "here")
    assert read.given("num_experts") == (True, 4) and read.count("num_experts") == 4
    assert read.unread() == ["num_experts 99"], "which nothing has read"


MODEL = {
    "hidden": 512,
    "intermediate": 256,
    "experts": 16,
    "top_k": 4,
    "router": "sigmoid_renorm",
    "activation": "swiglu",
}


def test_presets_have_all_of_their_axes_and_own_ones_follow(tmp_path):
    path, own = tmp_path / "models.yaml", tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"b": MODEL, "a": MODEL | {"routed_scale": 2.5}}))
    own.write_text(yaml.safe_dump({"c": MODEL | {"hidden": 1024, "shared_intermediate": 64, "shared_gate": "sigmoid"}}))
    found = presets.load(path, own)
    assert list(found) == ["a", "b", "c"] and presets.load(path, path).keys() == {"a", "b"}
    assert (
        presets.values(found["a"])["router"] == "sigmoid_renorm_x2.5"
        and presets.values(found["b"])["router"] == "sigmoid_renorm"
    )
    assert "shared_intermediate" not in presets.values(found["c"])
    assert presets.values(found["c"], shared=True)["shared_intermediate"] == 64
    own.write_text(yaml.safe_dump({"b": MODEL}))
    with pytest.raises(UserError, match="a new name"):
        presets.load(path, own)
    for name in MODEL:
        path.write_text(yaml.safe_dump({"a": {key: value for key, value in MODEL.items() if key != name}}))
        with pytest.raises(UserError, match=f"no {name}"):
            presets.load(path)
        path.write_text(
            yaml.safe_dump(
                {"a": {key: value for key, value in MODEL.items() if key != name} | {"unsupported": "it is"}}
            )
        )
        assert presets.load(path)["a"].unsupported == "it is" and presets.values(presets.load(path)["a"])[name] is None


def jobs(bench="layer", models=None, **values):
    settings = values.pop("settings", {})
    return by_hand.jobs(bench, values.pop("implementations", None), values, settings, (), models or {})


SMALL = {"tokens": 64, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}


def test_cells_by_hand_have_typical_values_where_nothing_is_given(tmp_path):
    models = {"m": presets.Preset(**MODEL)}
    (one,) = jobs("layer", models, model="m")
    assert one.cell.tokens == AXES["tokens"].typical and (one.cell.hidden, one.cell.top_k) == (512, 4)
    assert jobs("gate", tokens=[8, 16], experts=4)[1].cell.tokens == jobs("gate", tokens=(8, 16))[1].cell.tokens == 16
    assert one.settings.min_blocks == Settings.min_blocks
    for least, most, expected in ((30, None, 40), (50, None, 50), (5, 7, 7)):
        settings = {"min_blocks": least} | ({"max_blocks": most} if most else {})
        (job,) = jobs("gate", settings=settings)
        assert (job.settings.min_blocks, job.settings.max_blocks) == (least, expected)
    path = tmp_path / "trace.parquet"
    from moe_routing_bench.traces.writing import write

    write(path, [[0, 1], [2, 3]] * 4)
    (traced,) = jobs("permute", trace=str(path), tokens=8, experts=4, top_k=2)
    assert (traced.cell.sampler, traced.cell.skew, traced.cell.trace) == ("trace", None, str(path))
    assert {job.isolate for job in by_hand.jobs("gate", None, {}, {}, (), {}, "all")} == {"all"}
    with pytest.raises(UserError, match="grid"):
        jobs("gate", implementations=[])
    assert jobs("gate", implementations=["torch"])[0].implementations == ("torch",) != jobs("gate")[0].implementations


def entry(bench="layer", **values):
    return {
        "benches": [bench],
        **{name: value if isinstance(value, list) else [value] for name, value in SMALL.items()},
        **values,
    }


def expanded(*entries, models=None, **config):
    return expand.expand(load.load({"grid": list(entries)} | config), models or {})


def test_a_cell_of_several_entries_has_the_implementations_and_twins_of_all():
    """In the order of the table; twins only where the bench has them."""
    names = [one.name for one in BENCHES["layer"].implementations]
    first, second = names[3], names[1]
    (job,) = expanded(entry(implementations=[first], twins=[first]), entry(implementations=[second]))
    assert job.implementations == (second, first) and job.twins == (first,)
    shared = next(name for name in names if name in {one.name for one in BENCHES["gate"].implementations})
    only = next(name for name in names if name not in {one.name for one in BENCHES["gate"].implementations})
    for order in (["layer", "gate"], ["gate", "layer"]):  # whichever of its benches has the twin
        both = entry(implementations=[shared, only], twins=[only], benches=order)
        found = {job.cell.bench: (job.implementations, job.twins) for job in expanded(both)}
        assert found["gate"] == ((shared,), ()) and found["layer"][1] == (only,)


def test_the_product_of_an_entry_has_every_value(monkeypatch):
    found = expanded(entry(tokens=[8, 16], top_k=[2, 4, 8]))
    assert {(job.cell.tokens, job.cell.top_k) for job in found} == {(t, k) for t in (8, 16) for k in (2, 4, 8)}
    monkeypatch.setattr(expand, "MOST_CELLS", 6)
    again = entry(tokens=[8, 16], top_k=[2, 4, 8])
    assert len(expanded(again, entry(tokens=[16], top_k=[8]))) == 6, "a cell that is there is no further one"
    for more in ([again, entry(tokens=[32])], [entry(tokens=[8, 16], top_k=[1, 2, 4, 8])]):
        with pytest.raises(UserError, match="at most 6"):
            expanded(*more)


def test_weights_of_a_model_are_its_checkpoints_unless_an_entry_says_others():
    models = {"m": presets.Preset(**MODEL, weights="int4_g128"), "n": presets.Preset(**MODEL)}
    known = {"benches": ["experts"], "tokens": [64], "model": ["m", "n"]}
    assert [job.cell.weights for job in expanded(known, models=models)] == ["int4_g128", "bf16"]
    assert {job.cell.weights for job in expanded(known | {"weights": ["int8_row"]}, models=models)} == {"int8_row"}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"tp": 2}, {"intermediate": 128, "ep": None}),
        ({"ep": 4}, {"intermediate": 256, "tp": None}),
        ({"tp": 4, "ep": 2}, {"intermediate": 64}),
        ({}, {"intermediate": 256, "tp": None, "ep": None}),
        (
            {"tp": 1, "ep": 1, "shared_intermediate": 96},
            {"intermediate": 256, "shared_intermediate": 96, "tp": None, "ep": None},
        ),
        ({"tp": 2, "shared_intermediate": 96}, {"intermediate": 128, "shared_intermediate": 48, "ep": None}),
    ],
)
def test_a_rank_has_a_share_of_the_width_or_of_the_experts(values, found):
    assert expand.shard({"intermediate": 256, "experts": 16} | values) == found


@pytest.mark.parametrize(
    ("values", "says"), [({"tp": 3}, "tp: got 3"), ({"ep": 3}, "ep: got 3"), ({"ep": 32}, "ep: got 32")]
)
def test_ranks_are_divisors(values, says):
    with pytest.raises(UserError, match=says):
        expand.shard({"intermediate": 256, "experts": 16} | values)


def test_what_would_be_ignored_is_refused(tmp_path):
    for wrong, says in (
        (entry(trace="t.parquet"), "only with sampler"),
        (entry(trace="t.parquet", sampler=["exact"]), "only with sampler"),
        (entry(model=["m"]), "nothing in addition to model"),
        (entry(shared_experts=True), "false without a model"),
        (entry(twins=["none"], implementations=["cute"]), "twins"),
    ):
        with pytest.raises(UserError, match=says):
            expanded(wrong, models={"m": presets.Preset(**MODEL)})
    path = tmp_path / "t.parquet"
    from moe_routing_bench.traces.writing import write

    write(path, [[0, 1, 2, 3]] * 64)
    both = expanded(entry("permute", trace=str(path), sampler=["exact", "trace"], skew=[0.5]))
    assert [(job.cell.sampler, job.cell.skew, job.cell.trace) for job in both] == [
        ("exact", 0.5, None),
        ("trace", None, str(path)),
    ]
    assert expanded(entry(), device="auto")[0].cell.tokens == 64


def test_parts_of_a_config():
    found = load.load({"grid": [entry()], "platform": "nvidia-h200"})
    assert found["device"] == "auto" and found["seed"] == AXES["seed"].default
    assert load.load({"grid": [entry()], "seed": 3})["seed"] == 3
    with pytest.raises(UserError, match="cpu, as device is cpu"):
        load.load({"grid": [entry()], "platform": "nvidia-h200", "device": "cpu"})
    load.load({"grid": [entry()], "platform": "cpu", "device": "cpu"})
    whole = {"a": 1, "b": 2, "cpu": {"b": 3}}
    assert load.on(whole, "cpu") == {"a": 1, "b": 3} and load.on(whole, "nvidia-h200") == {"a": 1, "b": 2}
    assert load._merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2], "e": 4}) == {
        "a": {"b": 1, "c": 3},
        "d": [2],
        "e": 4,
    }


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3", "'a' is there twice, in lines 1 and 3"),
        ("a: {b: 1, b: 2}", "'b' is there twice, in lines 1 and 1"),
        (nested(load.MOST_DEPTH + 1), "more than 12 lists"),
        ("a: &x [*x]", "within itself"),
        ("- &x [1, &y [2, [*x]]]", "within itself"),
        ("a: &x {b: &y {c: *x}}", "within itself"),
        ("a: 017", "another number"),
        ("a: 1:30", "another number"),
        ("x: 1\na: no", "in line 2 is a truth value"),
        ("a: 2026-11-28", "a date"),
        ("a: !!timestamp 2026-99-99", "a date|its tag does not allow"),
    ],
)
def test_what_yaml_may_not_have(text, says):
    with pytest.raises(yaml.YAMLError, match=says):
        load.parse_yaml(text)


def test_yaml_within_its_limits(monkeypatch):
    """Each alias counts as what it stands for."""
    assert load.parse_yaml(nested(load.MOST_DEPTH)) is not None
    assert load.parse_yaml("a: &x [1, 2]\nb: *x\nc: [0, -7, +1, 1.5, 1e3, .5, true, FALSE]") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": [0, -7, 1, 1.5, "1e3", 0.5, True, False],
    }
    monkeypatch.setattr(load, "MOST_NODES", 12)
    assert load.parse_yaml("[&x [1, 2], *x, *x, 7]")[3] == 7
    with pytest.raises(yaml.YAMLError, match="more than 12 values"):
        load.parse_yaml("[&x [1, 2], *x, *x, 7, *x]")
    assert len(load.parse_yaml("[&y 1, *y, *y, *y, *y, *y, *y, *y, *y, *y, *y]")) == 11


VALUES = {
    "model": "m",
    "phase": "decode",
    "tokens": 64,
    "experts": 16,
    "top_k": 4,
    "dtype": "bf16",
    "weights": "bf16",
    "skew": 0.7,
}


def test_the_key_of_a_cell_has_what_is_not_as_another_axis():
    found = axes.key(VALUES)
    assert found.startswith("m-decode-T64-") and "weights" not in found and "skew0.7" in found
    assert "weights-int8_row" in axes.key(VALUES | {"weights": "int8_row"})
    assert axes.key({"tokens": 64, "capacity_factor": None}) != axes.key({"tokens": 64})
    assert axes.family("layer", VALUES) == "layer-m"
    sizes = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "tokens": 9}
    assert axes.family("layer", sizes) == "layer-H512-I256-E16-k4"
    of_tokens = {axis.name for axis in AXES.values() if axis.universal} | {"tokens"}
    assert {axis.name for axis in axes.of(("tokens",))} == of_tokens >= {"seed"}
    assert axes.spelled(AXES["skew"], 1) == 1.0 and type(axes.spelled(AXES["skew"], 1)) is float
    assert axes.spelled(AXES["capacity_factor"], "none") is None and axes.spelled(AXES["tokens"], 3) == 3
    parts = axes.names("shape", without=["tokens"])
    assert "hidden" in parts and "tokens" not in parts and "dtype" not in parts and "dtype" in axes.names()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"top_k": 16}, None),
        ({"top_k": 17}, "top_k: got 17"),
        ({"ranks": 4}, None),
        ({"ranks": 3}, "ranks: got 3"),
        ({"ranks": 32}, "ranks: got 32"),
        ({"layout": "padded"}, "layout"),
        ({"layout": "padded", "capacity_factor": 1.25}, None),
        ({"packed": "bf16"}, None),
        ({"packed": "fp16"}, "packed: got 'fp16'"),
        ({"packed": "fp8_row"}, None),
        ({"shared_gate": "sigmoid"}, "shared_gate"),
        ({"shared_gate": "sigmoid", "shared_intermediate": 8}, None),
        ({"weights": "int4_g128", "hidden": 511, "intermediate": 256}, "hidden: got 511"),
        ({"weights": "int4_g128", "hidden": 512, "intermediate": 255}, "intermediate: got 255"),
        ({"router": "none"}, "router: got 'none'"),
        ({"tokens": 2**31, "top_k": 1}, "rows"),
        ({"skew": 99.0, "sampler": "exact"}, "skew: got 99"),
        ({"sampler": "trace"}, "together with trace"),
    ],
)
def test_values_that_make_no_cell(values, says):
    known = {"tokens": 64, "experts": 16, "top_k": 4, "dtype": "bf16"} | values
    if says is None:
        axes.check("layer", known)
    else:
        with pytest.raises(UserError, match=says):
            axes.check("layer", known)


CHECK = {"bench": "layer", "implementation": "cute", "column": "median_us"}
CLAIM = {
    "id": "a",
    "who": "b",
    "source": "c",
    "statement": "d",
    "boundary": "e",
    "figure": 1,
    "unit": "us",
    "within": 0.1,
    "check": CHECK,
}


def test_claims_name_what_there_is(tmp_path):
    path = tmp_path / "claims.yaml"

    def loaded(*changes):
        path.write_text(
            yaml.safe_dump(
                {
                    "claims": [
                        {key: value for key, value in (CLAIM | change).items() if value is not None}
                        for change in changes
                    ]
                }
            )
        )
        return claims.load(path)

    first, second = loaded({}, {"id": "b", "check": None, "not_runnable": "why", "lacks": ["nothing like it"]})
    assert (
        first.check.implementation == "cute"
        and not first.own
        and second.reason == "why Without an implementation here: nothing like it."
    )
    assert loaded({"who": claims.OWN})[0].own
    for changes, says in (
        ([{}, {}], "twice"),
        ([{"not_runnable": "why"}], "one of check"),
        ([{"check": None}], "neither"),
        ([{"check": None, "not_runnable": "w", "lacks": ["SonicMoE"]}], "lacks"),
        ([{"check": None, "not_runnable": "w", "lacks": ["deep_gemm"]}], "lacks"),
        ([{"check": CHECK | {"implementation": "cuet"}}], "implementation"),
        ([{"check": CHECK | {"against": "cuet"}}], "implementation"),
        ([{"check": CHECK | {"axes": {"token": 1}}}], "axis"),
    ):
        with pytest.raises(UserError, match=says):
            loaded(*changes)
    for bench in BENCHES.values():
        for one in bench.implementations:
            if one.peer:
                for name in (
                    one.name,
                    one.peer.module,
                    one.peer.distribution,
                    one.peer.distribution.partition("-")[0].upper(),
                ):
                    assert claims._plain(name) in claims._packages()


def test_a_kernel_is_known_by_its_weights_first():
    kernels = {"k": claims.Kernel(implementation="any"), "k/int4": claims.Kernel(implementation="int4")}
    texts = ("title", "source", "version", "licence", "author", "hardware", "boundary", "mode", "mode_note")
    source = claims.Source(**dict.fromkeys(texts, "x"), bench="layer", within=0.1, kernels=kernels)
    assert (source.kernel("k", "int4").implementation, source.kernel("k", "bf16").implementation) == ("int4", "any")
    with pytest.raises(UserError, match="no entry"):
        source.kernel("other", "int4")


@pytest.mark.parametrize(
    ("values", "fine"),
    [
        ({"lr": 1000}, True),
        ({"lr": 1001}, False),
        ({"layers": 1000}, True),
        ({"layers": 1001}, False),
        ({"heads": 0}, False),
    ],
)
def test_numbers_of_training_have_bounds(values, fine):
    quality = {"label": "a", "router": ["softk"], "seed": [1], "corpora": {"stdlib": 1000}, "lr": 0.1} | values
    config = {"grid": [entry()], "quality": [quality]}
    if fine:
        assert load.load(config)["quality"] == [quality]
    else:
        with pytest.raises(UserError, match=next(iter(values))):
            load.load(config)
    assert (
        json.loads(json.dumps(quality)) == quality and dataclasses.is_dataclass(Settings) and SimpleNamespace and Path
    )


def architecture(known, **given):
    return Fields(given, "kind", lambda: None, Architecture(routing_rules.softmax, **known), "here")


@pytest.mark.parametrize(
    ("known", "given", "found"),
    [
        ({"shared": "n_shared_experts"}, {"n_shared_experts": 3}, {"shared_experts": 3, "shared_intermediate": 300}),
        ({"shared": "n_shared_experts"}, {"n_shared_experts": 0}, {"shared_experts": 0, "shared_intermediate": None}),
        (
            {"shared": "n_shared_experts", "shared_width": "w"},
            {"n_shared_experts": 2, "w": 70},
            {"shared_experts": 2, "shared_intermediate": 140},
        ),
        (
            {"shared_width": "w", "shared_gate": "sigmoid"},
            {"w": 70},
            {"shared_experts": 1, "shared_intermediate": 70, "shared_gate": "sigmoid"},
        ),
        ({"shared_width": "w", "shared_gate": "sigmoid"}, {"w": 0}, {"shared_experts": 0, "shared_intermediate": None}),
        ({"always_shared": 2}, {}, {"shared_experts": 2, "shared_intermediate": 200}),
        (
            {"always_shared": 2, "shared": "n_shared_experts"},
            {"n_shared_experts": 1},
            {"shared_experts": 1, "shared_intermediate": 100},
        ),
        ({}, {}, {"shared_experts": 0, "shared_intermediate": None}),
    ],
)
def test_shared_experts_are_as_wide_as_all_of_them(known, given, found):
    assert huggingface._shared(architecture(known, **given), 100) == found


@pytest.mark.parametrize("name", ["own_latent", "moe_latent_size", "routed_expert_hidden_size"])
def test_experts_of_another_width_than_the_model_are_refused(name):
    for width, refused in ((64, False), (0, False), (None, False), (32, True)):
        read = architecture({"latent": "own_latent"}, **{"own_latent": None, name: width})
        huggingface._check_latent(read, 64)
        assert bool(read.unsupported) == refused


@pytest.mark.parametrize(
    ("known", "given", "activation"),
    [
        ({}, {"hidden_act": "silu"}, "swiglu"),
        ({}, {"hidden_act": "swish"}, "swiglu"),
        ({}, {"hidden_act": "gelu_pytorch_tanh"}, "geglu"),
        ({}, {"hidden_act": "relu2"}, None),  # with a gate
        ({"gated": False}, {"hidden_act": "relu2"}, "relu2"),
        ({"gated": False}, {"hidden_act": "silu"}, None),
        ({"act": "own_act"}, {"own_act": "silu", "hidden_act": "relu2"}, "swiglu"),
        ({"activation": "swiglu"}, {}, "swiglu"),
        ({"activation": "something"}, {"hidden_act": "silu"}, None),
        ({"limit": "swiglu_limit"}, {"hidden_act": "silu", "swiglu_limit": 10}, "swiglu_limit10"),
        ({"limit": "swiglu_limit"}, {"hidden_act": "silu", "swiglu_limit": 0}, None),
        ({"limit": "swiglu_limit"}, {"hidden_act": "gelu_pytorch_tanh", "swiglu_limit": 10}, None),
        # of an architecture that is not known to clamp: zeros and nothing are no limit
        ({}, {"hidden_act": "silu", "swiglu_limits": [0, 0.0]}, "swiglu"),
        ({}, {"hidden_act": "silu", "swiglu_limits": []}, "swiglu"),
        ({}, {"hidden_act": "silu", "swiglu_limit": None}, "swiglu"),
        ({}, {"hidden_act": "silu", "swiglu_limit": 0}, "swiglu"),
        ({}, {"hidden_act": "silu", "swiglu_limits": [0, 7.0]}, None),
        ({}, {"hidden_act": "silu", "swiglu_limits_shared": [7.0]}, None),
        ({}, {"hidden_act": "silu", "swiglu_limit": 7.0}, None),
        ({"activation": "swiglu_oai"}, {}, "swiglu_oai"),
        ({"activation": "swiglu_oai"}, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, "swiglu_oai"),
        ({"activation": "swiglu_oai"}, {"swiglu_alpha": 1.7}, None),
        ({"activation": "swiglu_oai"}, {"swiglu_limit": 8.0}, None),
    ],
)
def test_the_activation_of_an_expert(known, given, activation):
    """What no activation here computes is refused, with the field that asks for it."""
    read = architecture(known, **given)
    assert huggingface._activation(read) == activation and bool(read.unsupported) == (activation is None)


@pytest.mark.parametrize(
    ("given", "dense"),
    [
        ({"num_experts": 2}, False),
        ({"num_experts": 1}, True),
        ({"num_experts": 0}, True),
        ({"num_experts": None}, True),
        ({"num_experts": [8, 8]}, False),
        ({"num_experts": [1, 1]}, True),
        ({}, True),
        ({"num_experts": 8, "enable_moe_block": False}, True),
        ({"num_experts": 8, "enable_moe_block": True}, False),
        ({"num_experts": 8, "is_moe": False}, True),
    ],
)
def test_one_expert_is_no_mixture(given, dense):
    read = architecture({}, **given)
    if not dense:
        huggingface._check_experts(read)
        return
    with pytest.raises(UserError, match="a mixture of at least 2 experts"):
        huggingface._check_experts(read)


def test_a_model_type_is_known_without_the_names_of_its_parts():
    assert huggingface._bases("qwen3_5_moe_text") == ["qwen3_5_moe_text", "qwen3_5_moe"]
    assert huggingface._bases("qwen3_omni_moe_thinker")[1:] == ["qwen3_omni_moe"]
    assert huggingface._bases("mixtral") == ["mixtral"]
    outer = {"model_type": "outer", "text_config": {"model_type": "mixtral", "num_local_experts": 8}, "num_experts": 99}
    read = huggingface._fields(outer, "here")
    assert read.kind == "mixtral" and read.count("num_experts") == 8 and "the fields of text_config" in read.notes[0]


def test_the_scale_of_weights_is_that_of_the_architectures_field():
    assert huggingface._scale(architecture({}, routed_scaling_factor=2.0)) == 1.0
    known = {"scale": "routed_scaling_factor"}
    assert huggingface._scale(architecture(known, route_scale=2.5)) == 2.5
    read = architecture(known, routed_scaling_factor=None)
    assert huggingface._scale(read) == 1.0 and len(read.notes) == 1
    for wrong in (0, -1.0):
        with pytest.raises(UserError, match="routed_scaling_factor"):
            huggingface._scale(architecture(known, routed_scaling_factor=wrong))


def test_sizes_of_a_layer_are_of_its_experts():
    given = {
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "intermediate_size": 99,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 5,
    }
    assert huggingface._sizes(architecture({}, **given)) == {
        "hidden": 64,
        "intermediate": 48,
        "experts": 8,
        "top_k": 3,
        "layers": 5,
    }
    assert huggingface._sizes(architecture({"top_k": 1, "width": "intermediate_size"}, **given))["top_k"] == 1
    assert huggingface._sizes(architecture({"width": "intermediate_size"}, **given))["intermediate"] == 99
    assert huggingface._sizes(architecture({}, **given | {"num_experts_per_tok": 8}))["top_k"] == 8
    with pytest.raises(UserError, match="got 9"):
        huggingface._sizes(architecture({}, **given | {"num_experts_per_tok": 9}))
    for value, dense in ((1, True), (0, True), (None, True), (2, False), ([1, 1], True)):
        read = architecture({}, num_experts=value)
        if dense:
            with pytest.raises(UserError, match="a mixture of at least 2"):
                huggingface._check_experts(read)
        else:
            huggingface._check_experts(read)
    assert huggingface._bases("a_text") == ["a_text", "a"] and huggingface._bases("a") == ["a"]
    assert expanded(entry())[0].isolate == "plugins" and expanded(entry(), isolate="all")[0].isolate == "all"
