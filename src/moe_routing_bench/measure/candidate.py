"""An implementation on its way through a cell, and what its blocks say: the summary that is published and that decides when to stop."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_routing_bench import intervals, statistics
from moe_routing_bench.benches.checks import Check

LEAST_TURNS = 3  # that every implementation takes


class Failure(Exception):
    """An implementation is out of this cell; carries its status and reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Ruined(Failure):
    """An implementation is out, and has changed what cannot be put back: the worker must end."""


class Tainted(Exception):
    """Inputs changed, but not since this implementation ran, so the culprit is unknown."""


@dataclass(eq=False)
class Candidate:
    """An implementation on its way through the cell. `twin` is the same one once more, bound and timed by itself."""

    name: str
    calls: list[Callable[[], object]]
    check: Check = field(default_factory=Check)
    timer: Any = None
    samples_per_block: int = 1
    blocks: list[list[float]] = field(default_factory=list)
    clocks: list[int | None] = field(default_factory=list)
    powers: list[float | None] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)  # of each block, from its begin to its end, µs
    turns: list[int] = field(default_factory=list)  # of each block, the number of its long turn; empty in short turns
    energies: list[float] = field(
        default_factory=list
    )  # of a call, in each long turn, mJ; none where the board does not count
    digests: dict[int, int] = field(default_factory=dict)  # of outputs that were right, by the draw's identity
    laid: Any = None  # what `leftovers` looks for after the turn
    turns_laid: int = 0
    whole_turn: int = field(default_factory=lambda: secrets.randbelow(LEAST_TURNS))
    fields: dict[str, object] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)  # what makes its times suspect
    twin: "Candidate | None" = None

    @property
    def identity(self) -> str:
        """Its name, or that of the implementation which it has chosen to be in this cell."""
        return getattr(self.calls[0], "chosen", self.name) if self.calls else self.name

    @property
    def entries(self) -> "tuple[Candidate, ...]":
        """What takes part in the rounds: itself, and its twin if it has one."""
        return (self, self.twin) if self.twin else (self,)

    def forget(self) -> None:
        """Drop what was sampled, to sample again."""
        for entry in self.entries:
            entry.blocks, entry.clocks, entry.powers, entry.slow, entry.energies, entry.spans = [], [], [], [], [], []
            entry.turns, entry.turns_laid, entry.whole_turn = [], 0, secrets.randbelow(LEAST_TURNS)


def kept(entry: Candidate) -> list[bool]:
    """Which blocks count: not those with a slowdown bit, unless that would leave none.

    A low clock alone is no reason: under the power limit it is the state that such work is in.
    """
    good = [not slow for slow in entry.slow]
    return good if any(good) else [True] * len(good)


def summary(entry: Candidate) -> dict[str, object]:
    """Row fields of the blocks that count: times in microseconds, with the interval of the median."""
    counts = kept(entry)
    good = [block for block, keep in zip(entry.blocks, counts, strict=True) if keep]
    turns = [turn for turn, keep in zip(entry.turns, counts, strict=True) if keep] if entry.turns else None
    return statistics.summarize(good, turns)


def half_width(entry: Candidate) -> float:
    """Half the width of the published interval over the published median; infinite where there is no interval."""
    fields = summary(entry)
    return intervals.half_width((fields["ci_low_us"], fields["ci_high_us"]), fields["median_us"])  # type: ignore[arg-type]
