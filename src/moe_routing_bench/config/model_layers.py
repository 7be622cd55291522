"""Which layers of a model have experts, by the fields of its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from moe_routing_bench.config.model_fields import Fields
from moe_routing_kernels.errors import bad, shown

_Layers = Callable[[int], bool]  # whether a layer, by its number, has experts


def noted(read: Fields, layers: int) -> int:
    """Note which layers have no experts, or choose them otherwise; return how many may have some.

    Raises `UserError` where no layer has experts.
    """
    rules: dict[str, _Layers | None] = {}
    for name, rule in _RULES.items():
        there, value = read.given(name)
        if there and value is not None:
            rules[name] = rule(value)
    if "expert_layer_period" in rules:
        rules["expert_layer_period"] = _periodic(read)
    stated = [
        f"{name} {shown(read.fields[name])}" for name, rule in rules.items() if rule is None or not _all(rule, layers)
    ]
    known = [rule for rule in rules.values() if rule is not None]
    count = sum(all(rule(layer) for rule in known) for layer in range(layers))
    if not count and len(known) == len(rules):
        raise bad(
            f"config {read.where}",
            f"no layer with experts ({', '.join(stated)})",
            "a mixture of experts",
            "a dense model has no preset",
        )
    if stated and len(known) == len(rules):
        read.note(
            f"layers counts those without experts as well: {count} of {layers} have experts, by {', '.join(stated)}"
        )
    elif stated:
        read.note(f"layers counts those without experts as well: {', '.join(stated)}")
    _note_hashes(read)
    return count


def listed(read: Fields) -> int | None:
    """The number of layers where a file has a list of them in its place."""
    if read.given("num_hidden_layers")[0]:
        return None
    patterns = [read.given(name)[1] for name in ("layers_block_type", "hybrid_override_pattern")]
    return next((len(each) for each in patterns if isinstance(each, list | str) and each), None)


def _note_hashes(read: Fields) -> None:
    """Note layers that choose experts by the token, not by a router."""
    _, hashed = read.given("num_hash_layers")
    _, kinds = read.given("mlp_layer_types")
    hashed = hashed or (kinds.count("hash_moe") if isinstance(kinds, list) else 0)
    if hashed:
        read.note(
            f"num_hash_layers {shown(hashed)}: these layers choose experts by the token's id, which the preset leaves out"
        )


def _all(rule: _Layers, layers: int) -> bool:
    return all(rule(layer) for layer in range(layers))


def _indices(value: Any) -> set[int] | None:
    """Layers by number, of a list or of a text such as ``3,4,5``; None for anything else."""
    if isinstance(value, str):
        value = [int(part) if part.strip().isdecimal() else None for part in value[:100_000].split(",")]
    return set(value) if isinstance(value, list) and all(type(layer) is int for layer in value) else None


def _number(least: int, read: Callable[[int, int], bool]) -> Callable[[Any], _Layers | None]:
    """Layers that a number of at least `least` chooses: `read` of the layer and the number."""
    return lambda value: (lambda layer: read(layer, value)) if type(value) is int and value >= least else None


def _listed(inside: bool) -> Callable[[Any], _Layers | None]:
    """Layers that a list names, or those that it does not."""

    def rule(value: Any) -> _Layers | None:
        indices = _indices(value)
        return None if indices is None else lambda layer: (layer in indices) == inside

    return rule


def _frequency(value: Any) -> _Layers | None:
    """Every n-th layer, or 0 and 1 for each layer."""
    if isinstance(value, list):
        flags = all(type(flag) in (int, bool) and flag in (0, 1) for flag in value)
        return (lambda layer: layer < len(value) and bool(value[layer])) if flags else None
    return _number(1, lambda layer, n: layer % n == 0)(value)


def _kinds(*dense: str) -> Callable[[Any], _Layers | None]:
    """Layers by the names of their kinds; `dense` are those without experts, or none: only those named moe have some."""

    def rule(value: Any) -> _Layers | None:
        if not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
            return None
        if not dense and not {"moe", "mlp"} & set(value):
            return lambda layer: True  # kinds of attention: the list says nothing of experts
        return lambda layer: layer < len(value) and (value[layer] not in dense if dense else value[layer] == "moe")

    return rule


def _letters(value: Any) -> _Layers | None:
    """Layers by a text with a letter per layer, E for experts."""
    letters = value.replace("|", "") if isinstance(value, str) else None
    return None if letters is None else lambda layer: layer < len(letters) and letters[layer] == "E"


def _periodic(read: Fields) -> _Layers | None:
    """Every n-th layer from an offset on, both fields of the file."""
    period, offset = read.given("expert_layer_period")[1], read.given("expert_layer_offset")[1] or 0
    good = type(period) is int and period >= 1 and type(offset) is int
    return (lambda layer: layer % period == offset) if good else None


_RULES: Mapping[str, Callable[[Any], _Layers | None]] = {
    "first_k_dense_replace": _number(0, lambda layer, first: layer >= first),
    "moe_layer_num_skipped": _number(0, lambda layer, first: layer >= first),
    "num_dense_layers": _number(0, lambda layer, first: layer >= first),
    "moe_layer_start_index": _number(0, lambda layer, first: layer >= first),
    "moe_layer_end_index": _number(-1, lambda layer, last: last == -1 or layer <= last),
    "moe_layer_interval": _number(1, lambda layer, step: (layer + 1) % step == 0),
    "decoder_sparse_step": _number(1, lambda layer, step: (layer + 1) % step == 0),
    "interleave_moe_layer_step": _number(1, lambda layer, step: (layer + 1) % step == 0),
    "expert_layer_period": _number(1, lambda layer, period: True),
    "moe_layer_freq": _frequency,
    "mlp_only_layers": _listed(inside=False),
    "moe_layers": _listed(inside=True),
    "moe_layers_enum": _listed(inside=True),
    "mlp_layer_types": _kinds("dense"),
    "layers_block_type": _kinds(),
    "hybrid_override_pattern": _letters,
}
