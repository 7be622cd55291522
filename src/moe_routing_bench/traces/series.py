"""The arrays of lists and mappings, as torch saves them, brought to those of one layer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces import names
from moe_routing_bench.traces.asked import Asked, Values
from moe_routing_bench.traces.checks import MOST_VALUES, check_most
from moe_routing_bench.traces.parts import Series, meaning, numbered, shapes_shown
from moe_routing_bench.traces.tensors import array, is_array
from moe_routing_kernels.errors import bad, pick


def values_of(content: Any, asked: Asked, where: object) -> Values:
    """The values of a tensor, an array, or of lists and mappings of them. Raises `UserError` where their meaning is open."""
    note: list[str] = []
    while not is_array(content):
        series = _series(content, asked, where)
        if series is None:  # names of different things
            name = name_of([str(key) for key in content], asked.key, where)
            content, asked = next(value for key, value in content.items() if str(key) == name), asked.without("key")
            continue
        if (whole := _three_each(series, asked, where)) is not None:
            return Values(whole, asked, note="; ".join([*note, f"{len(series.parts)} passes"]))
        what, proof = ("passes", "") if note and not series.what else meaning(series, asked, where)
        if what == "passes":
            return _passes(series, asked, where, note, proof)
        content, chosen = _layer(series, asked, where)
        note.append(chosen)
        if asked.first == "layers" and is_array(content):
            return Values(array(content, where), asked.without("layer", "first"), _STATED, note=chosen)
        asked = asked.without("layer")
    if asked.key is not None:
        raise bad("--key", asked.key, f"none: {where} has no names")
    return Values(array(content, where), asked, note="; ".join(note))


_STATED = "(tokens, k) of each layer, as --first layers says"


def _three_each(series: Series, asked: Asked, where: object) -> NDArray[Any] | None:
    """Passes that each have all layers, after one another, where --first says what their first dimension counts; None: no such parts."""
    parts = [series.parts[number] for number in sorted(series.parts)]
    if (
        series.what == "layers"
        or asked.first not in _TOKENS
        or not parts
        or not all(is_array(part) and part.ndim == 3 for part in parts)
    ):
        return None
    axis = _TOKENS[asked.first]
    shapes = [tuple(part.shape) for part in parts]
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
        raise bad("shapes of the ids", f"{shapes_shown(shapes)} in {where}", "parts that differ in tokens alone")
    check_most(sum(map(math.prod, shapes)), where, MOST_VALUES)
    return np.concatenate([array(part, where) for part in parts], axis)


_TOKENS = {"tokens": 0, "layers": 1}  # which dimension counts tokens in (tokens, layers, k) and (layers, tokens, k)


def _series(content: Any, asked: Asked, where: object) -> Series | None:
    """The parts of a list or mapping; None: a mapping whose names do not number its values, or of which --key takes one."""
    if isinstance(content, Mapping):
        series = numbered(content) if asked.key is None else None
        if series:
            _check_name(str(next(iter(content))), where)
        return series
    if not isinstance(content, (list, tuple)):
        hint = "save the ids of all layers as one tensor, or as a list of tensors"
        raise bad("ids", f"{type(content).__name__} in {where}", "a tensor", hint)
    if asked.key is not None:
        raise bad("--key", asked.key, f"none: {where} has no names")
    return Series(dict(enumerate(content)), "")


def name_of(choices: Sequence[str], key: str | None, where: object) -> str:
    """The name of the array to read: `key`, or the only one. Raises `UserError`, also for a name of counts or weights."""
    if key is None and len(choices) != 1:
        raise bad("--key", "none", ", ".join(choices) or "nothing: there is no array", f"the array of {where} to read")
    name = pick("--key", choices[0] if key is None else key, choices)
    if choices.count(name) > 1:
        raise bad("--key", name, "a name that only one array has", f"{where} has a number and a text of this name")
    _check_name(name, where)
    return name


def _check_name(name: str, where: object) -> None:
    if names.role(name) == "counts":
        raise bad("array", f"{name!r} in {where}", "expert ids of each token", names.HINT_COUNTS)


def _layer(series: Series, asked: Asked, where: object) -> tuple[Any, str]:
    numbers = sorted(series.parts)
    number = numbers[0] if asked.layer is None and len(numbers) == 1 else asked.layer
    if number not in series.parts:
        shown = (
            f"{numbers[0]} to {numbers[-1]}"
            if numbers == [*range(numbers[0], numbers[-1] + 1)]
            else ", ".join(map(str, numbers[:20]))
        )
        raise bad("--layer", asked.layer, f"{shown}, of {where}")
    return series.parts[number], f"layer {number} of {len(numbers)}"


def _passes(series: Series, asked: Asked, where: object, note: list[str], proof: str) -> Values:
    """The arrays (T, k) of all passes after one another. Raises `UserError` for other shapes, and different k."""
    numbers = sorted(series.parts)
    if asked.layer is not None and all(map(is_array, series.parts.values())):
        raise bad("--layer", asked.layer, f"none: {where} has passes of one layer")
    arrays = [values_of(series.parts[number], asked.without("first"), where).array for number in numbers]
    shapes = [part.shape for part in arrays]
    if any(len(shape) != 2 for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        raise bad("shapes of the ids", f"{shapes_shown(shapes)} in {where}", "(tokens, k) with the same k in each pass")
    check_most(sum(map(math.prod, shapes)), where, MOST_VALUES)
    rest = asked.without("first", "layer")
    return Values(np.concatenate(arrays), rest, proof, note="; ".join([*note, f"{len(arrays)} passes"]))
