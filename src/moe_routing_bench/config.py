"""Read a config: YAML, checked against workflow/schemas/config.schema.yaml, every mistake reported as one line."""

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jsonschema.validators import extend

from moe_routing_bench.errors import UserError, bad

DEFAULTS: Mapping[str, Any] = {"seed": 17, "device": "auto", "measure": {}}
SCHEMA = Path("workflow/schemas/config.schema.yaml")
_CHECKOUT = Path(__file__).resolve().parents[2]
_PRESET = ("hidden", "intermediate", "experts", "top_k", "router")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml


def load(source: Mapping[str, Any] | str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """A validated config with its defaults filled in.

    `source` is a path, several paths (a later file overrides an earlier one: mappings are merged, lists replaced, as
    Snakemake does) or a mapping that was read already. Raises `UserError` for anything that the schema does not allow.
    """
    if isinstance(source, Mapping):
        config = dict(source)
    else:
        config = {}
        for path in [source] if isinstance(source, str | Path) else source:
            config = _merged(config, read_mapping(Path(path)))
    validate(config)
    return {**DEFAULTS, **config}


def load_models(path: str | Path) -> dict[str, dict[str, Any]]:
    """The model presets of config/models.yaml. Raises `UserError` for a preset without one of its axes."""
    models = read_mapping(Path(path))
    for name, preset in models.items():
        if not isinstance(preset, Mapping):
            raise bad(f"model {name} in {path}", preset, "a mapping of axes")
        if "unsupported" not in preset and (missing := [axis for axis in _PRESET if preset.get(axis) is None]):
            raise bad(
                f"model {name} in {path}", f"no {missing[0]}", ", ".join(_PRESET), "or state why: 'unsupported: …'"
            )
    return models


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping; `UserError` for any other file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (OSError, UnicodeDecodeError) as error:
        raise bad(
            "config file", str(path), "a readable YAML file", getattr(error, "strerror", None) or "not UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise bad("config file", str(path), "valid YAML", str(error)) from error
    if not isinstance(content, dict):
        raise bad(f"config file {path}", type(content).__name__, "a mapping of keys to values")
    return content


def validate(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for the most relevant thing in which `config` breaks the schema."""
    error = min(_VALIDATOR(_schema()).iter_errors(dict(config)), key=_rank, default=None)
    if error is not None:
        raise _explain(error)


def _integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(_: object, value: object) -> bool:
    return _integer(_, value) or (isinstance(value, float) and math.isfinite(value))


# JSON has neither nan nor inf and takes 2.0 for an integer; YAML and Python do not
_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": _integer, "number": _number})
_VALIDATOR = extend(jsonschema.Draft202012Validator, type_checker=_TYPES)


def _schema() -> dict[str, Any]:
    return yaml.load((_CHECKOUT / SCHEMA).read_text(encoding="utf-8"), _LOADER)


def _rank(error: jsonschema.ValidationError) -> tuple[bool, list[str]]:
    """An unknown key first (a misspelt key is also a missing one), then by place."""
    return error.validator != "additionalProperties", [str(part) for part in error.absolute_path]


def _explain(error: jsonschema.ValidationError) -> UserError:
    place = _place(list(error.absolute_path))
    schema: Mapping[str, Any] = error.schema if isinstance(error.schema, Mapping) else {}
    known: Mapping[str, Any] = schema.get("properties", {})
    if error.validator == "additionalProperties":
        unknown = next(key for key in _keys(error) if key not in known)
        near = difflib.get_close_matches(str(unknown), known, n=1)
        return bad(f"{place} key", unknown, ", ".join(known), f"did you mean {near[0]!r}?" if near else "")
    if error.validator == "required":
        absent = next(key for key in schema["required"] if key not in _keys(error))
        allowed = known.get(absent, {}).get("description") or "a non-empty list, without repetition, of names"
        return bad(place, f"no {absent!r}", allowed, f"add '{absent}: [...]'")
    return bad(place, error.instance, schema.get("description", error.message), _list_hint(error))


def _keys(error: jsonschema.ValidationError) -> list[str]:
    return list(error.instance) if isinstance(error.instance, Mapping) else []


def _list_hint(error: jsonschema.ValidationError) -> str:
    """The value that is there twice; or, for a scalar where a list belongs, the list."""
    value: Any = error.instance
    if error.validator == "uniqueItems":
        return f"{next(v for i, v in enumerate(value) if v in value[:i])!r} is there twice"
    if error.validator == "type" and error.validator_value == "array" and not isinstance(value, dict | list | None):
        return f"write [{value}]"
    return ""


def _place(path: Sequence[str | int]) -> str:
    """Where in the config, such as ``config.grid[2].tokens``."""
    return "config" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _merged(base[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **over, **both}
