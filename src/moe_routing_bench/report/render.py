"""A platform's report: `report.json`, and one self-contained HTML file that is rendered from it, readable offline. Never imports torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pyarrow as pa

from moe_routing_bench.comparison import origins
from moe_routing_bench.comparison.claim_verdicts import Held
from moe_routing_bench.figures import FIGURES, footer
from moe_routing_bench.quality import compare, family
from moe_routing_bench.quality.run_rows import BY_DOMAIN
from moe_routing_bench.quantities import digits
from moe_routing_bench.report import (
    document,
    format_bars,
    layer_bars,
    page,
    quantised_weights,
    reached,
    routing_bars,
    script_data,
    section_tables,
    trained_rules,
    words,
)
from moe_routing_bench.report.answers import answers
from moe_routing_bench.report.document import Figure, Report, made
from moe_routing_bench.report.findings import findings
from moe_routing_bench.report.headlines import headlines, unfound
from moe_routing_bench.report.packing import plain
from moe_routing_bench.report.parts import Accuracy, ByFormat, Failed, Quality
from moe_routing_bench.report.row_data import page_data, row_id
from moe_routing_bench.report.script_data import questions
from moe_routing_bench.report.section_tables import choices, claim_line, evidence, judged
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.store import records

_MACHINE = (
    "gpu_name",
    "driver",
    "cuda_version",
    "cpu_model",
    "cpu_threads",
    "torch_version",
    "triton_version",
    "cutlass_dsl_version",
    "python_version",
    "power_limit_w",
    "git_sha",
    "git_dirty",
    "schema_version",
)
_CEILINGS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us", "graph_node_us")


def render(table: pa.Table | pd.DataFrame, figures: Collection[str], out: Path, *others: Any, **named: Any) -> None:
    """Write the report of `table` as data to `report.json` next to `out`, and to `out` the page that is made of it alone; arguments as `build`."""
    report = build(table, figures, out, *others, **named)
    del table  # a hundred thousand rows take as much memory as each of the texts that are made without them
    document.write(report, out.with_name(document.NAME))
    page.write_report(document.as_read(report), out)


def build(
    table: pa.Table | pd.DataFrame,
    figures: Collection[str],
    out: Path,
    trained: pd.DataFrame | None = None,
    adapted: pd.DataFrame | None = None,
    versions: Mapping[str, str] = MappingProxyType({}),
    claims: Sequence[Held] = (),
    models: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    run: str = "",
    profiles: Sequence[Mapping[str, Any]] = (),
    matrix: pd.DataFrame | None = None,
    presets: Mapping[str, str] = MappingProxyType({}),
    stored: Mapping[str, pd.DataFrame] = MappingProxyType({}),
) -> Report:
    """The report of `table` (rows of the schema) and of the figures of these names, for a page at `out`, whose folder may have pages to link.

    With the rows of training runs (`trained`) it has a section on quality, which has those of adaptations (`adapted`), too;
    figures of both are shown only there. `versions` are the package versions of commits, `claims`
    what became of published figures. `models` are the sizes that a reader can ask about, `run` the name of the run, if it has one, and
    `profiles` what its cells' calls consist of, `matrix` the rows of the accuracy matrix (`store.companions`), if there are any, `presets` the files of
    models that are not the project's, by name, and `stored` the tables of `evidence` that there are.
    """
    frame = records.frame(table) if isinstance(table, pa.Table) else table
    tables = {"measurements": frame, "quality": trained, "perft": adapted}
    runs = {"Training runs measured": trained, "Adaptations measured": adapted}
    trainings = [words.measured(rows, versions, text) for text, rows in runs.items() if rows is not None]
    scope = made(words.scope, frame)
    others, ours = ([entry for entry in claims if entry.claim.own == mine] for mine in (False, True))
    return Report(
        title=_values(frame, "platform") + (f", run {run}" if run else ""),
        folder=out.parent.name,
        cpu=origins.column(frame) == origins.CPU and not footer.is_foreign(frame),
        scope=replace(scope, text=" ".join([scope.text, words.measured(frame, versions), *trainings])),
        suspects=made(words.suspects, frame),
        published_page=words.published_page(out),
        siblings=words.siblings(out),
        comparisons=sorted(path.name for path in out.parent.glob("compare-*.html")),
        meanings=words.meanings(frame, trained is not None),
        headlines=headlines(frame, trained),
        unfound=made(unfound, frame),
        findings=findings(frame),
        answers=answers(frame, trained),
        figures=[figure(name, tables.get(FIGURES[name].source)) for name in figures],
        questions=questions(frame, models),
        failed=_failed(frame),
        machine=_machine(frame),
        method=words.method(frame),
        bars=reached.lines((*routing_bars.BARS, *layer_bars.BARS), {"": frame}),
        seed=section(frame, run, profiles),
        choices=choices(frame[frame["gpu_name"].notna()]),
        claims=judged(others),
        unheld=[claim_line(entry) for entry in others if not entry.cells],
        own=judged(ours),
        published=section_tables.published(frame),
        quality=None if trained is None else quality_of(trained, adapted),
        quantised=_quantised(frame, matrix),
        accuracy=None if matrix is None or matrix.empty else _accuracy(matrix),
        evidence=evidence(stored),
        rows=page_data(frame, presets),  # last, because it takes most memory
    )


def figure(name: str, table: pd.DataFrame | None) -> Figure:
    """A figure as data; one without marks says why."""
    entry = FIGURES[name]
    chart = None if table is None else entry.chart(table)
    text = (name, entry.title, entry.caption, entry.source)
    if chart is None or chart.marks.empty:
        return Figure(*text, reason="its table is not stored" if chart is None else chart.reason)
    return Figure(*text, script_data.chart_data(chart, footer.line(entry.source, chart.shown)))


def quality_of(trained: pd.DataFrame, adapted: pd.DataFrame | None) -> Quality:
    """What the section on quality shows."""
    finals = compare.finals(trained)
    seeds = finals.groupby(["label", "contestant"])["seed"].nunique()
    return Quality(
        several=bool((seeds > 1).any()),
        machine=_values(trained, "device"),
        timed=compare.timed(compare.with_speeds(finals)),
        columns=[(name, heading, meaning) for name, heading, _, meaning in trained_rules.COLUMNS],
        by_domain=bool((trained["validation_batches"] == BY_DOMAIN).any()),
        withdrawn=compare.WITHDRAWN,
        margin=family.MARGIN,
        cautions=trained_rules.cautions(trained),
        contests=trained_rules.contests(trained),
        adaptations=[] if adapted is None else trained_rules.adaptations(adapted),
        altered=trained_rules.altered_costs(trained),
    )


def _quantised(frame: pd.DataFrame, matrix: pd.DataFrame | None) -> ByFormat | None:
    """What the section on formats of weights shows; None where none was measured."""
    if not (lines := quantised_weights.lines(frame, matrix)):
        return None
    matrices = {} if matrix is None else {"": matrix}
    return ByFormat(lines=lines, bars=format_bars.lines({"": frame}, matrices))


def _accuracy(matrix: pd.DataFrame) -> Accuracy:
    """What the section on quantised weights shows."""
    return Accuracy(
        sizes=quantised_weights.sizes(matrix),
        drawn=list(quantised_weights.DRAWN.values()),
        lines=quantised_weights.exactness(matrix),
    )


def _failed(frame: pd.DataFrame) -> list[Failed]:
    """Rows without a time, grouped by status, bench, implementation and reason."""
    bad = frame[frame["status"] != "ok"].assign(reason=lambda rows: rows["reason"].fillna("no reason recorded"))
    keys, named = ["status", "bench", "implementation", "reason"], ["bench", "cell", "implementation"]
    return [
        Failed(*key, sorted((str(record["cell"]), row_id(record)) for record in group[named].to_dict("records")))
        for key, group in bad.groupby(keys, dropna=False)
    ]


def _machine(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Name and value of what is known of the machine, the ceilings and the days."""
    known = [(name, _values(frame, name)) for name in _MACHINE]
    ceilings = [(name, _spread(frame, name)) for name in _CEILINGS]
    return [*known, *ceilings, ("measured", _days(frame))]


def _values(frame: pd.DataFrame, column: str) -> str:
    """The distinct values of a column."""
    values = [str(plain(v)) for v in frame[column].dropna().unique()]
    return ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "") or "–"


def _spread(frame: pd.DataFrame, column: str) -> str:
    """Median and range of a measured column."""
    values = frame[column].dropna()
    middle, least, most = (digits(entry, exact=True) for entry in (values.median(), values.min(), values.max()))
    return f"{middle} (median; {least} to {most})" if len(values) else "–"


def _days(frame: pd.DataFrame) -> str:
    """First start and last end of the measurements."""
    times = sorted(str(t)[:16].replace("T", " ") for t in [*frame["started_at"].dropna(), *frame["ended_at"].dropna()])
    return f"{times[0]} to {times[-1]} UTC" if times else "–"
