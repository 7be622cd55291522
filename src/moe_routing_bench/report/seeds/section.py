"""What the report of a seed's run says of the seed: its source, and tables of its figures with this run's rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.comparison import origins
from moe_routing_bench.report import seeds
from moe_routing_bench.report.parts import Seed, Table
from moe_routing_bench.report.seeds import block_profiles, models, predecessor, products

_PREFIX = "seed-"
_REMARKS = {"boundary": "inside their times: ", "sizes": "", "notes": ""}  # of a source, and what is said before it
# The published figures of each config.
SOURCES = {name: name for name in ("000", "001", "002", "003", "004")} | {
    "003-layers": "003",
    "003-models": "003_models",
}


def section(rows: pd.DataFrame, run: str, profiles: Sequence[Mapping[str, Any]] = ()) -> Seed | None:
    """Number, source in words and tables for the run ``seed-<name>`` of a seed's config; None for any other run."""
    number = run.removeprefix(_PREFIX)
    if not run.startswith(_PREFIX) or number not in SOURCES:
        return None
    source = seeds.sources()[SOURCES[number]]
    return Seed(
        number=number.partition("-")[0],
        about=f"{_sentence(source['what'])} Published on {source['hardware']}: {source['source']}, by {source['who']}.",
        remarks=[_sentence(f"{said}{source[name]}") for name, said in _REMARKS.items() if name in source],
        tables=_tables(number, rows, source, profiles),
    )


def _tables(
    number: str, rows: pd.DataFrame, source: Mapping[str, Any], profiles: Sequence[Mapping[str, Any]]
) -> list[Table]:
    """The tables of one seed."""
    platform = ", ".join(origins.names(rows)) or "not said"
    if number == "004":
        return block_profiles.tables(rows, source, profiles, platform)
    if number == "003-models":
        return models.tables(rows, source, platform)
    if number in ("003", "003-layers"):
        return products.tables(rows, source, platform)
    if number in ("001", "002"):
        return predecessor.tables(number, rows, source, platform)
    return models.layer_tables(rows, source, platform)


def _sentence(text: str) -> str:
    """The text with a capital first and a full stop last."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
