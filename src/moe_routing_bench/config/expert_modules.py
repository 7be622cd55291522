"""Whether the names and patterns of modules in a quantization_config are of the routed experts."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

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


def named(modules: Any) -> list[str]:
    """Those of a list of modules that are routed experts, or hold them, in every layer or in some."""
    texts = [text for text in modules if isinstance(text, str)] if isinstance(modules, list) else []
    return [text for text in texts if _holds(text)]


def layers(modules: Iterable[str]) -> set[int] | None:
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
