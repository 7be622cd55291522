"""Tables of the page's sections: what `auto` chooses, published figures held against the rows, and what is stored with the rows. No torch."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from moe_routing_bench.comparison import published_rows, regret
from moe_routing_bench.comparison.claim_verdicts import VERDICTS, Held
from moe_routing_bench.comparison.regret import AUTO, BENCH, entries
from moe_routing_bench.config import claims
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import footer, row_groups
from moe_routing_bench.quantities import count, us
from moe_routing_bench.report.page import quantity
from moe_routing_bench.report.parts import ABSENT, Choice, Choices, Claim, Evidence, Group, Regret, Table
from moe_routing_bench.store import paths
from moe_routing_bench.store.project_files import shipped
from moe_routing_kernels import choices as table_of_choices

_SIZES = ("tokens", "hidden", "experts", "top_k")
# file, and of its table: title, what it is, the columns that say what a line is of, and column, heading and unit of each result
_TABLES = {
    "ncu": (
        "What the profiler saw",
        "Nsight Compute, caches flushed before each kernel, no launch in the time; shares are of the peak of the DRAM and of the L2 cache.",
        ("bench", "implementation", "form"),
        (
            ("duration_us", "time", "us"),
            ("dram_read_mb", "DRAM read", "MB"),
            ("dram_write_mb", "DRAM written", "MB"),
            ("dram_percent_of_peak", "DRAM, share of peak", "%"),
            ("l2_percent_of_peak", "L2, share of peak", "%"),
        ),
    ),
    "backward": (
        "Backward passes of stages",
        "The differentiable operators pack and combine and their backward passes; shares are of the copy bandwidth of the same process.",
        ("direction", "implementation"),
        (("us", "time", "us"), ("share_of_copy", "share of a copy", "share")),
    ),
}
_DECIMALS = {"us": 2, "MB": 1, "%": 1}  # those of the files, so that the numbers of a column stand under each other
FILES = tuple(_TABLES)  # names of the files in a folder of results, without .csv
COLUMNS = {
    name: ("gpu_name", "torch_version", *what, *(result[0] for result in results))
    for name, (_, _, what, results) in _TABLES.items()
}
_PUBLISHED = (
    Group("cell", ("model", "T", "weights")),
    Group("published", ("package", "version", "kernel", "time")),
    Group("the same kernel here", ("implementation", "time, warm", "over published", "status")),
    Group("ours", ("auto runs", "time, warm")),
)


def choices(rows: pd.DataFrame) -> Choices | None:
    """What the section on choices shows: a line per cell, and mean and worst of both kinds; None without a layer to choose for.

    Raises `UserError` for a table that cannot be read.
    """
    shipped = table_of_choices.load()
    lines = regret.lines(entries(rows, ""), shipped)
    if not lines:
        return None
    ran = rows[(rows["bench"] == BENCH) & (rows["implementation"] == AUTO) & (rows["status"] == "ok")]
    measured = ran.groupby("cell")["median_us"].first()
    layers = rows[rows["bench"] == BENCH]
    names = dict(
        zip(layers["cell"], row_groups.labels(layers), strict=True)
    )  # an entry has no skew, which its cell may have
    return Choices(
        cells=len(shipped),
        lines=[_choice(line, names[line.entry.cell], measured) for line in lines],
        summaries=[_summary(one) for one in regret.summaries(lines)],
        always=[_summary(one) for one in regret.always(lines)[:1]],
        bar=f"mean {regret.MEAN_BAR:.0%}, worst {regret.WORST_BAR:.0%}",
    )


def _choice(line: regret.Line, name: str, measured: pd.Series) -> Choice:
    """A line of the table; `auto` is the regret of its own row, where it was measured."""
    times, entry = line.entry.times, line.entry
    doubts = dict.fromkeys(entry.suspect.values())
    return Choice(
        cell=name,
        key=entry.cell,
        best_own=f"{line.best_own}, {us(times[line.best_own])}",
        best=f"{line.best}, {us(times[line.best])}",
        choices=[(one.name, f"{one.own:.1%}", f"{one.all:.1%}") for one in line.choices],
        auto=f"{measured[entry.cell] / times[line.best_own] - 1:.1%}" if entry.cell in measured else "–",
        notes="; ".join([*line.unmeasured, *(f"suspect: {why}" for why in doubts)]),
    )


def _summary(one: regret.Summary) -> Regret:
    return Regret(
        what=one.what, cells=count(one.cells, "cell"), mean=f"{one.mean:.1%}", worst=f"{one.worst:.1%}", met=one.met
    )


def evidence(files: Mapping[str, pd.DataFrame]) -> list[Evidence]:
    """A table for each of `FILES` that is stored and has lines, in their order."""
    return [_table(name, files[name]) for name in FILES if name in files and len(files[name])]


def _table(name: str, rows: pd.DataFrame) -> Evidence:
    title, about, what, results = _TABLES[name]
    machine = f"{footer.distinct(rows['gpu_name'])}, torch {footer.distinct(rows['torch_version'])}, n = {len(rows)}"
    lines = [
        [
            *(_text(one[column]) for column in what),
            _shape(one),
            *(_number(one[column], unit) for column, _, unit in results),
        ]
        for _, one in rows.iterrows()
    ]
    heads = [*what, "shape", *(head for _, head, _ in results)]
    return Evidence(name, title, f"{about} {machine}.", heads, len(results), lines)


def _text(value: object) -> str:
    return ABSENT if pd.isna(value) else str(value).replace("_", " ")  # type: ignore[call-overload]


def _shape(one: pd.Series) -> str:
    """Sizes as the keys of cells spell them, and what else of layout, capacity and format the file has."""
    sizes = [f"{AXES[name].prefix}={one[name]:.0f}" for name in _SIZES if pd.notna(one[name])]
    others = [
        f"{AXES[name].prefix}{one[name]:g}" if name == "capacity_factor" else str(one[name])
        for name in ("dtype", "layout", "capacity_factor")
        if name in one and pd.notna(one[name])
    ]
    return " ".join([*sizes, *others])


def _number(value: float, unit: str) -> str:
    if pd.isna(value):
        return ABSENT
    return f"{value:.0%}" if unit == "share" else f"{value:,.{_DECIMALS[unit]}f} {unit.replace('us', 'µs')}"


def judged(claims: Sequence[Held]) -> list[Claim]:
    """What the table of claims shows of those that rows could be held against."""
    return [claim_line(one) for one in sorted(claims, key=lambda one: VERDICTS.index(one.verdict)) if one.cells]


def claim_line(one: Held) -> Claim:
    """What the table of claims shows of one."""
    claim = one.claim
    return Claim(
        who=claim.who,
        statement=claim.statement,
        boundary=claim.boundary,
        source=claim.source,
        hardware=claim.hardware or "not said",
        published=quantity(claim.figure, claim.unit, "%g"),
        ours="–" if math.isnan(one.ours) else quantity(one.ours, claim.unit),
        cells=one.cells or "–",
        verdict=one.verdict,
        why=one.why,
    )


def published(rows: pd.DataFrame) -> list[Table]:
    """A table for each source with rows of cells that `rows` has."""
    found = []
    for path, source in claims.load_published(shipped(paths.OTHERS)).items():
        rows_of_others = published_rows.read(path)
        lines = published_rows.matched(source, rows_of_others, rows)
        if len(lines):
            note = f"{published_rows.sentence(source, rows_of_others, lines)} Boundary of {source.title}: {source.boundary} {source.mode_note} Source: {source.source}, version {source.version}, {source.licence}."
            found.append(
                Table(source.title, _PUBLISHED, [_published_texts(line) for line in lines.to_dict("records")], note)
            )
    return found


def _published_texts(line: dict) -> list[str]:
    status = f"{line['status']}: {line['why']}" if line["why"] else line["status"]
    return [
        line["model"] + (f", one of {ranks} ranks" if (ranks := line["tensor_parallel"]) > 1 else ""),
        str(line["tokens"]),
        line["weights"],
        line["package"],
        line["version"],
        line["kernel"],
        us(line["published_us"]),
        line["implementation"] or ABSENT,
        _time(line["here_us"]),
        ABSENT if pd.isna(line["ratio"]) else f"{line['ratio']:.2f}x",
        status,
        line["ours"] or ABSENT,
        _time(line["ours_us"]),
    ]


def _time(value: float) -> str:
    return ABSENT if pd.isna(value) else us(value)
