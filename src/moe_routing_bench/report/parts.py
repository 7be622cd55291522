"""What the sections of a report hold: lines of tables, in plain texts. A part of the shape that `document.VERSION` is of."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ABSENT = "–"
_SHORT = 32  # letters that stay on a line
_NUMBER = re.compile(rf"{ABSENT}|-?\d[\d.,e+-]*( ?(x|%|µs))?")


@dataclass(frozen=True)
class Group:
    """Neighbouring columns under one heading."""

    title: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """`rows` are texts, as many in each as the groups have columns together. `note` says how to read it."""

    title: str
    groups: Sequence[Group]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Heading and class of each column: ``n`` for numbers, ``wide`` for texts that wrap, nothing for short ones."""
        headings = [name for group in self.groups for name in group.columns]
        values = zip(*self.rows, strict=True) if self.rows else [()] * len(headings)
        return [(name, _kind(column)) for name, column in zip(headings, values, strict=True)]


def _kind(column: Sequence[str]) -> str:
    if all(map(_NUMBER.fullmatch, column)):
        return "n"
    return "wide" if any(len(text) > _SHORT for text in column) else ""


@dataclass(frozen=True)
class BarLine:
    """A bar that was fixed before kernels were written, held against the rows of one run, card and version of the code."""

    what: str
    bar: str
    stretch: str
    measured: str
    cells: str
    left_out: str
    verdict: str
    where: str = ""


@dataclass(frozen=True)
class Claim:
    """A published figure, and what the rows show of it."""

    who: str
    statement: str
    boundary: str
    source: str
    hardware: str
    published: str
    ours: str
    cells: int | str
    verdict: str
    why: str


@dataclass(frozen=True)
class Choice:
    """What `auto` chooses in one cell. `choices`: name, regret among own candidates, regret among all, per kind of choice."""

    cell: str
    key: str
    best_own: str
    best: str
    choices: list[tuple[str, str, str]]
    auto: str
    notes: str


@dataclass(frozen=True)
class Regret:
    """Mean and worst regret of a kind of choice over cells, and whether both are within the bar."""

    what: str
    cells: str
    mean: str
    worst: str
    met: bool


@dataclass(frozen=True)
class Choices:
    """What `auto` chooses by the shipped table of so many `cells`."""

    cells: int
    lines: list[Choice]
    summaries: list[Regret]
    always: list[Regret]
    bar: str


@dataclass(frozen=True)
class Seed:
    """A replayed seed document."""

    number: str
    about: str
    remarks: list[str]
    tables: list[Table]


@dataclass(frozen=True)
class Evidence:
    """A table of what is stored with the rows: the last `results` of its columns hold numbers; `about` says on what it was taken."""

    name: str
    title: str
    about: str
    heads: list[str]
    results: int
    lines: list[list[str]]


@dataclass(frozen=True)
class Quantised:
    """The fastest row of ours of a shape with weights of one format.

    `moved` is what has to be moved, `copy` and `ceiling` the shares of the copy bandwidth and of the ceiling that binds. `error` is the
    relative L2 error over its limit. `speedup` is over the baseline of the cell, `plain` over the fastest of ours with unquantised
    weights, `peer` over the fastest package of others. `frontier`: no other format is at least as fast and loses less.
    """

    shape: str
    tokens: int
    form: str
    implementation: str
    time: str
    moved: str
    copy: str
    ceiling: str
    error: str
    speedup: str
    plain: str
    peer: str
    loses: str
    frontier: str


@dataclass(frozen=True)
class ByFormat:
    """Experts and layers with quantised weights."""

    lines: list[Quantised]
    bars: list[BarLine]


@dataclass(frozen=True)
class Exactness:
    """A format of weights with one of activations: per kind of weights the SNR of weights and of results in dB and the cosine of results;
    the largest error of a weight over its bound; how many kernels are right, the largest share of the limit, and what is wrong with others."""

    weights: str
    activations: str
    costs: list[tuple[str, str, str]]
    bound: str
    right: str
    most: str
    wrong: list[str]


@dataclass(frozen=True)
class Accuracy:
    """The accuracy matrix: sizes of its experts, kinds of weights that were drawn."""

    sizes: str
    drawn: list[str]
    lines: list[Exactness]


@dataclass(frozen=True)
class Contest:
    """Training runs that may be ranked: of one entry of the config, and either all causal or all not."""

    title: str
    causal: bool
    power: str
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Altered:
    """Contestant, its bits per byte, and what each alteration in `names` adds to them."""

    title: str
    names: list[str]
    lines: list[tuple[str, str, list[str]]]


@dataclass(frozen=True)
class Quality:
    """The training runs. `columns`: field, heading and meaning of what a contest's rows have as `values`."""

    several: bool
    machine: str
    timed: str
    columns: list[tuple[str, str, str]]
    by_domain: bool
    withdrawn: str
    margin: float
    cautions: list[tuple[str, str]]
    contests: list[Contest]
    adaptations: list[dict[str, Any]]
    altered: list[Altered]


@dataclass(frozen=True)
class Method:
    """How implementations took turns, and how many rows of a GPU found the L2 cache cold, in parts of sentences."""

    turns: str
    caches: str = ""


@dataclass(frozen=True)
class Failed:
    """Rows without a time that agree in status, bench, implementation and reason; `cells` are their cells and ids."""

    status: str
    bench: str
    implementation: str
    reason: str
    cells: list[tuple[str, str]]
