"""A table with what was published on the left and what was measured here on the right."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_routing_bench.quantities import digits

ABSENT = "–"
_SHORT = 32  # letters that stay on a line
_NUMBER = re.compile(rf"{ABSENT}|-?\d[\d.,e+-]*( ?(x|%|µs))?")


@dataclass(frozen=True)
class Group:
    """Neighbouring columns under one heading."""

    title: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """`rows` are texts, as many in each as the groups have columns together. `note` says how to read it."""

    title: str
    groups: Sequence[Group]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Heading and class of each column: ``n`` for numbers, ``wide`` for texts that wrap, nothing for short ones."""
        headings = [name for group in self.groups for name in group.columns]
        values = zip(*self.rows, strict=True) if self.rows else [()] * len(headings)
        return [(name, _kind(column)) for name, column in zip(headings, values, strict=True)]


def _kind(column: Sequence[str]) -> str:
    if all(map(_NUMBER.fullmatch, column)):
        return "n"
    return "wide" if any(len(text) > _SHORT for text in column) else ""


def number(value: float | None, unit: str = "") -> str:
    """Four digits, or all of a large whole part, and the unit; a dash where there is no number."""
    if value is None or math.isnan(value):
        return ABSENT
    return digits(value) + unit


def ratio(of: float | None, over: float | None) -> float:
    """One over the other; NaN where one of them is missing."""
    return math.nan if of is None or over is None else of / over


def gain(value: float) -> float:
    """A ratio of times as a gain of calls per second in per cent."""
    return 100 * (value - 1)
