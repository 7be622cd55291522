"""The section of a report on rows that other projects published with the rows of this run. Pure functions; no torch."""

import pandas as pd

from moe_routing_bench.comparison import published_rows
from moe_routing_bench.config import claims
from moe_routing_bench.quantities import us
from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.store import paths
from moe_routing_bench.store.project_files import shipped

_GROUPS = (
    Group("cell", ("model", "T", "weights")),
    Group("published", ("package", "version", "kernel", "time")),
    Group("the same kernel here", ("implementation", "time, warm", "over published", "status")),
    Group("ours", ("auto runs", "time, warm")),
)


def tables(rows: pd.DataFrame) -> list[Table]:
    """A table for each source with rows of cells that `rows` has."""
    found = []
    for path, source in claims.load_published(shipped(paths.OTHERS)).items():
        rows_of_others = published_rows.read(path)
        lines = published_rows.matched(source, rows_of_others, rows)
        if len(lines):
            note = f"{published_rows.sentence(source, rows_of_others, lines)} Boundary of {source.title}: {source.boundary} {source.mode_note} Source: {source.source}, version {source.version}, {source.licence}."
            found.append(Table(source.title, _GROUPS, [_texts(line) for line in lines.to_dict("records")], note))
    return found


def _texts(line: dict) -> list[str]:
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
