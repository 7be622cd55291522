"""What no field of a config.json says about the MoE layers of a `model_type`: the routing rule, the activation, the shared experts.

Read from the modeling files of the transformers library or, for models with code of their own, from that code. Sizes are not here:
they are fields, and the library's own class has the default of a field that a file leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_routing_bench.config import routing_rules as rules


@dataclass(frozen=True)
class Architecture:
    """What is particular to a `model_type`.

    `width` is the field of an expert's inner width. `shared` is the field with the number of shared experts, `shared_width` that with
    their inner width: of all together, or of each where there is a number as well; without it each is as wide as an expert.
    `always_shared` is the number where no field has it, `shared_gate` what no field says. `scale` is the field of the factor on the
    weights, `latent` that of the width at which experts work where it is not the model's, `limit` that of a clamped SwiGLU.
    `activation` is one that no field says, `act` the field of the function, `gated` whether experts have a gate.
    `names` are of fields that other architectures call otherwise, ``a.b`` of field b within field a. `defaults` are those of the
    class, for machines without the library. `top_k` is a number that no field has. `notes` are what the layers do besides.
    """

    router: rules.Rule
    width: str = "moe_intermediate_size"
    shared: str | None = None
    shared_width: str | None = None
    always_shared: int = 0
    shared_gate: str | None = None
    scale: str | None = None
    activation: str | None = None
    act: str = "hidden_act"
    gated: bool = True
    limit: str | None = None
    latent: str | None = None
    top_k: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_SCALE = "routed_scaling_factor"
_RENORM = rules.always("softmax_topk_renorm")
_SIGMOID = rules.scored("sigmoid")
_SIGMOID_ALWAYS = rules.scored("sigmoid", renormalised=True)
_BIASED = rules.refused("its softmax has a selection bias, which no router here has")
_CAPACITY = rules.refused("its router drops tokens beyond a capacity, which no router here does")
_SILU = {"hidden_act": "silu"}
_WIDE = "intermediate_size"  # where all layers have experts, or dense ones have a field of their own


def _v3(**others: Any) -> Architecture:
    """An architecture with the router of DeepSeek-V3, whose experts may be grouped."""
    defaults = {"norm_topk_prob": True, **_SILU} | others.pop("defaults", {})
    fields = {"shared": "n_shared_experts", "scale": _SCALE, "defaults": defaults} | others
    return Architecture(rules.scored("sigmoid", groups=True), **fields)


def _softmax(default: bool, **others: Any) -> Architecture:
    """An architecture with a softmax over all experts; `default`: whether the class renormalises."""
    return Architecture(rules.softmax, defaults={"norm_topk_prob": default, **_SILU}, **others)


def _named(count: str | None = None, top_k: str | None = None, **others: str) -> dict[str, str]:
    """Names of the numbers of experts, and of other fields."""
    named = {"num_experts": count, "num_experts_per_tok": top_k}
    return {name: path for name, path in named.items() if path} | others


_KIMI = _named(
    "num_experts", "num_experts_per_token",
    n_group="num_expert_group", norm_topk_prob="moe_renormalize", n_shared_experts="num_shared_experts",
)  # fmt: skip
_DBRX = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_experts": "ffn_config.moe_num_experts",
    "num_experts_per_tok": "ffn_config.moe_top_k",
    "moe_intermediate_size": "ffn_config.ffn_hidden_size",
    "moe_normalize_expert_weights": "ffn_config.moe_normalize_expert_weights",
    "hidden_act": "ffn_config.ffn_act_fn.name",
}
_LONGCAT = _named(None, "moe_topk", num_hidden_layers="num_layers", moe_intermediate_size="expert_ffn_hidden_size")
_GATED: dict[str, Any] = {"shared_width": "shared_expert_intermediate_size", "shared_gate": "sigmoid"}
_GEMMA4 = Architecture(
    _RENORM, act="hidden_activation", names=_named("num_experts", "top_k_experts"),
    defaults={"hidden_activation": "gelu_pytorch_tanh"},
    notes=(
        "the router's input is normalised and scaled (input scaling), which the preset leaves out",
        "chosen weights are multiplied by a scale per expert (per_expert_scale), which the preset leaves out",
        "a dense MLP runs next to the experts, which the preset leaves out",
    ),
)  # fmt: skip
_GRANITE = Architecture(_RENORM, _WIDE, shared_width="shared_intermediate_size", defaults=_SILU)
_ERNIE = _named("moe_num_experts", "moe_k", n_shared_experts="moe_num_shared_experts")
_V2 = Architecture(
    rules.deepseek_v2, shared="n_shared_experts", scale=_SCALE,
    defaults={"topk_method": "greedy", "norm_topk_prob": False, **_SILU},
)  # fmt: skip
_STEP = Architecture(
    _SIGMOID_ALWAYS, shared_width="share_expert_dim", scale="moe_router_scaling_factor",
    names=_named("moe_num_experts", "moe_top_k"),
)  # fmt: skip
_DEEPSEEK_V3 = _v3(defaults={"n_group": 8, "topk_group": 4, _SCALE: 2.5, "n_shared_experts": 1})
ARCHITECTURES: Mapping[str, Architecture] = {
    "mixtral": Architecture(_RENORM, _WIDE, defaults=_SILU),
    "minimax": Architecture(_RENORM, _WIDE, defaults=_SILU),
    "qwen2_moe": _softmax(False, **_GATED),
    "qwen3_moe": _softmax(False),
    "qwen3_next": _softmax(True, **_GATED),
    "qwen4_exp": _softmax(True, **_GATED),
    "qwen3_5_moe": Architecture(_RENORM, defaults=_SILU, **_GATED),
    "qwen3_vl_moe": Architecture(_RENORM, defaults=_SILU),
    "qwen3_omni_moe": _softmax(True),
    "olmoe": _softmax(False, width=_WIDE),
    "flex_olmo": _softmax(False, width=_WIDE),
    "mellum": _softmax(True),
    "jamba": Architecture(rules.always("softmax_topk"), _WIDE, defaults=_SILU),
    "gpt_oss": Architecture(_RENORM, _WIDE, activation="swiglu_oai"),
    "openai_privacy_filter": Architecture(_RENORM, _WIDE, activation="swiglu_oai"),
    "llama4": Architecture(
        rules.always("llama4"), _WIDE, always_shared=1, defaults=_SILU,
        notes=("the score multiplies an expert's input, the layer bench its output",),
    ),
    "phimoe": Architecture(rules.refused("its router, SparseMixer, is not among the routers"), _WIDE, defaults=_SILU),
    "deepseek": Architecture(rules.softmax, shared="n_shared_experts"),
    "deepseek_v2": _V2,
    "deepseek_ocr2": _V2,
    "unlimited_ocr": replace(_V2, defaults={}),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": Architecture(
        rules.scored("sqrtsoftplus", "sigmoid"), shared="n_shared_experts", scale=_SCALE, limit="swiglu_limit",
        defaults={"norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, **_SILU},
    ),
    "kimi_k2": replace(_v3(), defaults={}),
    "kimi_linear": _v3(names=_KIMI),
    "bailing_hybrid": _v3(names=_KIMI),
    "bailing_moe_v2": replace(_v3(names=_KIMI), defaults={}),
    "bailing_moe": Architecture(rules.bailing, shared="n_shared_experts", scale=_SCALE, names=_KIMI, defaults={_SCALE: 1.0}),
    "axk1": _v3(notes=("the layer's output is normalised again, which the preset leaves out",)),
    "axk2": _v3(),
    "beam": _v3(shared=None),
    "dots1": _v3(defaults={"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    "dots3_note": _v3(shared_width="shared_experts_intermediate_size"),
    "exaone_moe": _v3(names={"n_shared_experts": "num_shared_experts"}),
    "glm4_moe": _v3(defaults={"n_group": 1, "topk_group": 1}),
    "glm4_moe_lite": _v3(),
    "glm4v_moe": _v3(),
    "glm5_next": _v3(limit="swiglu_limit"),
    "glm_moe_dsa": _v3(defaults={"n_group": 1, "topk_group": 1}),
    "hy_v4": _v3(limit="swiglu_limit"),
    "mimo_v2_flash": _v3(defaults={"n_group": 1, "topk_group": 1}, shared=None),
    "solar_open": _v3(),
    "nemotron_h": replace(
        _v3(), act="mlp_hidden_act", gated=False, shared=None, shared_width="moe_shared_expert_intermediate_size",
        latent="moe_latent_size", defaults={"norm_topk_prob": True, "mlp_hidden_act": "relu2", "moe_latent_size": None},
    ),
    "hy_v3": Architecture(
        _SIGMOID_ALWAYS, shared="n_shared_experts", scale="router_scaling_factor", defaults=_SILU,
        names={"n_shared_experts": "num_shared_experts"},
    ),
    "afmoe": Architecture(
        _SIGMOID_ALWAYS, shared="n_shared_experts", scale="route_scale", defaults=_SILU,
        names={"n_shared_experts": "num_shared_experts"},
    ),
    "minimax_m2": Architecture(_SIGMOID_ALWAYS, _WIDE, defaults=_SILU),
    "minimax_m3_vl": Architecture(
        _SIGMOID_ALWAYS, _WIDE, shared_width="shared_intermediate_size", scale=_SCALE, activation="swiglu_oai_unbiased",
    ),
    "step3p5": _STEP,
    "step3p7": _STEP,
    "laguna": Architecture(
        rules.laguna, shared_width="shared_expert_intermediate_size", scale="moe_routed_scaling_factor", defaults=_SILU,
    ),
    "lfm2_moe": Architecture(_SIGMOID, scale=_SCALE, activation="swiglu"),
    "flint": Architecture(_SIGMOID, shared_width="shared_expert_intermediate_size", defaults=_SILU),
    "muse_spark": Architecture(
        _SIGMOID_ALWAYS, scale=_SCALE, latent="moe_hidden_size", defaults=_SILU,
        notes=("logits are multiplied by output_multiplier before the sigmoid, which the preset leaves out",),
    ),
    "inkling": Architecture(
        rules.refused("its weights are normalised together with those of the shared experts, which no router here does"),
        shared="n_shared_experts", scale="route_scale", defaults=_SILU,
    ),
    "inkling2": Architecture(_SIGMOID_ALWAYS, scale="route_scale", activation="a softcapped SwiGLU"),
    "kolibri1": Architecture(
        rules.refused("a selection bias is added to its logits, which no router here does"),
        shared_width="shared_expert_intermediate_size", defaults=_SILU,
    ),
    "mistral4": Architecture(rules.softmax_groups, shared="n_shared_experts", scale=_SCALE),
    "mistral_large4": Architecture(rules.softmax_groups, shared="n_shared_experts", scale=_SCALE),
    "cohere2_moe": Architecture(rules.cohere2, _WIDE, shared="n_shared_experts", names={"n_shared_experts": "num_shared_experts"}),
    "granitemoe": replace(_GRANITE, shared_width=None),
    "granitemoe_swa": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "hunyuan_v1_moe": Architecture(
        _RENORM, _WIDE, always_shared=1, shared="num_shared_expert", defaults=_SILU,
        names=_named("num_experts", "moe_topk", intermediate_size="moe_intermediate_size"),
    ),
    "aria": Architecture(
        _RENORM, _WIDE, shared="n_shared_experts", activation="swiglu",
        names=_named("moe_num_experts", "moe_topk", n_shared_experts="moe_num_shared_experts"),
    ),
    "jetmoe": Architecture(
        _RENORM, _WIDE, act="activation_function",
        notes=("a bias is added to the layer's output, and attention has experts too, which the preset leaves out",),
    ),
    "dbrx": Architecture(rules.dbrx, names=_DBRX, defaults={"moe_normalize_expert_weights": 1.0, **_SILU}),
    "gemma4": _GEMMA4,
    "diffusion_gemma": _GEMMA4,
    "longcat_flash": Architecture(rules.longcat, scale=_SCALE, names=_LONGCAT, defaults=_SILU),
    "ernie4_5_moe": Architecture(_BIASED, shared="n_shared_experts", names=_ERNIE, defaults=_SILU),
    "ernie4_5_vl_moe": Architecture(_BIASED, shared="n_shared_experts", names=_ERNIE, defaults=_SILU),
    "doge": Architecture(rules.refused("its experts are single rows, retrieved by product keys, which no bench has"), _WIDE),
    "zaya": Architecture(rules.refused("its router is an MLP, with a class that skips the experts, which no router here has")),
    "switch_transformers": Architecture(_CAPACITY, "d_ff", act="dense_act_fn", gated=False, top_k=1, names={"hidden_size": "d_model"}),
    "nllb-moe": Architecture(
        _CAPACITY, "encoder_ffn_dim", act="activation_function", gated=False, top_k=2, names={"hidden_size": "d_model"},
    ),
}  # fmt: skip
