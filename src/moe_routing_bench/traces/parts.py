"""What the arrays of a list or mapping are: those of layers, or those of forward passes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from moe_routing_bench.traces import names
from moe_routing_bench.traces.asked import Asked
from moe_routing_bench.traces.tensors import is_array
from moe_routing_kernels.errors import bad

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
    known = names.words(texts[0])
    what = [kind for kind, marks in _WORDS.items() if known & marks]
    values = {numbers[varying[0]]: value for numbers, value in zip(parts, content.values(), strict=True)}
    return Series(values, what[0] if what else "") if len(values) == len(texts) else None


def meaning(series: Series, asked: Asked, where: object) -> tuple[str, str]:
    """Whether a series counts layers or passes, and what proves it. Raises `UserError` where it is open."""
    if not series.parts:
        raise bad("ids", f"no layer in {where}", "at least one")
    shapes = [tuple(part.shape) if is_array(part) else None for part in series.parts.values()]
    if series.what == "layers":
        return "layers", ""
    ragged = len({*shapes}) > 1
    if asked.first == "passes":
        return "passes", "(tokens, k) of each pass, as --first passes says"
    if ragged and _are_passes(shapes):
        if asked.layer is not None or asked.first == "layers":
            option = "--layer" if asked.layer is not None else "--first"
            allowed = f"none: {where} has passes of one layer, of the shapes {shapes_shown(shapes)}"
            raise bad(option, asked.first if asked.layer is None else asked.layer, allowed)
        return "passes", f"{shapes_shown(shapes)} differ in tokens alone"
    if series.what == "passes":
        return "passes", ""
    if not ragged and (len(shapes) == 1 or asked.layer is not None or asked.first == "layers"):
        return "layers", ""
    got = f"{asked.first or 'none'}, with {len(shapes)} arrays of the shapes {shapes_shown(shapes)} in {where}"
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
