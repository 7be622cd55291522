"""Seed 003's decoding: one token through the smallest of its shapes, by format, in the columns of its table of prefill."""

from typing import Any

import pandas as pd

from moe_routing_bench.report.seeds import kernels
from moe_routing_bench.report.seeds.published import figures
from moe_routing_bench.report.seeds.quantised import FORMATS
from moe_routing_bench.report.seeds.tables import Group, Table


def tables(rows: pd.DataFrame, platform: str) -> list[Table]:
    """The table, of rows of `experts`; none where nothing decodes."""
    own = rows[rows["phase"] == "decode"]
    lines = [line for one in figures("003_accuracy").to_dict("records") if (line := _line(one, own))]
    note = (
        "One token, so one row for each of its experts. Their pull request tests a kernel for this in all of these formats, and publishes no times of it. Columns "
        "are those of the table of shapes."
    )
    groups = (
        Group("", ("H", "I", "E", "k", "weights", "activations")),
        Group(f"measured ({platform}), both products of an expert", kernels.HEADINGS),
    )
    return [Table("Decoding by format of weights and activations", groups, lines, note)] if lines else []


def _line(known: dict[str, Any], rows: pd.DataFrame) -> list[str]:
    """One format of weights beside one of activations; empty where it was not measured."""
    beside = rows[rows["dtype"] == known["activations"]]
    own = beside[beside["weights"] == FORMATS.get(known["format"], known["format"])]
    if own.empty:
        return []
    plain = beside[(beside["weights"] == beside["dtype"]) & (beside["implementation"] == kernels.LOOP)]
    found = {row["implementation"]: row for row in pd.concat([plain, own]).to_dict("records")}
    first = own.iloc[0]
    sizes = (str(first[name]) for name in ("hidden", "intermediate", "experts", "top_k"))
    return [*sizes, known["format"], known["activations"], *kernels.texts(found)]
