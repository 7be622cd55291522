"""A report as data: one JSON document with all that a page shows, from which any page can be rendered.

`VERSION` is that of the shape below. It rises when a field is removed or changes its meaning; a reader ignores fields that it does not know.
Every text is plain, without markup. Numbers in texts are rounded; `rows` has the values themselves, in columns that `packing` unpacks.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moe_routing_bench.report.packing import pieces
from moe_routing_bench.report.parts import (
    Accuracy,
    BarLine,
    ByFormat,
    Choices,
    Claim,
    Evidence,
    Failed,
    Method,
    Quality,
    Seed,
    Table,
)
from moe_routing_kernels import files
from moe_routing_kernels.errors import bad

NAME = "report.json"  # of the file next to the page
VERSION = 1


@dataclass(frozen=True)
class Dot:
    """A value with its 95 % interval, in the unit of the picture. `chosen`: the sentence names it; `hollow`: noise does not tell it apart."""

    name: str
    value: float
    low: float
    high: float
    chosen: bool = False
    hollow: bool = False


@dataclass(frozen=True)
class Picture:
    """Dots on one scale, from top to bottom: `what` names the scale, `unit` stands behind each number, `reference` is a dashed line."""

    dots: list[Dot]
    what: str
    unit: str = ""
    reference: float | None = None


@dataclass(frozen=True)
class Sentence:
    """A text, the rule that made it (module and function), the fragment of the page's address that shows its rows, and what it chose from."""

    text: str
    link: str = ""
    picture: Picture | None = None
    rule: str = ""


def pictured(dots: Sequence[Dot], what: str, unit: str = "", reference: float | None = None) -> Picture | None:
    """The dots with an interval as data of a report; None for fewer than two, which show nothing that the sentence does not say."""
    known = [dot for dot in dots if math.isfinite(dot.value + dot.low + dot.high)]
    return Picture(known, what, unit, reference) if len(known) > 1 else None


def made(rule: Callable[..., Sentence | str | None], *values: Any) -> Sentence | None:
    """What a rule says of values, with the rule's name; None where it says nothing."""
    result = rule(*values)
    function = getattr(rule, "func", rule)  # of a partial
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    if not result:
        return None
    return Sentence(result, rule=name) if isinstance(result, str) else replace(result, rule=name)


@dataclass(frozen=True)
class Answer(Sentence):
    """An answer to a question of readers."""

    question: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure: `chart` has its scales, legend and marks (`charts.data`); None where nothing was measured of it, and `reason` says why."""

    name: str
    title: str
    caption: str
    source: str
    chart: dict[str, Any] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """A whole report. `folder` is that of the run, `siblings`, `comparisons` and `published_page` are pages next to it, `rows` all rows (`row_data`), `questions`
    what their form asks. Parts that a run has nothing for are None or empty."""

    title: str
    folder: str
    cpu: bool
    scope: Sentence
    suspects: Sentence | None
    siblings: list[tuple[str, str]]
    comparisons: list[str]
    meanings: list[tuple[str, str]]
    headlines: list[Sentence]
    unfound: Sentence
    findings: list[Sentence]
    answers: list[Answer]
    figures: list[Figure]
    rows: dict[str, Any]
    questions: dict[str, Any]
    failed: list[Failed]
    machine: list[tuple[str, str]]
    method: Method
    bars: list[BarLine] = field(default_factory=list)
    seed: Seed | None = None
    choices: Choices | None = None
    claims: list[Claim] = field(default_factory=list)
    unheld: list[Claim] = field(default_factory=list)
    own: list[Claim] = field(default_factory=list)
    published: list[Table] = field(default_factory=list)
    quality: Quality | None = None
    quantised: ByFormat | None = None
    accuracy: Accuracy | None = None
    evidence: list[Evidence] = field(default_factory=list)
    published_page: str = ""
    version: int = VERSION


@cache
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def dumped(report: Report) -> str:
    """The report as strict JSON; equal reports give equal text. Raises ValueError for a number that JSON lacks."""
    return "".join(pieces(vars(report), _plain))


def _plain(value: Any) -> Any:
    """What JSON has for a part of a report or a number of numpy."""
    return vars(value) if is_dataclass(value) else value.item()


def parsed(text: str) -> Report:
    """The report of such a text. Raises `UserError` for one of another version or shape."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise bad(NAME, f"no JSON ({error})", "a report") from error
    version = values.get("version") if isinstance(values, Mapping) else None
    if version != VERSION:
        raise bad(NAME, f"version {version}", f"version {VERSION}", "`moe-routing-bench report` writes it again")
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise bad(NAME, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "a report") from error


def write(report: Report, out: Path) -> None:
    """Write the report to `out`."""
    with files.replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(pieces(vars(report), _plain))


def as_read(report: Report) -> Report:
    """The report as `parsed` has it, but for its rows: they are the text of which a page has a copy."""
    return replace(parsed(dumped(replace(report, rows={}))), rows=report.rows)
