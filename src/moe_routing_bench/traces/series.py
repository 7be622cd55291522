"""Lists and mappings of arrays, as torch saves them: the arrays of layers or of forward passes, brought to those of one layer."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces import Options, Values, array, columns, is_array
from moe_routing_bench.traces.writing import MOST_VALUES, check_most
from moe_routing_kernels.errors import bad, pick

_WORDS = {
    "layers": {"layer", "layers", "block", "blocks"},
    "passes": {"step", "steps", "pass", "passes", "forward", "iteration"},
}


@dataclass(frozen=True)
class Series:
    """Arrays by number, and what they count: layers, passes, or an empty text where nothing says."""

    parts: dict[int, Any]
    what: str


def numbered(content: Mapping[Any, Any]) -> Series | None:
    """The values of a mapping whose names differ in a number alone."""
    texts = [str(key) for key in content]
    patterns = {re.sub(r"\d+", "#", text) for text in texts}
    parts = [[int(digits) for digits in re.findall(r"\d{1,9}", text)] for text in texts]
    if len(patterns) != 1 or not parts or not parts[0] or len(texts) < 2:
        return None
    varying = [place for place, group in enumerate(zip(*parts, strict=True)) if len({*group}) > 1]
    if len(varying) != 1:
        return None
    known = columns.words_of(texts[0])
    what = [kind for kind, marks in _WORDS.items() if known & marks]
    values = {numbers[varying[0]]: value for numbers, value in zip(parts, content.values(), strict=True)}
    return Series(values, what[0] if what else "") if len(values) == len(texts) else None


def meaning(series: Series, options: Options, where: object) -> tuple[str, str]:
    """Whether a series counts layers or passes, and what proves it. Raises `UserError` where it is open."""
    if not series.parts:
        raise bad("ids", f"no layer in {where}", "at least one")
    shapes = [tuple(part.shape) if is_array(part) else None for part in series.parts.values()]
    if series.what == "layers":
        return "layers", ""
    ragged = len({*shapes}) > 1
    if options.first == "passes":
        return "passes", "(tokens, k) of each pass, as --first passes says"
    if ragged and _are_passes(shapes):
        if options.layer is not None or options.first == "layers":
            option = "--layer" if options.layer is not None else "--first"
            allowed = f"none: {where} has passes of one layer, of the shapes {shapes_shown(shapes)}"
            raise bad(option, options.first if options.layer is None else options.layer, allowed)
        return "passes", f"{shapes_shown(shapes)} differ in tokens alone"
    if series.what == "passes":
        return "passes", ""
    if not ragged and (len(shapes) == 1 or options.layer is not None or options.first == "layers"):
        return "layers", ""
    got = f"{options.first or 'none'}, with {len(shapes)} arrays of the shapes {shapes_shown(shapes)} in {where}"
    equal = "" if ragged else "layers, with --layer, for an array per layer; "
    raise bad("--first", got, f"{equal}passes for an array (tokens, k) per forward pass")


def shapes_shown(shapes: Sequence[tuple[int, ...] | None]) -> str:
    """Shapes as messages show them, equal neighbours counted."""
    runs = [
        f"{shape or 'a list'}" + f" x {count}" * (count > 1)
        for shape, count in ((key, len([*group])) for key, group in groupby(shapes))
    ]
    return ", ".join(runs[:4]) + ", …" * (len(runs) > 4)


def _are_passes(shapes: Sequence[tuple[int, ...] | None]) -> bool:
    """Whether shapes can only be those of one layer's passes: of the same k, and neither passes times layers nor the reverse.

    A hook on L layers leaves each number of tokens L times in a row; layer after layer, the whole sequence repeats.
    """
    if any(shape is None or len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes if shape}) > 1:
        return False
    runs = math.gcd(*(len([*group]) for _, group in groupby(shapes)))
    periods = (count for count in range(1, len(shapes) // 2 + 1) if len(shapes) % count == 0)
    return runs == 1 and all([*shapes] != [*shapes[:count]] * (len(shapes) // count) for count in periods)


def values_of(content: Any, options: Options, where: object) -> Values:
    """The values of a tensor, an array, or of lists and mappings of them. Raises `UserError` where their meaning is open."""
    note: list[str] = []
    while not is_array(content):
        series = _series(content, options, where)
        if series is None:  # names of different things
            name = name_of([str(key) for key in content], options.key, where)
            content, options = next(value for key, value in content.items() if str(key) == name), options.without("key")
            continue
        if (whole := _three_each(series, options, where)) is not None:
            return Values(whole, options, note="; ".join([*note, f"{len(series.parts)} passes"]))
        what, proof = ("passes", "") if note and not series.what else meaning(series, options, where)
        if what == "passes":
            return _passes(series, options, where, note, proof)
        content, chosen = _layer(series, options, where)
        note.append(chosen)
        if options.first == "layers" and is_array(content):
            return Values(array(content, where), options.without("layer", "first"), _STATED, note=chosen)
        options = options.without("layer")
    if options.key is not None:
        raise bad("--key", options.key, f"none: {where} has no names")
    return Values(array(content, where), options, note="; ".join(note))


_STATED = "(tokens, k) of each layer, as --first layers says"


def _three_each(series: Series, options: Options, where: object) -> NDArray[Any] | None:
    """Passes that each have all layers, after one another, where --first says what their first dimension counts; None: no such parts."""
    parts = [series.parts[number] for number in sorted(series.parts)]
    if (
        series.what == "layers"
        or options.first not in _TOKENS
        or not parts
        or not all(is_array(part) and part.ndim == 3 for part in parts)
    ):
        return None
    axis = _TOKENS[options.first]
    shapes = [tuple(part.shape) for part in parts]
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
        raise bad("shapes of the ids", f"{shapes_shown(shapes)} in {where}", "parts that differ in tokens alone")
    check_most(sum(map(math.prod, shapes)), where, MOST_VALUES)
    return np.concatenate([array(part, where) for part in parts], axis)


_TOKENS = {"tokens": 0, "layers": 1}  # which dimension counts tokens in (tokens, layers, k) and (layers, tokens, k)


def _series(content: Any, options: Options, where: object) -> Series | None:
    """The parts of a list or mapping; None: a mapping whose names do not number its values, or of which --key takes one."""
    if isinstance(content, Mapping):
        series = numbered(content) if options.key is None else None
        if series:
            _check_name(str(next(iter(content))), where)
        return series
    if not isinstance(content, (list, tuple)):
        hint = "save the ids of all layers as one tensor, or as a list of tensors"
        raise bad("ids", f"{type(content).__name__} in {where}", "a tensor", hint)
    if options.key is not None:
        raise bad("--key", options.key, f"none: {where} has no names")
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
    if columns.role_of(name) == "counts":
        raise bad("array", f"{name!r} in {where}", "expert ids of each token", columns.HINT_COUNTS)


def _layer(series: Series, options: Options, where: object) -> tuple[Any, str]:
    numbers = sorted(series.parts)
    number = numbers[0] if options.layer is None and len(numbers) == 1 else options.layer
    if number not in series.parts:
        shown = (
            f"{numbers[0]} to {numbers[-1]}"
            if numbers == [*range(numbers[0], numbers[-1] + 1)]
            else ", ".join(map(str, numbers[:20]))
        )
        raise bad("--layer", options.layer, f"{shown}, of {where}")
    return series.parts[number], f"layer {number} of {len(numbers)}"


def _passes(series: Series, options: Options, where: object, note: list[str], proof: str) -> Values:
    """The arrays (T, k) of all passes after one another. Raises `UserError` for other shapes, and different k."""
    numbers = sorted(series.parts)
    if options.layer is not None and all(map(is_array, series.parts.values())):
        raise bad("--layer", options.layer, f"none: {where} has passes of one layer")
    arrays = [values_of(series.parts[number], options.without("first"), where).array for number in numbers]
    shapes = [part.shape for part in arrays]
    if any(len(shape) != 2 for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        raise bad("shapes of the ids", f"{shapes_shown(shapes)} in {where}", "(tokens, k) with the same k in each pass")
    check_most(sum(map(math.prod, shapes)), where, MOST_VALUES)
    rest = options.without("first", "layer")
    return Values(np.concatenate(arrays), rest, proof, note="; ".join([*note, f"{len(arrays)} passes"]))
