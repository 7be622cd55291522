"""Pages from the templates in this folder, which appear whole or not at all."""

import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from moe_routing_bench.report.document import Picture, Report
from moe_routing_bench.report.packing import compressed
from moe_routing_bench.report.pictures import picture
from moe_routing_kernels import files

LIBRARY = resources.files("moe_routing_bench.report").joinpath(
    "vendor/plot.js"
)  # the charting library, which a page embeds


def write(template: str, out: Path, **values: object) -> None:
    """Fill a template and write it to `out`. A value that the template asks for and does not get is an error."""
    with files.replacing(out) as temporary:
        temporary.write_text(_templates().get_template(template).render(**values), encoding="utf-8")


def write_platform(out: Path, tab: str, data: Mapping[str, Any], **values: object) -> None:
    """Write a page of a platform to `out`: `tab` is "Speed", "Quality", "Seeds" or the name of a model; `data` what its scripts read."""
    library = LIBRARY.read_text(encoding="utf-8") if data else ""
    write("platform.html.j2", out, tab=tab, data=compressed(data) if data else "", library=library, **values)


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
    return Markup(re.sub(r"\w{17,}", lambda name: name[0].replace("_", "_<wbr>"), escape(text)))


def headings(markup: str) -> list[tuple[str, str]]:
    """Id and markup of every section's heading in a part of a page: its list of contents."""
    return re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', markup)
