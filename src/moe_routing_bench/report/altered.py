"""What the report says of trained models whose experts were quantised, or that got another capacity, after the last step."""

import pandas as pd

from moe_routing_bench.figures import training_rows
from moe_routing_bench.report.sections import Altered

WAYS = {
    "bits_by_format": "experts in another format, no capacity",
    "bits_by_capacity": "another capacity factor, experts as trained",
}


def costs(table: pd.DataFrame) -> list[Altered]:
    """The tables of all configs whose rows have such evaluations."""
    found = []
    for column, what in WAYS.items():
        rows = training_rows.finals(table, column) if column in table else table.iloc[:0]
        for _, group in rows.groupby("label", sort=False):
            names = list(dict.fromkeys(name for one in group[column] for name in dict(one)))
            lines = [_line(contestant, runs, column, names) for contestant, runs in training_rows.ordered(group)]
            found.append(Altered(f"{training_rows.describe(group)}: {what}", names, lines))
    return found


def _line(contestant: str, runs: pd.DataFrame, column: str, names: list[str]) -> tuple[str, str, list[str]]:
    """The mean over seeds and half of its interval: of the bits per byte, and of what each alteration adds to those of the same seed."""
    added = [runs[column].map(lambda one, name=name: dict(one).get(name)) - runs["bits_per_byte"] for name in names]
    return contestant, _said(runs["bits_per_byte"], ".4f"), [_said(one, "+z.4f") for one in added]


def _said(values: pd.Series, form: str) -> str:
    if not values.notna().any():
        return "–"
    mean, half = training_rows.interval(values)
    return f"{mean:{form}}" + (f" ± {half:.4f}" if half else "")
