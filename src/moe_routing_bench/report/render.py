"""One self-contained HTML file per platform, readable offline. Never imports torch."""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pyarrow as pa

from moe_routing_bench.comparison import devices
from moe_routing_bench.comparison.claims import VERDICTS, Held
from moe_routing_bench.figures import FIGURES, NOTHING
from moe_routing_bench.figures import Figure as Entry
from moe_routing_bench.quality import compare
from moe_routing_bench.quality.run_rows import BY_DOMAIN
from moe_routing_bench.quantities import digits
from moe_routing_bench.report import (
    accuracy,
    altered,
    format_bars,
    layer_bars,
    method,
    page,
    quality,
    quantised,
    reached,
    routing_bars,
    words,
)
from moe_routing_bench.report.answers import answers
from moe_routing_bench.report.charts import charts, library
from moe_routing_bench.report.choices import choices
from moe_routing_bench.report.columns import COLUMNS, KEYS
from moe_routing_bench.report.evidence import evidence
from moe_routing_bench.report.findings import findings
from moe_routing_bench.report.headlines import headlines, unfound
from moe_routing_bench.report.packing import compressed, plain
from moe_routing_bench.report.questions import questions
from moe_routing_bench.report.rows import page_data, row_id
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.store import records

_MACHINE = (
    "gpu_name", "driver", "cuda_version", "cpu_model", "cpu_threads", "torch_version", "triton_version",
    "cutlass_dsl_version", "python_version", "power_limit_w", "git_sha", "git_dirty", "schema_version",
)  # fmt: skip
_CEILINGS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us", "graph_node_us")


def render(
    table: pa.Table | pd.DataFrame, figures: Mapping[str, Path], out: Path, trained: pd.DataFrame | None = None,
    adapted: pd.DataFrame | None = None, versions: Mapping[str, str] = MappingProxyType({}),
    claims: Sequence[Held] = (), models: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), run: str = "",
    profiles: Sequence[Mapping[str, Any]] = (), matrix: pd.DataFrame | None = None, presets: Mapping[str, str] = MappingProxyType({}),
    stored: Mapping[str, pd.DataFrame] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write the report of `table` (rows of the schema) with the SVG file of each figure to `out`.

    With the rows of training runs (`trained`) it has a section on quality, which has those of adaptations (`adapted`), too;
    figures of both are shown only there. `versions` are the package versions of commits, `claims`
    what became of published figures. `models` are the sizes that a reader can ask about, `run` the name of the run, if it has one, and
    `profiles` what its cells' calls consist of, `matrix` the rows of `store.accuracy`, if there are any, `presets` the files of
    models that are not the project's, by name, and `stored` the tables of `evidence` that there are.
    """
    frame = records.frame(table) if isinstance(table, pa.Table) else table
    tables = {"measurements": frame, "quality": trained, "perft": adapted}
    plotted = charts(tables, {name: FIGURES[name].source for name in figures if name in FIGURES})
    every = [(entry, "" if name in plotted else uri) for name, path in figures.items() for entry, uri in [_figure(name, path)]]  # fmt: skip
    drawn = [(entry, uri) for entry, uri in every if uri is not None]
    proof = evidence(stored)
    runs = {"Training runs measured": trained, "Adaptations measured": adapted}
    trainings = [words.measured(rows, versions, said) for said, rows in runs.items() if rows is not None]
    bars = reached.lines((*routing_bars.BARS, *layer_bars.BARS), {"": frame})
    page.write(
        "report.html.j2",
        out,
        title=_values(frame, "platform") + (f", run {run}" if run else ""),
        folder=out.parent.name,
        scope=" ".join([words.scope(frame), words.measured(frame, versions), *trainings]),
        siblings=words.siblings(out),
        suspects=words.suspects(frame),
        meanings=words.meanings(frame, trained is not None),
        cpu=devices.column(frame) == devices.CPU,
        comparisons=sorted(path.name for path in out.parent.glob("compare-*.html")),
        headlines=headlines(frame, trained),
        unfound=unfound(frame),
        findings=findings(frame),
        answers=answers(frame, trained),
        benches=set(frame["bench"]),
        bars=bars,
        streams=any("stream" in line.what for line in bars),
        seed=section(frame, run, profiles),
        choices=choices(frame[frame["gpu_name"].notna()]),
        claims=_judged([one for one in claims if not one.claim.own]),
        unheld=[_claim(one) for one in claims if not one.cells and not one.claim.own],
        own=_judged([one for one in claims if one.claim.own]),
        figures=[(entry, uri) for entry, uri in drawn if entry.source == "measurements"],
        undrawn=[entry.title for entry, uri in every if uri is None],
        quality=None
        if trained is None
        else _quality(trained, adapted, [one for one in drawn if one[0].source != "measurements"]),
        quantised=_quantised(frame, matrix),
        accuracy=None if matrix is None or matrix.empty else _accuracy(matrix),
        evidence=proof,
        tabled={f"evidence-{one.name}" for one in proof},
        charts=plotted,
        drawings={f"figure-{entry.name}" for entry, _ in drawn},
        library=library(),
        columns=COLUMNS,
        keys=KEYS,
        data=compressed(page_data(frame, presets) | {"charts": plotted, "questions": questions(frame, models)}),
        bad=_not_ok(frame),
        machine=[(n, _values(frame, n)) for n in _MACHINE] + [(n, _spread(frame, n)) for n in _CEILINGS],
        days=_days(frame),
        method=method.of_rows(frame),
    )


def _quality(
    trained: pd.DataFrame, adapted: pd.DataFrame | None, figures: list[tuple[Entry, str]]
) -> dict[str, object]:
    """What the section on quality shows."""
    finals = compare.finals(trained)
    seeds = finals.groupby(["label", "contestant"])["seed"].nunique()
    return {
        "figures": figures, "several": bool((seeds > 1).any()), "machine": _values(trained, "device"),
        "timed": compare.timed(compare.with_speeds(finals)), "columns": quality.COLUMNS,
        "by_domain": bool((trained["validation_batches"] == BY_DOMAIN).any()), "withdrawn": compare.WITHDRAWN, "cautions": quality.cautions(trained),
        "contests": quality.contests(trained),
        "adaptations": [] if adapted is None else quality.adaptations(adapted), "altered": altered.costs(trained),
    }  # fmt: skip


def _quantised(frame: pd.DataFrame, matrix: pd.DataFrame | None) -> dict[str, object] | None:
    """What the section on formats of weights shows; None where none was measured."""
    if not (lines := quantised.lines(frame, matrix)):
        return None
    matrices = {} if matrix is None else {"": matrix}
    return {"lines": lines, "bars": format_bars.lines({"": frame}, matrices)}


def _accuracy(matrix: pd.DataFrame) -> dict[str, object]:
    """What the section on quantised weights shows."""
    return {"sizes": accuracy.sizes(matrix), "drawn": list(accuracy.DRAWN.values()), "lines": accuracy.lines(matrix)}


def _judged(claims: Sequence[Held]) -> list[dict[str, object]]:
    """What the table of claims shows of those that rows could be held against."""
    return [_claim(one) for one in sorted(claims, key=lambda one: VERDICTS.index(one.verdict)) if one.cells]


def _claim(one: Held) -> dict[str, object]:
    """What the table of claims shows of one."""
    claim = one.claim
    ours = "–" if math.isnan(one.ours) else page.quantity(one.ours, claim.unit)
    return {
        "who": claim.who, "statement": claim.statement, "boundary": claim.boundary, "source": claim.source, "hardware": claim.hardware or "not said",
        "published": page.quantity(claim.figure, claim.unit, "%g"), "ours": ours, "cells": one.cells or "–", "verdict": one.verdict, "why": one.why,
    }  # fmt: skip


def _figure(name: str, path: Path) -> tuple[Entry, str | None]:
    """The figure's table entry and its drawing as a data URI; empty when there is no file, None when no panel has anything to show."""
    entry = FIGURES.get(name) or Entry(name, name, "")
    if not path.is_file():
        return entry, ""
    svg = path.read_text(encoding="utf-8")
    if 0 < svg.count('id="axes_') <= svg.count(f'id="{NOTHING}"'):
        return entry, None
    return entry, "data:image/svg+xml;base64," + base64.b64encode(small(svg).encode()).decode()


def small(svg: str) -> str:
    """The same drawing in fewer bytes: coordinates to a hundredth of a point, no metadata, no line ends."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    coordinates = re.compile(r'(?<=[\s"])(?:d|x|y|points)="[^"]*"')
    svg = coordinates.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    return re.sub(r"\s*\n\s*", " ", svg)


def _not_ok(frame: pd.DataFrame) -> list[tuple[str, str, str, str, list[tuple[str, str]]]]:
    """Status, bench, implementation, reason, and cell and id of the rows without a time, grouped by the first four."""
    bad = frame[frame["status"] != "ok"].assign(reason=lambda rows: rows["reason"].fillna("no reason recorded"))
    keys = ["status", "bench", "implementation", "reason"]
    return [
        (*key, sorted((str(record["cell"]), row_id(record)) for record in group.to_dict("records")))
        for key, group in bad.groupby(keys, dropna=False)
    ]


def _values(frame: pd.DataFrame, column: str) -> str:
    """The distinct values of a column."""
    values = [str(plain(v)) for v in frame[column].dropna().unique()]
    return ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "") or "–"


def _spread(frame: pd.DataFrame, column: str) -> str:
    """Median and range of a measured column."""
    values = frame[column].dropna()
    middle, least, most = (digits(one, exact=True) for one in (values.median(), values.min(), values.max()))
    return f"{middle} (median; {least} to {most})" if len(values) else "–"


def _days(frame: pd.DataFrame) -> str:
    """First start and last end of the measurements."""
    times = sorted(str(t)[:16].replace("T", " ") for t in [*frame["started_at"].dropna(), *frame["ended_at"].dropna()])
    return f"{times[0]} to {times[-1]} UTC" if times else "–"
