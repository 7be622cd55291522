"""A model preset from the config.json of a model of the Hugging Face hub, with what it does not say and was assumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_routing_bench.config import checkpoint_formats, config_files, model_layers, presets, routing_rules, schema
from moe_routing_bench.config.architectures import ARCHITECTURES, Architecture
from moe_routing_bench.config.model_fields import ALIASES, Fields
from moe_routing_kernels.activations import ACTIVATIONS, activation_of, limited_name
from moe_routing_kernels.errors import UserError, bad, one_line, shown
from moe_routing_kernels.routers import ROUTERS

_PARTS = (
    "text_config",
    "language_config",
    "llm_config",
    "thinker_config",
)  # of a model of several parts: its language model
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
_UNGATED = {"relu2": "relu2"}
_HAND = "write it by hand: hidden, intermediate, experts, top_k, router, activation, as config/models.yaml has them"


def preset(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The preset of a config.json, or of a folder with one, as config/models.yaml has them, and what was assumed or left out.

    A model that the benches cannot measure has `unsupported`, with the reason. Raises `UserError` for a file that is no config, or
    of an architecture that neither the table nor the installed library knows, or of a dense model, or without a size.
    """
    path = config_files.located(path)
    outer = config_files.read(path)
    read = _fields(outer, str(path))
    _check_experts(read)
    sizes = _sizes(read)
    values: dict[str, Any] = sizes | _shared(read, sizes["intermediate"])
    values |= {
        "router": _router(read),
        "routed_scale": _scale(read),
        "activation": _activation(read),
    }
    if values["router"]:
        ROUTERS[values["router"]].check(sizes["experts"], sizes["top_k"])
    _check_latent(read, sizes["hidden"])
    layers = model_layers.noted(read, sizes["layers"])
    if weights := checkpoint_formats.weights(outer, read, layers):
        values["weights"] = weights
    values["source"] = one_line(f"{path.name} of {shown(config_files.model_name(path))[1:-1]}, model_type {read.kind}")
    for note in read.architecture.notes:
        read.note(note)
    if unread := read.unread():
        read.note(f"the preset leaves out {', '.join(unread)}")
    if read.unsupported:
        values["unsupported"] = "; ".join(read.unsupported)
    schema.validated(presets.Preset, values, f"the preset of {path}")
    return values, read.notes


def _fields(outer: Mapping[str, Any], where: str) -> Fields:
    """The fields of the language model, and what is known of its architecture."""
    fields, kind, part, notes = outer, outer.get("model_type"), None, []
    while inner := [name for name in _PARTS if isinstance(fields.get(name), dict) and fields[name]]:
        part, fields = inner[0], fields[inner[0]]
        notes.append(f"the fields of {part}: the language model of several parts")
        if fields.get("model_type") is not None:
            kind, part = fields["model_type"], None
    if not isinstance(kind, str):
        raise bad(f"model_type of config {where}", kind, "the name of an architecture", _HAND)
    name = next((base for base in _bases(kind) if base in ARCHITECTURES), None)
    shape = (
        config_files.class_of
    )  # called only for a field that is missing, or where the table does not know the architecture
    if name is None and (library := config_files.class_of(kind, part)) is None:
        raise _unknown(kind, where)
    if name is None and not {*dir(library), *library.attribute_map} & {*ALIASES["num_experts"]}:
        raise _dense(f"model_type {kind}, whose class has no experts", where)
    read = Fields(
        fields, name or kind, lambda: shape(kind, part), ARCHITECTURES[name] if name else _untold(fields), where
    )
    for note in notes:
        read.note(note)
    if name is None:
        read.note(f"intermediate is {read.architecture.width}: the table of architectures does not know this one")
    return read


def _bases(kind: str) -> list[str]:
    """A model_type, and what is left of it without the names of its parts."""
    return [kind, *(kind.removesuffix(end) for end in ("_text", "_mm_model", "_thinker") if kind.endswith(end))]


def _untold(fields: Mapping[str, Any]) -> Architecture:
    """What is taken for an architecture of the library that the table does not have: sizes alone."""
    width = "moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"
    return Architecture(
        routing_rules.refused("its routing rule is not known here, nor whether it has shared experts"), width
    )


def _unknown(kind: str, where: str) -> UserError:
    known = "an architecture of config/architectures.py"
    library_hint = "" if config_files.library_installed() else "install transformers, which may know it, or "
    return bad(f"model_type of config {where}", kind, f"{known} or of the installed transformers", library_hint + _HAND)


def _check_experts(read: Fields) -> None:
    """Raise `UserError` unless the file itself says that there are several experts: the default of a class makes no mixture."""
    there, value = read.given("num_experts")
    switched = [name for name in ("enable_moe_block", "is_moe") if read.fields.get(name) is False]
    read.seen("enable_moe_block", "is_moe")
    names = read.names("num_experts")
    name = next((name for name in names if name in read.fields), names[0])
    number = value[0] if isinstance(value, list) and value else value
    if not there or value is None or switched or (type(number) is int and number in (0, 1)):
        got = f"{switched[0]} false" if switched else f"{name} {shown(value)}" if there else f"no {name}"
        raise _dense(got, read.where)


def _dense(got: str, where: str) -> UserError:
    return bad(f"config {where}", got, "a mixture of at least 2 experts", "a dense model has no preset")


def _sizes(read: Fields) -> dict[str, int]:
    """The sizes of an MoE layer."""
    width = read.architecture.width
    first = read.given(width)[1]
    if read.kind == "ernie4_5_vl_moe" and isinstance(first, list) and first:
        read.fields = {**read.fields, width: first[0]}
        read.note(f"{width} is {shown(first[0])}, of the experts for text, of {shown(first)}")
    shape = {
        "hidden": read.count("hidden_size"),
        "intermediate": read.count(width),
        "experts": read.count("num_experts"),
        "top_k": read.architecture.top_k or read.count("num_experts_per_tok"),
        "layers": model_layers.listed(read) or read.count("num_hidden_layers"),
    }
    if shape["top_k"] > shape["experts"]:
        name = read.names("num_experts_per_tok")[0]
        raise read.bad(name, shape["top_k"], f"1 to {shape['experts']}, the number of experts")
    return shape


def _router(read: Fields) -> str | None:
    """The architecture's rule, unless a field asks for another."""
    router = read.architecture.router(read)
    return routing_rules.uncontradicted(read, router) if router else None


def _scale(read: Fields) -> float:
    """The factor on the weights. Raises `UserError` for 0, with which no expert would count."""
    name = read.architecture.scale
    if name is None:
        return 1.0
    if scale := read.number(name):
        return scale
    if (value := read.given(name)[1]) is not None:
        raise read.bad(read.label(name), value, "a positive number")
    read.note(f"routed_scale 1.0: {read.label(name)} is null")
    return 1.0


def _shared(read: Fields, intermediate: int) -> dict[str, Any]:
    """How many shared experts there are, and their inner width together, None for none; and their gate where there is one."""
    known = read.architecture
    stated = known.shared is not None and read.given(known.shared)[1] is not None
    if (count := known.always_shared) and not stated:
        read.note(f"shared_experts {count}, as wide as an expert: the architecture always has it")
        return {"shared_experts": count, "shared_intermediate": count * intermediate}
    count = read.count(known.shared, 0) if known.shared else 1 if known.shared_width else 0
    if known.shared_width and not known.shared:
        stated = read.given("n_shared_experts")[1]  # which says nothing where a width of all together does
        if stated not in (None, 1):
            read.note(
                f"shared_experts 1, of the width {known.shared_width}: n_shared_experts is {shown(stated)}, which the library does not read"
            )
    width = count * (read.count(known.shared_width, 0) if known.shared_width and count else intermediate)
    widths = {"shared_experts": count if width else 0, "shared_intermediate": width or None}
    return widths | ({"shared_gate": known.shared_gate} if width and known.shared_gate else {})


def _activation(read: Fields) -> str | None:
    """The activation of an expert, by the function that the config names, or by the architecture. None where it is refused."""
    known = read.architecture
    if known.activation in ACTIVATIONS:
        return known.activation if known.activation == "swiglu" else _clamped_oai(read, known.activation)
    name = known.activation or read.value(known.act)
    if not isinstance(name, str):
        raise read.bad(read.names(known.act)[0], name, "the name of a function")
    activation = (_GATED if known.gated else _UNGATED).get(name)
    if activation is None:
        gate = "" if known.gated else " without a gate"
        return read.refuse(f"its activation, {shown(name)}{gate}, is not among those of experts")
    return _limited(read, activation)


def _clamped_oai(read: Fields, activation: str) -> str | None:
    """The activation of gpt-oss, unless a field of the file has another constant."""
    computed = activation_of(activation)
    for name, constant in (("swiglu_alpha", computed.alpha), ("swiglu_limit", computed.limit)):
        there, value = read.given(name)
        if there and value != constant:
            return read.refuse(f"its {name} is {shown(value)}, that of {activation} {constant}")
    return activation


def _limited(read: Fields, activation: str) -> str | None:
    """The activation with the limit at which its two halves are clamped, where the architecture has one. None where it is refused."""
    if name := read.architecture.limit:
        limit = read.number(name)
        if limit and activation == "swiglu":
            return limited_name(limit)
        return read.refuse(f"its {name} is {shown(limit)} with activation {activation}, which no activation here has")
    for name in ("swiglu_limit", "swiglu_limits", "swiglu_limits_shared"):
        _, value = read.given(name)
        if value and not (isinstance(value, list) and not any(value)):
            return read.refuse(
                f"its {name} is {shown(value)}, and its architecture is not known to clamp as an activation here does"
            )
    return activation


def _check_latent(read: Fields, hidden: int) -> None:
    """Refuse a model whose experts work at another width than its own."""
    for name in dict.fromkeys((read.architecture.latent, "moe_latent_size", "routed_expert_hidden_size")):
        if name is None:
            continue
        latent = read.value(name) if name == read.architecture.latent else read.given(name)[1]
        if latent not in (None, 0, hidden):
            read.refuse(f"latent MoE {shown(latent)}: the layer bench has experts at full width")
