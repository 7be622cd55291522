"""From the quantization_config of a config.json to the format of the experts' weights, as `formats.weights` names it."""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from moe_routing_bench.config.model_fields import Fields
from moe_routing_kernels.errors import shown
from moe_routing_kernels.formats.weights import WEIGHTS

_PARENTS = ("mlp", "block_sparse_moe", "moe", "feed_forward")  # of experts, as modeling files call them
_NO_LAYER = 999_999  # a layer that no pattern means
_SAMPLES = tuple(
    f"model.layers.{_NO_LAYER}.{parent}.{experts}"
    for parent in _PARENTS
    for experts in ("experts", "experts.0.down_proj", "experts.0.w2")
)
# What repeats in a pattern. Any other repetition can take forever, as can many of these.
_REPEATED = re.compile(r"\.\*\??|\.\+|\\d\+|\[0-9\]\+")
_MOST_REPEATED = 4
_MOST_LETTERS = 200


def named_experts(modules: Any) -> list[str]:
    """Those of a list of modules that are routed experts, or hold them, in every layer or in some."""
    texts = [text for text in modules if isinstance(text, str)] if isinstance(modules, list) else []
    return [text for text in texts if _holds(text)]


def layers_of(modules: Iterable[str]) -> set[int] | None:
    """The layers whose experts are named by modules of `named`; None: at least one of them is of every layer."""
    numbers = [re.findall(r"layers\\?\.(\d{1,6})(?:\\?\.|$)", text) for text in modules]
    return None if any(len(each) != 1 for each in numbers) else {int(each[0]) for each in numbers}


def _holds(text: str) -> bool:
    if re.search(r"(?<!shared_)(?<!shared)expert(?!_bias|_gate)", text):
        return True
    if text.startswith("re:"):
        return _matches(text.removeprefix("re:"))
    if "*" in text:
        return any(fnmatchcase(sample, pattern) for sample in _SAMPLES for pattern in (text, f"{text}.experts"))
    return re.sub(r"^layers\.|.*\.", "", text) in _PARENTS


def _matches(pattern: str) -> bool:
    """Whether a pattern is of experts; one that cannot be tried in a short time may be."""
    plain, repeated = _REPEATED.subn("", pattern)
    if repeated > _MOST_REPEATED or len(pattern) > _MOST_LETTERS or re.search(r"(?<!\\)[*+{]", plain):
        return True
    try:
        return any(re.match(pattern, sample) for sample in _SAMPLES)
    except re.error:
        return True


_NAMES = ("quantization_config", "compression_config")
_KEPT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_Said = Mapping[str, Any]


def weights(outer: _Said, read: Fields, layers: int) -> str | None:
    """The format of the weights of experts, which so many layers have; None: that of the activations. What does not fit is noted."""
    for fields in (read.fields, outer) if outer is not read.fields else (outer,):
        for name in _NAMES:
            stated = fields.get(name)
            if isinstance(stated, Mapping) and stated:
                read.seen(name)
                dtype = stated.get("expert_dtype") or read.given("expert_dtype")[1]
                return _format({**stated, "expert_dtype": dtype}, name, layers, read)
            if stated:
                read.note(f"{name} {shown(stated)} is no mapping: which format the weights have is not known")
    return None


def _format(stated: _Said, name: str, layers: int, read: Fields) -> str | None:
    method = stated.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    answer = reader(stated) if reader else f"quant_method {shown(method)}"
    if _kept(stated, name, layers, read):
        return None
    if answer in WEIGHTS:
        read.note(f"weights {answer}, of {name}: {shown(method)}")
        if stated.get("desc_act") is True:
            read.note("desc_act: groups are of reordered columns, here of neighbours")
        return answer
    read.note(f"no weights are set, as no format here is that of {name}: {answer}")
    return None


def _kept(stated: _Said, name: str, layers: int, read: Fields) -> bool:
    """Whether all routed experts stay as they are, which is noted, as is where some do."""
    kept = [text for key in _KEPT for text in named_experts(stated.get(key))]
    numbers = layers_of(kept)
    if kept and (numbers is None or len(numbers) >= layers):
        read.note(f"{name} leaves {shown(kept)} as they are, which names experts: no weights are set")
        return True
    if numbers:
        read.note(f"{name} leaves experts of {len(numbers)} layers as they are: {shown(sorted(numbers))}")
    return False


def _integers(bits: Any, group: Any, symmetric: Any) -> str:
    """Integers by bits, neighbours per scale (-1: a row) and whether the range is symmetric, or what they are where there are none."""
    if type(bits) is int and type(group) is int and type(symmetric) is bool:
        name = f"int{bits}{'' if symmetric else 'z'}_{'row' if group == -1 else f'g{group}'}"
        return name if name in WEIGHTS else f"integers of {bits} bits, groups of {group}"
    return f"bits {shown(bits)}, group_size {shown(group)}, symmetric {shown(symmetric)}"


def _gptq(stated: _Said) -> str:
    if stated.get("dynamic"):
        return "gptq with bits that differ from module to module"
    return _integers(stated.get("bits"), stated.get("group_size"), stated.get("sym", True))


def _awq(stated: _Said) -> str:
    points = stated.get("zero_point", True)
    bits, group = stated.get("bits", stated.get("w_bit")), stated.get("group_size", stated.get("q_group_size"))
    return _integers(bits, group, not points if type(points) is bool else points)


def _fp8(stated: _Said) -> str:
    """FP8 of 128 x 128 blocks; the experts of DeepSeek-V4 may be FP4 with powers of two for scales."""
    if (dtype := stated.get("expert_dtype")) not in (None, "fp8"):
        return "mxfp4" if dtype == "fp4" and stated.get("scale_fmt") == "ue8m0" else f"experts of {shown(dtype)}"
    if stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fp8 of fmt {shown(stated.get('fmt'))}"
    block = stated.get("weight_block_size")
    return "e4m3_block128" if block == [128, 128] else f"fp8 with weight_block_size {shown(block)}"


def _modelopt(stated: _Said) -> str:
    algorithm = stated.get("quant_algo")
    return {"NVFP4": "nvfp4", "FP8_PB_WO": "e4m3_block128"}.get(str(algorithm), f"modelopt {shown(algorithm)}")


def _compressed(stated: _Said) -> str:
    """Of the groups of modules that it names, the format of those with experts; several cannot be told apart."""
    groups = stated.get("config_groups")
    groups = [each for each in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(each, Mapping)]
    formats = [each.get("weights") for each in groups if _targets_experts(each)]
    names = {
        _scheme({"format": stated.get("format"), **each}) if isinstance(each, Mapping) else shown(each)
        for each in formats
    }
    return names.pop() if len(names) == 1 else f"compressed-tensors with {len(names)} kinds of weights of experts"


def _targets_experts(group: _Said) -> bool:
    """Whether a group of modules has the experts: it names them, or a class of modules, or says nothing."""
    targets = group.get("targets")
    classes = (
        [text for text in targets if isinstance(text, str) and text[:1].isupper()] if isinstance(targets, list) else []
    )
    return targets is None or bool(classes) or bool(named_experts(targets))


def _scheme(stated: _Said) -> str:
    """One scheme of compressed-tensors."""
    kind, bits, strategy = stated.get("type"), stated.get("num_bits"), stated.get("strategy")
    group, symmetric = stated.get("group_size"), stated.get("symmetric", True)
    text = f"{shown(kind)} of {shown(bits)} bits, strategy {shown(strategy)}, group_size {shown(group)}"
    if kind == "int" and strategy in ("group", "channel"):
        return _integers(bits, group if strategy == "group" else -1, symmetric)
    if kind == "float" and bits == 8:
        block = strategy == "block" and stated.get("block_structure") in ([128, 128], "128x128")
        answer = (
            "e4m3_block128"
            if block
            else "e4m3_row"
            if strategy == "channel"
            else f"e4m3_g{group}"
            if strategy == "group"
            else ""
        )
        return answer if answer in WEIGHTS else text
    if kind == "float" and bits == 4:
        if [strategy, group] == ["group", 32] and stated.get("format") == "mxfp4-pack-quantized":
            return "mxfp4"
        return "nvfp4" if [strategy, group] == ["tensor_group", 16] else text
    return text


_METHODS: Mapping[str, Callable[[_Said], str]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": lambda stated: "e4m3_row",
    "mxfp4": lambda stated: "mxfp4",
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
}
