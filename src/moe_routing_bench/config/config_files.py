"""The config.json of a model on this machine: where it is, what the model is called, and its fields."""

import json
import os
from pathlib import Path
from typing import Any

from moe_routing_kernels.errors import bad, shown

_NAME = "config.json"
_MOST_BYTES = 2**26  # the largest of the hub have few MiB
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
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        fields = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object)
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
