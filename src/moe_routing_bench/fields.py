"""Types of what a user may set, how each is said in a sentence, and the check of a dataclass whose fields have them.

A type is a bound on a number, a choice of names or a list without repetition, written as an annotation; a text in it says what
the value means. Config models, JSON schema and error messages are derived from it. pydantic is imported only when something is checked.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from moe_routing_kernels.errors import bad, pick

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

NONE = "none"  # how a config spells a value that is absent where absence means something
OrNone = Literal["none"]

_DECIMAL = {int: r"[+-]?[0-9]{1,4000}", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?"}


def decimal(kind: type, text: str) -> int | float | None:
    """The number that a text spells in decimal digits; None for any other, such as those of Python and YAML: ``1_000``, ``0x10``, ``nan``."""
    return kind(text) if len(text) <= 4000 and re.fullmatch(_DECIMAL[kind], text) else None


_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,149}")


def file_name(what: str, name: str) -> str:
    """A name that may be part of a path, a command and a wildcard of the workflow. Raises `UserError` for any other."""
    if not _FILE_NAME.fullmatch(name):
        raise bad(
            what, name, "at most 150 letters a to z, digits and any of _ . + = -, the first a letter, a digit or _"
        )
    return name


_WORDS = {int: ("an integer", "integers"), float: ("a number", "numbers"), str: ("a name", "names")}


@dataclass(frozen=True)
class Choice:
    """A name of a table. `where` says where an `open` table is listed: one that grows, so the schema file does not repeat it. `also` is a
    pattern of names that are in no table, such as references; a look-up tells whether it is one. `spelt` is how sentences
    write a name that only the pattern matches."""

    names: tuple[str, ...]
    where: str = ""
    also: str = ""
    spelt: str = ""

    @property
    def listed(self) -> tuple[str, ...]:
        """The names, and how others are spelt."""
        return (*self.names, self.spelt) if self.spelt else self.names

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Text that is one of the names; the names are in the context of the error."""
        from pydantic_core import PydanticCustomError, core_schema

        def known(value: str) -> str:
            if value not in self.names and not (self.also and re.fullmatch(self.also, value)):
                raise PydanticCustomError("choice", "not one of the names", {"names": self.listed})
            return value

        return core_schema.no_info_after_validator_function(known, handler(source))

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        """An enumeration, and the pattern of other names; nothing where the table is open."""
        if self.where:
            return handler(schema)
        names = {"enum": list(self.names)}
        return handler(schema) | ({"anyOf": [names, {"pattern": f"^(?:{self.also})$"}]} if self.also else names)


@dataclass(frozen=True)
class Distinct:
    """Marks a list of at least one element, none of them twice."""

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """The list; the element that is there twice is in the context of the error."""
        from pydantic_core import PydanticCustomError, core_schema

        def distinct(values: list[Any]) -> list[Any]:
            if not values:
                raise PydanticCustomError("empty", "no elements")
            for place, value in enumerate(values):
                if value in values[:place]:
                    raise PydanticCustomError("twice", "an element twice", {"element": value})
            return values

        return core_schema.no_info_after_validator_function(distinct, handler(source))

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        """An array of unique items."""
        return handler(schema) | {"minItems": 1, "uniqueItems": True}


def words(kind: Any, many: bool = False) -> str:
    """What a type allows, such as ``an integer of at least 1``; `many`: several of it, ``integers of at least 1``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, *marks = arguments
        if chosen := [mark for mark in marks if isinstance(mark, Choice)]:
            return _one_of(chosen[0], many)
        inner = words(base, many)
        return f"{inner} {_bounds(marks)}" if _bounds(marks) else inner
    if origin is list:
        return f"a non-empty list, without repetition, of {words(arguments[0], many=True)}"
    if origin is Literal:
        return " or ".join(str(one) for one in arguments)
    if origin is Mapping:
        return f"a mapping from {words(arguments[0])} to {words(arguments[1])}"
    if origin in (Union, UnionType):
        return ", or ".join(NONE if one is NoneType else words(one, many) for one in arguments)
    return _WORDS[kind][many] if kind in _WORDS else "true or false" if kind is bool else "a mapping"


def title(kind: Any) -> str:
    """What a value of this type means: the text among its marks."""
    return next((mark for mark in get_args(kind)[1:] if isinstance(mark, str)), "")


def _one_of(choice: Choice, many: bool) -> str:
    if choice.where:
        return f"{'names' if many else 'a name'} that {choice.where}"
    *first, last = choice.listed
    return f"{', '.join(first)} or {last}" if first else last


def _bounds(marks: list[Any]) -> str:
    """The bounds among the marks of a number."""
    low = next((one.ge for one in marks if isinstance(one, Ge)), None)
    high = next((one.le for one in marks if isinstance(one, Le)), None)
    if low is not None and high is not None:
        return f"from {low:g} to {high}"
    said = [f"of at least {low:g}"] if low is not None else []
    said += [f"above {one.gt:g}" for one in marks if isinstance(one, Gt)]
    said += [f"at most {high}"] if high is not None else []
    said += [f"below {one.lt:g}" for one in marks if isinstance(one, Lt)]
    return " and ".join(said)


def check_fields(one: Any, where: str) -> None:
    """Raise `UserError` for the first field of a dataclass whose value its type does not allow; true is no number.

    A field that is itself a dataclass checks itself.
    """
    from pydantic import ValidationError

    assert is_dataclass(one)
    for name, (kind, adapter) in _adapters(type(one)).items():
        value = getattr(one, name)
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            if mistake["type"] == "choice":
                pick(f"{where} {name}", value, mistake.get("ctx", {})["names"])
            raise bad(f"{where} {name}", value, words(kind)) from None


@functools.cache
def _adapters(owner: type) -> dict[str, "tuple[Any, TypeAdapter]"]:
    """Type and validator of every field."""
    from pydantic import ConfigDict, TypeAdapter

    hints = get_type_hints(owner, include_extras=True)
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    kinds = {one.name: hints[one.name] for one in fields(owner) if not is_dataclass(hints[one.name])}
    return {name: (kind, TypeAdapter(kind, config=strict)) for name, kind in kinds.items()}
