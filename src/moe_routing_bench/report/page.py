"""Pages from the templates in this folder, which appear whole or not at all, and small pictures of sentences: dots with their intervals as inline SVG."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from markupsafe import Markup

from moe_routing_bench.report.document import Dot, Picture, Report
from moe_routing_bench.report.packing import compressed
from moe_routing_kernels import files

LIBRARY = resources.files("moe_routing_bench.report").joinpath(
    "vendor/plot.js"
)  # the charting library, which a page embeds

WIDTH, _STEP, _MARGIN = 300, 14, 8  # CSS pixels, as those below
_LETTER = 6.6  # the mean width of one, in the widest of the fonts that browsers take
_NAMED = 6  # dots that have room for their names
_LEAST_STEP, _MOST_HEIGHT = 2.5, 72
MOST = 60  # dots; of more every second, third or later one is drawn, and what the sentence is about


def write(template: str, out: Path, **values: object) -> None:
    """Fill a template and write it to `out`. A value that the template asks for and does not get is an error."""
    with files.replacing(out) as temporary:
        temporary.write_text(_templates().get_template(template).render(**values), encoding="utf-8")


def write_platform(out: Path, tab: str, data: Mapping[str, Any], **values: object) -> None:
    """Write a page of a platform to `out`: `tab` is "Speed", "Quality", "Seeds" or the name of a model; `data` what its scripts read."""
    library = LIBRARY.read_text(encoding="utf-8") if data else ""
    shown = {"tab": tab, "data": compressed(data) if data else "", "library": library, "image": "", "alone": False}
    write("platform.html.j2", out, **shown | values)


def write_report(report: Report, out: Path) -> None:
    """Write the page of a report to `out`; equal reports give equal pages."""
    shown = [figure for figure in report.figures if figure.chart]
    charts = {figure.name: figure.chart for figure in shown}
    write(
        "report.html.j2",
        out,
        report=report,
        measured=[figure for figure in shown if figure.source == "measurements"],
        trained=[figure for figure in shown if figure.source != "measurements"],
        undrawn=[figure.title for figure in report.figures if not figure.chart],
        charts=list(charts),
        benches=report.questions["measured"],
        streams=any("stream" in line.what for line in report.bars),
        drawings={f"figure-{name}" for name in charts},
        tabled={f"evidence-{figure.name}" for figure in report.evidence},
        library=LIBRARY.read_text(encoding="utf-8") if charts else "",
        data=compressed(report.rows | {"charts": charts, "questions": report.questions}),
    )


def drawn(picture_data: Picture | None) -> Markup:
    """A picture of a report as markup; empty for none."""
    return (
        picture(picture_data.dots, picture_data.what, picture_data.unit, picture_data.reference)
        if picture_data
        else Markup()
    )


@functools.cache
def _templates() -> jinja2.Environment:
    """One for all pages of a process: it compiles a template once."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moe_routing_bench.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "headings": headings,
        "quantity": quantity,
        "percent": percent,
        "breakable": breakable,
        "drawn": drawn,
    }
    return environment


_UNITS = {"us": "\u00a0µs", "x": "x"}  # claims spell units in ASCII


def quantity(value: float, unit: str, form: str = "%.4g") -> str:
    """A figure of a claim with its unit as a page spells it, on one line."""
    return form % value + _UNITS.get(unit, f"\u00a0{unit}")


def percent(text: str) -> str:
    """A text in which a percent sign stands apart from its number, on the same line."""
    return re.sub(r"(?<=\d) ?%", "\u00a0%", text)


def breakable(text: str) -> Markup:
    """A text in which a long name may end a line behind an underscore, where a narrow column would cut it inside a word."""
    return Markup(re.sub(r"\w{17,}", lambda name: name[0].replace("_", "_<wbr>"), markupsafe.escape(text)))


def headings(markup: str) -> list[tuple[str, str]]:
    """Id and markup of every section's heading in a part of a page: its list of contents."""
    return re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', markup)


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
