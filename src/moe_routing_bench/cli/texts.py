"""Which texts a command line may hold: numbers in decimal digits, names without control characters, nothing empty, no pattern of a shell."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from moe_routing_bench.fields import decimal
from moe_routing_bench.streams import holds_controls
from moe_routing_kernels.errors import bad

_JSON = ("config_json", "spec")  # texts of many lines
_MOST_LETTERS = 4096


def check(callback: Callable, parameter: Any, value: Any) -> None:
    """Raise `UserError` where a parameter of a command got a text, or a list with one, that is no value of it."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    known = inspect.signature(callback).parameters
    if parameter.name not in known:  # --help
        return
    kinds = _kinds(known[parameter.name].annotation)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
    for text in texts:
        if isinstance(text, str):
            _check(name, text, kinds, parameter.name)


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation names."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation}


def _check(name: str, text: str, kinds: set[Any], parameter: str) -> None:
    for kind, allowed in ((int, "a whole number"), (float, "a number")):
        if kind in kinds and decimal(kind, text) is None:
            raise bad(name, text, f"{allowed}, in decimal digits")
    if parameter in _JSON:
        return
    if not text.strip():
        raise bad(name, text, "a text that is not empty")
    if holds_controls(text):
        raise bad(name, text, "a text without control characters")
    if Path in kinds and set(text) & set("*?"):
        raise bad(name, text, "a path without * and ?", "no file has matched this pattern of the shell")
    if len(text) > _MOST_LETTERS:
        raise bad(name, text, f"at most {_MOST_LETTERS} letters")
