"""Small pictures of sentences: dots with their intervals on one scale, as inline SVG. Pure functions; equal dots give equal text."""

import math
from collections.abc import Sequence
from html import escape

from markupsafe import Markup

from moe_routing_bench.report.document import Dot

WIDTH, _STEP, _MARGIN = 300, 14, 8  # CSS pixels, as those below
_LETTER = 6.6  # the mean width of one, in the widest of the fonts that browsers take
_NAMED = 6  # dots that have room for their names
_LEAST_STEP, _MOST_HEIGHT = 2.5, 72
MOST = 60  # dots; of more every second, third or later one is drawn, and what the sentence is about


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
    longest = _LETTER * max(len(one.name) for one in dots)
    above = named and longest > WIDTH * 0.45  # next to the scale such names would leave it no room
    step = _STEP * (1 + above) if named else max(_LEAST_STEP, min(_STEP, _MOST_HEIGHT / len(dots)))
    left = 12 + longest if named and not above else _MARGIN
    bottom = step * len(dots) + 6
    ends = [edge for one in dots for edge in (one.low, one.high)] + ([] if reference is None else [reference])
    least, most = min(ends), max(ends)
    place = _scale(least, most, left, WIDTH - _MARGIN)
    said = "; ".join(f"{one.name} {_interval(one, unit)}" for one in dots)
    unit = escape(unit)  # from here on it is markup
    radius = min(3.5, step * 0.4 + 1)
    parts = [_mark(one, place, step * i, step, radius, named, above, unit) for i, one in enumerate(dots)]
    if reference is not None:
        crossed = [
            step * i
            for i, one in enumerate(dots)
            if above and 4 + _LETTER * len(_cut(one.name)) > float(place(reference)) - 2
        ]
        parts[:0] = _reference(place(reference), bottom, crossed)
    foot, height = _foot(_number(least, unit), what, _number(most, unit), left, bottom)
    box = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    return Markup(
        f'<svg class="picture-small" {box} role="img" aria-label="{escape(f"{what}: {said}")}">{"".join(parts)}{foot}</svg>'
    )


def _reference(x: str, bottom: float, crossed: Sequence[float]) -> list[str]:
    """The dashed line at `x`, in pieces between the names that stand in its way, of which `crossed` has the tops of their dots."""
    starts, ends = [2.0, *(top + 18 for top in crossed)], [*(top + 4 for top in crossed), bottom]
    return [
        f'<line class="reference" x1="{x}" x2="{x}" y1="{start:g}" y2="{end:g}"/>'
        for start, end in zip(starts, ends, strict=True)
        if end > start + 3
    ]


def _foot(least: str, what: str, most: str, left: float, bottom: float) -> tuple[str, float]:
    """The ends of the scale with its name between them, or below them where it has no room there; and the height of the picture."""
    room = WIDTH - _MARGIN - left - _LETTER * (len(least) + len(most) + 2)
    below = _LETTER * len(what) > room
    y, right = bottom + 13, WIDTH - _MARGIN
    ends = f'<text x="{left:g}" y="{y:g}">{least}</text><text x="{right}" y="{y:g}" text-anchor="end">{most}</text>'
    at = (
        f'x="{right}" y="{y + _STEP:g}" text-anchor="end"'
        if below
        else f'x="{(left + right + _LETTER * (len(least) - len(most))) / 2:g}" y="{y:g}" text-anchor="middle"'
    )
    return f"{ends}<text {at}>{escape(what)}</text>", y + 3 + _STEP * below


def _mark(one: Dot, place, top: float, step: float, radius: float, named: bool, above: bool, unit: str) -> str:
    """A dot, its interval, and its name where there is room; what is longer than the picture is cut there, and whole in the title."""
    kind = " ".join(name for name, on in (("chosen", one.chosen), ("hollow", one.hollow)) if on)
    y = top + 5 + step * (0.75 if above else 0.5)
    name = f'<text x="4" y="{top + 14.5 if above else y + 3.5:g}">{escape(_cut(one.name))}</text>' if named else ""
    line = f'<line x1="{place(one.low)}" x2="{place(one.high)}" y1="{y:g}" y2="{y:g}"/>'
    dot = f'<circle cx="{place(one.value)}" cy="{y:g}" r="{radius:g}"/>'
    return f'<g class="{kind}"><title>{escape(one.name)}: {_interval(one, unit)}</title>{name}{line}{dot}</g>'


def _cut(name: str, most: int = int((WIDTH - 4) / _LETTER)) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _scale(least: float, most: float, left: float, right: float):
    """Value to place; logarithmic where the ends are positive and far apart."""
    bend = math.log if least > 0 and most > 3 * least else float
    low, span = bend(least), bend(most) - bend(least) or 1.0
    return lambda value: f"{left + (right - left) * (bend(value) - low) / span:.1f}"


def _number(value: float, unit: str) -> str:
    return f"{value:.1%}".replace("%", " %") if unit == "%" else f"{value:.3g}{unit}"


def _interval(one: Dot, unit: str) -> str:
    return f"{_number(one.value, unit)} [{_number(one.low, unit)}, {_number(one.high, unit)}]"
