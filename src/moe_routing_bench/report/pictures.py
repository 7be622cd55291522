"""Small pictures beside sentences: dots with their intervals on one scale, as inline SVG. Pure functions; equal dots give equal text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

WIDTH, _STEP, _MARGIN = 300, 14, 8  # CSS pixels, as those below
_NAMED = 6  # dots that have room for their names beside them
_LEAST_STEP, _MOST_HEIGHT = 2.5, 72
MOST = 60  # dots; of more every second, third or later one is drawn, and what the sentence is about


@dataclass(frozen=True)
class Dot:
    """A value with its 95 % interval, in the unit of the picture. `chosen`: the one that the sentence is about; `hollow`: not told apart."""

    name: str
    value: float
    low: float
    high: float
    chosen: bool = False
    hollow: bool = False


def picture(dots: Sequence[Dot], what: str, unit: str = "", reference: float | None = None) -> Markup:
    """The dots from top to bottom; `what` names the scale, `unit` is written behind each number, `reference` is a dashed line.

    Dots without an interval are left out. Empty for fewer than two, which show nothing that the sentence does not say.
    """
    dots = [one for one in dots if math.isfinite(one.value + one.low + one.high)]
    if len(dots) < 2:
        return Markup()
    every = -(-len(dots) // MOST)
    dots = [one for i, one in enumerate(dots) if one.chosen or i % every == 0]
    what += f", one in {every}" * (every > 1)
    named = len(dots) <= _NAMED
    step = _STEP if named else max(_LEAST_STEP, min(_STEP, _MOST_HEIGHT / len(dots)))
    height = step * len(dots) + 22
    left = 12 + 6.2 * max(len(one.name) for one in dots) if named else _MARGIN
    ends = [edge for one in dots for edge in (one.low, one.high)] + ([] if reference is None else [reference])
    least, most = min(ends), max(ends)
    place = _scale(least, most, left, WIDTH - _MARGIN)
    said = "; ".join(f"{one.name} {_interval(one, unit)}" for one in dots)
    parts = [
        _mark(one, place, 5 + step * (i + 0.5), min(3.5, step * 0.4 + 1), named, unit) for i, one in enumerate(dots)
    ]
    if reference is not None:
        parts.insert(0, f'<line class="reference" x1="{place(reference)}" x2="{place(reference)}" y1="2" y2="{height - 16:g}"/>')  # fmt: skip
    foot = f'<text x="{left:g}" y="{height - 3:g}">{_number(least, unit)}</text><text x="{WIDTH - _MARGIN}" y="{height - 3:g}" text-anchor="end">{_number(most, unit)}</text>'
    middle = f'<text x="{(left + WIDTH - _MARGIN) / 2:g}" y="{height - 3:g}" text-anchor="middle">{escape(what)}</text>'
    box = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    return Markup(f'<svg class="picture-small" {box} role="img" aria-label="{escape(f"{what}: {said}")}">{"".join(parts)}{foot}{middle}</svg>')  # fmt: skip


def _mark(one: Dot, place, y: float, radius: float, named: bool, unit: str) -> str:
    """A dot, its interval, and its name where there is room."""
    kind = " ".join(name for name, on in (("chosen", one.chosen), ("hollow", one.hollow)) if on)
    name = f'<text x="4" y="{y + 3.5:g}">{escape(one.name)}</text>' if named else ""
    line = f'<line x1="{place(one.low)}" x2="{place(one.high)}" y1="{y:g}" y2="{y:g}"/>'
    dot = f'<circle cx="{place(one.value)}" cy="{y:g}" r="{radius:g}"/>'
    return f'<g class="{kind}"><title>{escape(one.name)}: {_interval(one, unit)}</title>{name}{line}{dot}</g>'


def _scale(least: float, most: float, left: float, right: float):
    """Value to place; logarithmic where the ends are positive and far apart."""
    bend = math.log if least > 0 and most > 3 * least else float
    low, span = bend(least), bend(most) - bend(least) or 1.0
    return lambda value: f"{left + (right - left) * (bend(value) - low) / span:.1f}"


def _number(value: float, unit: str) -> str:
    return f"{value:.1%}".replace("%", " %") if unit == "%" else f"{value:.3g}{unit}"


def _interval(one: Dot, unit: str) -> str:
    return f"{_number(one.value, unit)} [{_number(one.low, unit)}, {_number(one.high, unit)}]"
