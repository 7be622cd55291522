"""Strict pydantic models, their fields said in words, and what breaks them as one line each."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from moe_routing_bench.fields import words
from moe_routing_kernels.errors import UserError, bad, near, shown
from moe_routing_kernels.formats import FORMATS

_FORMATS: Mapping[str, tuple[str, ...]] = {
    "int4": ("int4_g128", "int4_g32", "int4z_g128"),
    "int8": ("int8_row", "int8_g128"),
    "int2": ("int2_g128",),
    "uint4": ("int4z_g128",),
    "w4a16": ("int4_g128", "int4z_g128"),
    "w8a16": ("int8_row", "int8_g128"),
    "w8a8": ("int8_row", "e4m3_row"),
    "awq": ("int4z_g128",),
    "gptq": ("int4_g128", "int4z_g128"),
    "fp8": ("e4m3_block128", "e4m3_row"),
    "fp8e4m3": ("e4m3_block128", "e4m3_row"),
    "fp8e5m2": ("e5m2_block128", "e5m2_row"),
    "e4m3": ("e4m3_block128", "e4m3_row"),
    "e5m2": ("e5m2_block128", "e5m2_row"),
    "fp4": ("mxfp4", "nvfp4"),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
}


def weight_hint(value: Any, names: Sequence[str]) -> str:
    """The hint for a name that is none of `names` but that others have for formats among them; nothing for any other."""
    plain = re.sub(r"[^a-z0-9]", "", str(value)[:100].lower())
    plain = re.sub(r"^(?:torch)?float8", "fp8", plain).removesuffix("fn")
    matches = [name for name in _FORMATS.get(plain, ()) if name in names]
    return f"write {' or '.join(matches)}: the name says what shares a scale" if matches else ""


_M = TypeVar("_M", bound=BaseModel)
_UNKNOWN = ("extra_forbidden", "invalid_key")  # pydantic's names of the mistake that a key is not known


class Strict(BaseModel):
    """A mapping without unknown keys, and values without conversion: true is no number, 2.0 no integer, nan no number at all."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def model(name: str, base: type[BaseModel] = Strict, /, **fields: Any) -> Any:
    """A model with these fields, each made by `field`."""
    return create_model(name, __base__=base, **fields)


def field(
    kind: Any, title: str = "", default: Any = None, required: bool = False, description: str = ""
) -> tuple[Any, Any]:
    """A field of a `model`. Its JSON schema says in words what is allowed: `description`, or what its type says.

    Absent fields are None; `default` only documents the value that callers substitute.
    """
    definition = Field(
        ... if required else None,
        title=title or None,
        description=description or words(kind),
        json_schema_extra=None if default is None else {"default": default},
    )
    return _described(kind), definition


def _described(kind: Any) -> Any:
    """The type; the elements of a list are described too."""
    base, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if get_origin(base) is not list:
        return kind
    (element,) = get_args(base)
    return Annotated[list[Annotated[_described(element), Field(description=words(element))]], *marks]


def validated(model: type[_M], content: Any, where: str) -> _M:
    """`found` as an instance of `model`. Raises `UserError` for the most relevant mistake in it; `where` names `found`."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        mistake = min(error.errors(include_url=False), key=_rank)
    raise _explained(model, mistake, where)


def _rank(mistake: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """An unknown key first (a misspelt key is also a missing one), then by place."""
    return mistake["type"] not in _UNKNOWN, [str(part) for part in mistake["loc"]]


def _explained(model: type[BaseModel], mistake: Mapping[str, Any], where: str) -> UserError:
    kind, value, loc = mistake["type"], mistake["input"], mistake["loc"]
    if kind in _UNKNOWN:
        place, node = _node(model, loc[:-1], where)
        return _unknown_key(place, loc[-1], list(node.get("properties", {})))
    if kind == "missing":
        (place, _), (_, node) = _node(model, loc[:-1], where), _node(model, loc, where)
        return bad(place, f"no {loc[-1]!r}", node.get("description", "a value"), f"add '{loc[-1]}: ...'")
    place, node = _node(model, loc, where)
    if kind == "choice":
        names = mistake["ctx"]["names"]
        return bad(
            place,
            value,
            ", ".join(names),
            _torch_name(value, names) or weight_hint(value, names) or near(value, names),
        )
    hint = f"{shown(mistake['ctx']['element'])} is there twice" if kind == "twice" else ""
    if kind == "list_type" and not isinstance(value, dict | list | None) and len(str(value)) <= 100:
        hint = f"write [{value}]"
    return bad(place, value, node.get("description", mistake["msg"]), hint)


def _torch_name(value: Any, names: Sequence[str]) -> str:
    """The hint for a format that is given by torch's name, such as ``float32``; nothing for anything else."""
    element = str(value).removeprefix("torch.")
    matches = [name for name in names if name in FORMATS and FORMATS[name].element == element]
    return f"did you mean {matches[0]!r}?" if matches else ""


def _unknown_key(place: str, key: Any, known: Sequence[str]) -> UserError:
    return bad(f"{place} key", key, ", ".join(known), near(key, known))


def _node(model: type[BaseModel], loc: Sequence[str | int], where: str) -> tuple[str, Mapping[str, Any]]:
    """The place of a mistake, such as ``config.grid[2].tokens``, and its part of the JSON schema.

    Both end where pydantic goes on with names of the members of a union.
    """
    root = json_schema(model)
    node: Mapping[str, Any] = root
    for part in loc:
        if part in node.get("properties", {}):
            node, where = node["properties"][part], f"{where}.{part}"
        elif isinstance(part, int) and "items" in node:
            node, where = node["items"], f"{where}[{part}]"
        elif isinstance(node.get("additionalProperties"), Mapping):
            node, where = node["additionalProperties"], f"{where}.{part}"
        else:
            break
        if "$ref" in node:
            node = {**root["$defs"][node["$ref"].rsplit("/", 1)[-1]], **node}
    return where, node


class _Generator(GenerateJsonSchema):
    """JSON schema without titles that repeat names, and without null for a default that the models do not hold."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Only where a field has one of its own."""
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of the value."""
        return self.generate_inner(schema["schema"])


@functools.cache
def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model."""
    return model.model_json_schema(schema_generator=_Generator)
