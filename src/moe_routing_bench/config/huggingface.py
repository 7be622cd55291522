"""A model preset from the config.json of a model of the Hugging Face hub, with what it does not say and was assumed.

Which field means what, and what an architecture does that no field says, is read from the modeling files of the transformers
library, or, for models that bring their own code, from that code.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_routing_bench.config import presets, schema
from moe_routing_bench.errors import bad, pick

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")  # an architecture has one of them
_SPARSE = ("first_k_dense_replace", "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period")
_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "relu2": "relu2"}


class _Reader:
    """The fields of a config, with a list of what was assumed and of reasons why the model cannot be measured."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields, self.where = fields, where
        self._own: Mapping[str, str] = {}
        self.assumed: list[str] = []
        self.unsupported: list[str] = []

    def rename(self, own: Mapping[str, str]) -> None:
        """Find fields that are there by the names that most architectures have: of each name, this one's with its path."""
        self._own = own
        found = {name: _at(self.fields, path.split(".")) for name, path in own.items()}
        self.fields = {**self.fields, **{name: value[0] for name, value in found.items() if value}}

    def need(self, *names: str) -> Any:
        """The value of the first field that is there. Raises `UserError` where none is."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        own = [self._own.get(name, name) for name in names]
        raise bad(f"config {self.where}", f"no {own[0]}", " or ".join(own), "is it the config of the language model?")

    def get(self, name: str, default: Any) -> Any:
        """The value of a field, or what the architecture takes where there is none, which is then among the assumptions."""
        if name in self.fields:
            return self.fields[name]
        self.assumed.append(f"{name} is {default!r}, as the architecture has it: the file does not say")
        return default

    def refuse(self, reason: str) -> None:
        """Note why the model cannot be measured."""
        self.unsupported.append(reason)


def _at(fields: Any, path: list[str]) -> list[Any]:
    """The value at the end of a path of names, alone in a list; none where there is no such field."""
    for name in path:
        if not isinstance(fields, Mapping) or name not in fields:
            return []
        fields = fields[name]
    return [fields]


def _softmax(default: bool) -> Callable[[_Reader], str]:
    """Softmax over all experts; `default`: whether the chosen weights are renormalised where the file does not say so."""
    return lambda read: "softmax_topk_renorm" if read.get("norm_topk_prob", default) else "softmax_topk"


def _always(router: str) -> Callable[[_Reader], str]:
    def chosen(read: _Reader) -> str:
        read.assumed.append(f"router {router}: no field says it, the architecture always routes so")
        return router

    return chosen


def _deepseek_v2(read: _Reader) -> str | None:
    """Plain top-k, or the best 3 of 8 groups."""
    if read.get("topk_method", "greedy") == "greedy":
        return _softmax(False)(read)
    groups = read.need("n_group"), read.need("topk_group"), read.get("norm_topk_prob", False)
    if groups == (8, 3, False):
        return "deepseek_v2"
    read.refuse(f"its router keeps {groups[1]} of {groups[0]} groups, the rule deepseek_v2 3 of 8, not renormalised")
    return None


def _scored(function: str, router: str) -> Callable[[_Reader], str | None]:
    """A score for each expert on its own, a selection bias, and weights that are renormalised: of all experts, or of the best 4 of 8
    groups."""

    def chosen(read: _Reader) -> str | None:
        if (scoring := read.get("scoring_func", function)) != function:
            read.refuse(f"its scoring_func is {scoring}, that of this architecture's rule {function}")
            return None
        if not read.get("norm_topk_prob", True):
            read.refuse(f"it does not renormalise the weights, which {router} does")
            return None
        groups, kept = read.fields.get("n_group") or 1, read.fields.get("topk_group") or 1
        if groups == kept:
            return router
        if (groups, kept, function) == (8, 4, "sigmoid"):
            return "deepseek_v3"
        read.refuse(f"its router keeps {kept} of {groups} groups, the rule deepseek_v3 4 of 8")
        return None

    return chosen


def _sparse_mixer(read: _Reader) -> None:
    read.refuse("its router, SparseMixer, is not among the routers")


def _norm(read: _Reader) -> str | None:
    """Softmax over all experts; the field is the order of the norm that the chosen weights are divided by."""
    order = read.get("moe_normalize_expert_weights", 1)
    if order in (1, None):
        return "softmax_topk_renorm" if order else "softmax_topk"
    read.refuse(f"it divides the weights by their norm of order {order}, not by their sum")
    return None


def _zero_experts(read: _Reader) -> None:
    zero = read.fields.get("zero_expert_num")
    others = f"{zero} zero (identity) experts share its softmax" if zero else "its softmax has a selection bias"
    read.refuse(f"{others}, which no router here has")


@dataclass(frozen=True)
class _Architecture:
    """What is particular to a `model_type`: the field of the experts' inner width, the router, and shared experts.

    `shared` is the field with the inner width of all shared experts together; where it is None, their number in
    `n_shared_experts` times the width of an expert. `always_shared` is a number that no field has, `shared_gate` what no field says.
    `names` are of fields that other architectures call otherwise, ``a.b`` of field b within field a.
    """

    router: Callable[[_Reader], str | None]
    intermediate: str = "moe_intermediate_size"
    shared: str | None = None
    always_shared: int = 0
    shared_gate: str | None = None
    activation: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


_DBRX = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_experts": "ffn_config.moe_num_experts",
    "num_experts_per_tok": "ffn_config.moe_top_k",
    "moe_intermediate_size": "ffn_config.ffn_hidden_size",
    "moe_normalize_expert_weights": "ffn_config.moe_normalize_expert_weights",
    "hidden_act": "ffn_config.ffn_act_fn.name",
}
_LONGCAT = {
    "num_hidden_layers": "num_layers",
    "num_experts_per_tok": "moe_topk",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}
_GEMMA4 = {"num_experts_per_tok": "top_k_experts", "hidden_act": "hidden_activation"}
_SIGMOID = _scored("sigmoid", "sigmoid_renorm")
_SHARED = "shared_expert_intermediate_size"
ARCHITECTURES: Mapping[str, _Architecture] = {
    "mixtral": _Architecture(_always("softmax_topk_renorm"), "intermediate_size"),
    "qwen2_moe": _Architecture(_softmax(False), shared=_SHARED, shared_gate="sigmoid"),
    "qwen3_moe": _Architecture(_softmax(False)),
    "qwen3_next": _Architecture(_softmax(True), shared=_SHARED, shared_gate="sigmoid"),
    "qwen3_5_moe": _Architecture(_always("softmax_topk_renorm"), shared=_SHARED, shared_gate="sigmoid"),
    "olmoe": _Architecture(_softmax(False), "intermediate_size"),
    "jamba": _Architecture(_always("softmax_topk"), "intermediate_size"),
    "gpt_oss": _Architecture(_always("softmax_topk_renorm"), "intermediate_size", activation="swiglu_oai"),
    "llama4": _Architecture(_always("llama4"), "intermediate_size", always_shared=1),
    "phimoe": _Architecture(_sparse_mixer, "intermediate_size"),
    "deepseek_v2": _Architecture(_deepseek_v2),
    "deepseek_v3": _Architecture(_SIGMOID),
    "deepseek_v32": _Architecture(_SIGMOID),
    "deepseek_v4": _Architecture(_scored("sqrtsoftplus", "sqrtsoftplus_renorm")),
    "kimi_k2": _Architecture(_SIGMOID),
    "glm4_moe": _Architecture(_SIGMOID),
    "glm_moe_dsa": _Architecture(_SIGMOID),
    "minimax_m2": _Architecture(_SIGMOID, "intermediate_size"),
    "mimo_v2_flash": _Architecture(_SIGMOID),
    "nemotron_h": _Architecture(_SIGMOID, shared="moe_shared_expert_intermediate_size"),
    "dbrx": _Architecture(_norm, names=_DBRX),
    "gemma4": _Architecture(_always("softmax_topk_renorm"), names=_GEMMA4),
    "longcat_flash": _Architecture(_zero_experts, names=_LONGCAT),
}


def preset(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The preset of a config.json, as config/models.yaml has them, and what was assumed.

    A model that the benches cannot measure has `unsupported`, with the reason. Raises `UserError` for a file that is no config, or
    of an architecture that is not in the table, or that lacks a size.
    """
    outer = _read(path)
    inner = outer.get("text_config")
    read = _Reader(inner if isinstance(inner, dict) else outer, str(path))
    if read.fields is not outer:
        read.assumed.append("the fields of text_config: the language model of several parts")
    kind = str(read.fields.get("model_type", outer.get("model_type"))).removesuffix("_text")
    one = ARCHITECTURES[pick(f"model_type of {path}", kind, ARCHITECTURES)]
    read.rename(one.names)
    found = {
        "hidden": read.need("hidden_size"),
        "intermediate": read.need(one.intermediate),
        "experts": read.need(*_EXPERTS),
        "top_k": read.need("num_experts_per_tok"),
        "layers": read.fields.get("num_hidden_layers"),
    }
    found |= _shared(read, one, found["intermediate"])
    found |= {
        "router": one.router(read),
        "routed_scale": float(read.fields.get("routed_scaling_factor") or 1.0),
        "activation": one.activation or _activation(read),
        "source": f"{path.name} of {path.resolve().parent.name}, model_type {kind}",
    }
    if latent := read.fields.get("moe_latent_size"):
        read.refuse(f"latent MoE {latent}: the layer bench has experts at full width")
    if read.unsupported:
        found["unsupported"] = "; ".join(read.unsupported)
    schema.validated(presets.Preset, found, f"the preset of {path}")
    dense = [f"{name} {read.fields[name]}" for name in _SPARSE if read.fields.get(name) not in (None, 0, 1)]
    if dense:
        read.assumed.append(f"layers counts those without experts as well: {', '.join(dense)}")
    return found, read.assumed


def _shared(read: _Reader, one: _Architecture, intermediate: int) -> dict[str, Any]:
    """How many shared experts there are, and their inner width together, None for none; and their gate where there is one."""
    if one.always_shared:
        read.assumed.append(f"shared_experts {one.always_shared}, as wide as an expert: the architecture always has it")
        return {"shared_experts": one.always_shared, "shared_intermediate": one.always_shared * intermediate}
    count = read.fields.get("n_shared_experts") or 0
    width = count * intermediate
    if one.shared and (width := read.fields.get(one.shared) or 0):
        count = count or 1
    found = {"shared_experts": count if width else 0, "shared_intermediate": width or None}
    return found | ({"shared_gate": one.shared_gate} if width and one.shared_gate else {})


def _activation(read: _Reader) -> str | None:
    """The activation of a gated expert, by the function that the config names, or of one without a gate."""
    name = read.fields.get("mlp_hidden_act") or read.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        read.refuse(f"its activation, {name}, is not among those of experts")
    return _ACTIVATIONS.get(name)


def _read(path: Path) -> dict[str, Any]:
    """The fields of a file. Raises `UserError` for one that is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad(
            "config", str(path), "a config.json of the Hugging Face hub", getattr(error, "strerror", None) or str(error)
        ) from error
    if not isinstance(found, dict):
        raise bad(f"config {path}", type(found).__name__, "a JSON object")
    return found
