"""The configuration classes of the transformers library, where it is installed: the defaults of fields that a config.json leaves out.

Nothing is downloaded, and no code of a model's repository runs: only classes that the library itself has are made.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from moe_routing_kernels.errors import bad


def installed() -> bool:
    """Whether the library can be imported. It takes seconds, so it is imported only for a field that is missing."""
    return importlib.util.find_spec("transformers") is not None


def class_of(kind: str, part: str | None = None) -> Any:
    """The class of a `model_type`, of a `part` of it such as ``text_config``, or None where the library or the class is missing."""
    if not installed():
        return None
    with _quiet():
        try:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        except ImportError:
            return None
        if kind not in CONFIG_MAPPING:
            return None
        found = CONFIG_MAPPING[kind]
        return found if part is None else (getattr(found, "sub_configs", None) or {}).get(part)


def instance(found: Any, given: Mapping[str, Any], where: str) -> Any:
    """An instance of a class with the fields that are given. Raises `UserError` for fields that the class refuses."""
    with _quiet():
        try:
            return found(**given)
        except Exception as error:  # of another package: any
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise bad(f"config {where}", reason[-1].strip(), f"what transformers' {found.__name__} takes") from error


def at(fields: Any, path: str) -> tuple[bool, Any]:
    """Whether there is a value at the end of a path such as ``ffn_config.moe_top_k``, and the value."""
    for name in path.split("."):
        if isinstance(fields, Mapping):
            if name not in fields:
                return False, None
            fields = fields[name]
        elif hasattr(fields, "attribute_map") and hasattr(fields, name):
            fields = getattr(fields, name)
        else:
            return False, None
    return True, fields


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's warnings, on tokens and positions, from the output of a command."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
