"""Seed 003's dispatcher: a prefill and the steps of decoding of a layer, by each of its strategies of choosing between kernels.

Its dispatcher chooses between a kernel for decoding and one for prefill. Here the choice is among all implementations of a layer: what is
fastest in a phase is the kernel for it, and `auto` is the dispatcher.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.comparison import regret
from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.seeds import figures, number, ratio
from moe_routing_bench.report.seeds.models import label, reduced, why
from moe_routing_kernels import choices
from moe_routing_kernels.choices import Entry, choose
from moe_routing_kernels.choices.chooser import preferred

STEPS = 32  # tokens that their test of models generates
PHASES = ("prefill", "decode")
_COLUMNS = (
    *("cell", "gpu_name", "implementation", "phase", "status", "reason", "median_us", "configuration", "anomaly"),
    *("model", "hidden", "intermediate", "experts", "top_k", "dtype", "weights"),
)
_Rows = Mapping[str, Mapping[str, Any]]  # of one cell, by implementation


@dataclass(frozen=True)
class Phase:
    """A cell of a layer in one phase: its rows, and its times as an entry of the table of choices."""

    rows: _Rows
    entry: Entry

    @property
    def fastest(self) -> str:
        """The implementation with the least time."""
        return min(self.entry.times, key=lambda name: self.entry.times[name])

    @property
    def hinted(self) -> str | None:
        """What `auto` would choose, among what has a time, if it were told the phase."""
        able = preferred(self.entry.times, self.entry.shape.architecture)
        return choose(self.entry.shape, able, choices.load(), self.entry.phase)


def tables(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """The table of strategies, of every layer that was measured in both phases; none where there is no such layer."""
    lines = [line for layer in _layers(rows) for line in _layer(*layer)]
    groups = (
        Group("layer", ("model", "activations", "weights")),
        Group(f"published ({source['short']})", ("strategy",)),
        Group(
            f"measured ({platform}), one layer",
            (
                "prefill by",
                "prefill µs",
                "decode by",
                "decode µs",
                f"prefill + {STEPS} x decode, ms",
                "over manual_branch",
                "in doubt",
            ),
        ),
    )
    note = (
        "No times of theirs are published. Prefill is of 128 tokens, decoding of one; `always_` takes what is fastest in one phase for both, `manual_branch` the fastest "
        "of each, `unified_auto` is `auto`, which chooses by sizes, and `unified_hinted` what it chooses when it is told the phase. No choice waits for the GPU. "
        f"In doubt: times that the rule for rows of this benchmark doubts.{reduced(rows[rows['bench'] == 'layer'], 'One layer')}"
    )
    return [Table("A dispatcher between kernels", groups, lines, note)] if lines else []


def _layers(rows: pd.DataFrame) -> Iterator[tuple[list[str], dict[str, Phase]]]:
    """Model, activations and weights of each layer that has rows with a time in both phases, and these."""
    own = rows[rows["bench"] == "layer"]
    entries = {one.cell: one for one in regret.entries(own, "")} if len(own) else {}
    known = own.loc[own["cell"].isin(entries), list(_COLUMNS)]
    for (dtype, weights, said), layer in (
        known.groupby(["dtype", "weights", known.apply(label, axis=1)], sort=False) if len(known) else ()
    ):
        found = {}
        for (phase, cell), one in layer.groupby(["phase", "cell"]):
            named = pd.concat([regret.as_chosen(one[one["status"] == "ok"]), one[one["implementation"] == AUTO]])
            found[phase] = Phase(named.set_index("implementation", drop=False).to_dict("index"), entries[cell])
        if found.keys() == set(PHASES):
            yield [said, dtype, weights], found


def _layer(said: list[str], phases: Mapping[str, Phase]) -> Iterator[list[str]]:
    """A line for each strategy."""
    known = figures("003_dispatch").to_dict("records")
    totals = {one["strategy"]: _total(phases, one) for one in known}
    for one in known:
        chosen = [_row(phases, phase, one[phase]) for phase in PHASES]
        cells = [text for row in chosen for text in (_name(row), number(_us(row)))]
        doubts = [phase for phase, row in zip(PHASES, chosen, strict=True) if row and isinstance(row["anomaly"], str)]
        total = totals[one["strategy"]]
        yield [
            *said,
            one["strategy"],
            *cells,
            number(None if total is None else total / 1000),
            number(ratio(total, totals["manual_branch"]), "x"),
            ", ".join(doubts) or ABSENT,
        ]


def _row(phases: Mapping[str, Phase], phase: str, way: str) -> Mapping[str, Any] | None:
    """The row of a phase that a strategy takes: of `auto`, of what it chooses with a hint, or of what is fastest in the phase `way`."""
    here = phases[phase]
    name = {AUTO: AUTO, "hinted": here.hinted}.get(way) or phases[way].fastest
    return here.rows.get(name)


def _us(row: Mapping[str, Any] | None) -> float | None:
    return row["median_us"] if row and row["status"] == "ok" else None


def _name(row: Mapping[str, Any] | None) -> str:
    """What ran: the implementation, of `auto` what it chose; or why nothing did."""
    if row is None:
        return ABSENT
    if row["status"] != "ok":
        return f"{row['implementation']}, {why([row])}"
    said = row["configuration"]
    return f"{AUTO}: {regret.chosen(said)}" if row["implementation"] == AUTO and said else row["implementation"]


def _total(phases: Mapping[str, Phase], strategy: Mapping[str, str]) -> float | None:
    """A prefill and `STEPS` steps of decoding in µs; None where one of them has no time."""
    prefill, decode = (_us(_row(phases, phase, strategy[phase])) for phase in PHASES)
    return None if prefill is None or decode is None else prefill + STEPS * decode
