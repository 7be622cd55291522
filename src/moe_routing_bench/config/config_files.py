"""The config.json of a model on this machine, and the configuration classes of the transformers library, where it is installed, which know the
defaults of fields that a config.json leaves out.

Nothing is downloaded, and no code of a model's repository runs: only classes that the library itself has are made.
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad, shown

_NAME = "config.json"
_MOST_BYTES = 2**23  # the largest of the hub have few MiB
_ALLOWED = f"a {_NAME} of the Hugging Face hub, or the folder that has it"
_HUB = "nothing is downloaded: name a file or folder of this machine"


def located(path: Path) -> Path:
    """The config.json of a folder, or the file itself."""
    return path / _NAME if os.path.isdir(path) else path  # which raises nothing, also for a name that is too long


def model_name(path: Path) -> str:
    """The name of the folder of a file. In a cache of the hub that is a revision, and the model's name is above it."""
    folder = path.parent.resolve()  # of the file as it is named: in such a cache it is a link to one named by its hash
    _, models, name = folder.parent.parent.name.partition("models--")
    cached = folder.parent.name == "snapshots" and models
    return name.rpartition("--")[2] if cached else folder.name


def read(path: Path) -> dict[str, Any]:
    """The fields of a file. Raises `UserError` for one that is no JSON object, or has two values of one field."""
    try:
        fields = guarded.json_of(path, _MOST_BYTES, pairs=_object)
    except UnicodeDecodeError as error:
        raise bad("config", str(path), _ALLOWED, "it is not UTF-8: save it as UTF-8") from error
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = getattr(error, "strerror", None) or str(error)
        raise bad("config", str(path), _ALLOWED, f"no such file; {_HUB}" if missing else reason) from error
    if not isinstance(fields, dict):
        raise bad(f"config {path}", type(fields).__name__, "a JSON object")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a file. Raises ValueError for a name that is there twice with different values."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields and repr(fields[name]) != repr(value):
            raise ValueError(f"{shown(name)} is there twice")
        fields[name] = value
    return fields


def library_installed() -> bool:
    """Whether the library can be imported. It takes seconds, so it is imported only for a field that is missing."""
    return importlib.util.find_spec("transformers") is not None


def class_of(kind: str, part: str | None = None) -> Any:
    """The class of a `model_type`, of a `part` of it such as ``text_config``, or None where the library or the class is missing."""
    if not library_installed():
        return None
    with _quiet():
        try:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        except ImportError:
            return None
        if kind not in CONFIG_MAPPING:
            return None
        kind_class = CONFIG_MAPPING[kind]
        return kind_class if part is None else (getattr(kind_class, "sub_configs", None) or {}).get(part)


def instance_of(kind_class: Any, given: Mapping[str, Any], where: str) -> Any:
    """An instance of a class with the fields that are given. Raises `UserError` for fields that the class refuses."""
    with _quiet():
        try:
            return kind_class(**given)
        except Exception as error:  # of another package: any
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise bad(
                f"config {where}", reason[-1].strip(), f"what transformers' {kind_class.__name__} takes"
            ) from error


def field_at(fields: Any, path: str) -> tuple[bool, Any]:
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
