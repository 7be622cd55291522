"""Rows of layers as entries of the table that `auto` chooses from, and what its choices cost.

The regret of a choice is its time over that of the best that was measured, cell by cell.
In the table a cell is its own nearest; left out, all entries of its shape are taken from the table first, which shows how
the choice fares where nothing was measured. Only what has a time in a cell can be judged there, so the choice is
among these; where it would have been another one without that limit, the line says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins
from moe_routing_bench.config.axes import SHARED
from moe_routing_kernels.choices import SIZES, Entry, Shape, check_names, choose, distance
from moe_routing_kernels.choices.chooser import preferred
from moe_routing_kernels.errors import bad
from moe_routing_kernels.implementations import ranked

BENCH = "layer"
_VERSIONS = ("torch_version", "triton_version", "cutlass_dsl_version", "driver")
_WHOLE = ("tokens", "experts", "top_k", "hidden", "intermediate")
# The columns that entries are made of, a sixth of all.
NEEDED = (
    *("bench", "cell", "implementation", "configuration", "plugin", "status", "phase", "model", "ep"),
    *("gpu_name", "median_us", "best_verdict", "suspect", "suspect_reason", "started_at", "git_sha", "git_dirty"),
    *(*SIZES, *SHARED, *_VERSIONS),
)


def entries(rows: pd.DataFrame, run: str) -> list[Entry]:
    """An entry for every layer with a time among rows of a run. Left out are rows of other packages, which are not everywhere, and cells
    with shared experts, which take as long in all implementations and would hide how those differ, and of expert-parallel ranks, whose experts
    are fewer than their sizes say."""
    ok = as_chosen(rows[(rows["bench"] == BENCH) & (rows["status"] == "ok")])
    ok = ok[ok["plugin"].isna()]
    ok = ok[ok[[*SHARED, "ep"]].isna().all(axis=1)]
    return [_entry(cell, run) for _, cell in ok.groupby(["cell", ok["gpu_name"].fillna("")], sort=True)]


def fullest(found: Iterable[Entry]) -> list[Entry]:
    """One entry per cell and card, in the order of cards and cells: of those with the most implementations, that which was measured last.

    A run that asks for some of them alone, as one that compares formats, does not take the others from the table.
    """
    kept: dict[tuple[str, str], Entry] = {}
    for one in sorted(found, key=lambda one: (len(one.times), one.measured)):
        kept[one.card, one.cell] = one
    return [kept[key] for key in sorted(kept)]


def check_cards(found: Iterable[Entry]) -> None:
    """Raise `UserError` for an entry of a card whose architecture is unknown: no choice would ever be made from it."""
    for one in found:
        if one.shape.architecture == one.card:
            raise bad(
                "card", one.card, ", ".join(origins.ARCHITECTURES), "add its architecture to comparison/origins.py"
            )


def chosen(configuration: str) -> str:
    """The implementation that `auto` ran, with which the `configuration` of its row begins; that of the implementation follows."""
    return configuration.partition(";")[0]


def as_chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with those of `auto` as rows of what it chose, unless that was measured in the same cell."""
    auto = rows["implementation"] == AUTO
    if not auto.any():
        return rows
    ran = rows[auto].assign(implementation=rows["configuration"].map(chosen, na_action="ignore"))
    found = pd.concat([rows[~auto], ran[ran["implementation"].isin([one.name for one in ranked("layer")])]])
    return found.drop_duplicates(["cell", "gpu_name", "implementation"])  # the first is its own


def _entry(cell: pd.DataFrame, run: str) -> Entry:
    """The entry of the rows of one cell."""
    first, by_name = cell.iloc[0], cell.set_index("implementation")
    card = None if pd.isna(first["gpu_name"]) else str(first["gpu_name"])
    known = {name: None if pd.isna(first[name]) else first[name] for name in SIZES}
    known |= {name: int(known[name]) for name in _WHOLE}
    if known["capacity_factor"] is not None:
        known["capacity_factor"] = float(known["capacity_factor"])
    doubted = by_name[by_name["suspect"] == True]  # noqa: E712
    return Entry(
        cell=str(first["cell"]),
        phase=str(first["phase"]),
        shape=Shape(**known, architecture=origins.architecture(card)),
        times={name: round(float(us), 3) for name, us in by_name["median_us"].items()},
        model="" if pd.isna(first["model"]) else str(first["model"]),
        verdicts={name: str(said) for name, said in by_name["best_verdict"].dropna().items()},
        suspect={name: str(why) for name, why in doubted["suspect_reason"].items()},
        run=run,
        measured=str(cell["started_at"].min()),
        card=card or "",
        commit=f"{first['git_sha']}{'+' if cell['git_dirty'].eq(True).any() else ''}",
        versions={name.removesuffix("_version"): str(first[name]) for name in _VERSIONS if not pd.isna(first[name])},
    )


MEAN_BAR, WORST_BAR = 0.03, 0.15  # fixed before anything was measured
KINDS = ("in the table", "left out")


@dataclass(frozen=True)
class Choice:
    """What is chosen for a cell, and its regret: its time over the best of the candidates, and of all that was measured, less 1.

    `unlimited` is what would be chosen if implementations without a time in this cell took part.
    """

    name: str
    own: float
    all: float
    unlimited: str | None


@dataclass(frozen=True)
class Line:
    """A cell, the fastest of its candidates and of all, and the choices of `KINDS`."""

    entry: Entry
    best_own: str
    best: str
    choices: tuple[Choice, ...]

    @property
    def suspect(self) -> bool:
        """Whether something speaks against one of the times that are compared."""
        return bool(self.entry.suspect)

    @property
    def unmeasured(self) -> list[str]:
        """What would be chosen if it had a time in this cell, each once, in words."""
        return list(dict.fromkeys(f"{one.unlimited} has no time here" for one in self.choices if one.unlimited))


@dataclass(frozen=True)
class Summary:
    """Mean and worst regret over `cells` cells."""

    what: str
    cells: int
    mean: float
    worst: float

    @property
    def met(self) -> bool:
        """Whether it is within the bar."""
        return self.mean <= MEAN_BAR and self.worst <= WORST_BAR


def peers() -> set[str]:
    """The implementations of layers that need another package."""
    return {one.name for one in BENCHES[BENCH].implementations if one.peer is not None}


def lines(judged: Iterable[Entry], table: Sequence[Entry], with_peers: bool = False) -> list[Line]:
    """A line for every cell in which a candidate has a time; `with_peers` makes candidates of peers, too.

    Raises `UserError` for a table with implementations that the bench does not have.
    """
    check_names(table, (one.name for one in BENCHES[BENCH].implementations))
    others = peers() if with_peers else set()
    return [one for entry in judged if (one := _line(entry, table, others)) is not None]


def runs(cell: pd.DataFrame, table: Sequence[Entry]) -> str | None:
    """The implementation that `auto` runs in one cell, among ours with a time there; None where there is none."""
    found = as_chosen(cell)
    entered = entries(found[found["implementation"].isin(origins.ours(BENCH))], "")
    return next((line.choices[0].name for line in lines(entered, table)), None)


def summaries(found: Sequence[Line]) -> list[Summary]:
    """For both kinds of choices the regret against the candidates and against all that was measured; nothing without lines."""
    made = []
    for i, kind in enumerate(KINDS):
        chosen = [line.choices[i] for line in found]
        for against, values in (
            ("best of the candidates", [one.own for one in chosen]),
            ("best measured", [one.all for one in chosen]),
        ):
            if values:
                made.append(
                    Summary(f"{kind}, against the {against}", len(values), sum(values) / len(values), max(values))
                )
    return made


def always(found: Sequence[Line]) -> list[Summary]:
    """The regret, against the best of the candidates, of one implementation throughout, over the cells in which it has a time."""
    times = [(line.entry.times, line.entry.times[line.best_own]) for line in found]
    made = []
    for name in dict.fromkeys(name for one, _ in times for name in one):
        values = [one[name] / least - 1 for one, least in times if name in one]
        if name not in peers():
            made.append(Summary(name, len(values), sum(values) / len(values), max(values)))
    return sorted(made, key=lambda one: (-one.cells, one.mean))


def _able(entry: Entry, names: Iterable[str], others: set[str]) -> list[str]:
    """The candidates among names, peers last."""
    found = list(names)
    return preferred(found, entry.shape.architecture) + [name for name in found if name in others]


def _line(entry: Entry, table: Sequence[Entry], others: set[str]) -> Line | None:
    able, times = _able(entry, entry.times, others), entry.times
    if not able:
        return None
    best_own, best = (min(names, key=lambda name: times[name]) for names in (able, times))
    # An implementation without a time here may not run: the note names it.
    every = _able(entry, dict.fromkeys(name for one in table for name in one.times), others)
    without = [one for one in table if not one.shape.comparable(entry.shape) or distance(one.shape, entry.shape) > 0]
    chosen = []
    for known in (table, without):
        name, free = (choose(entry.shape, names, known) for names in (able, every))
        assert name is not None
        regrets = (times[name] / times[one] - 1 for one in (best_own, best))
        chosen.append(Choice(name, *regrets, free if free not in times else None))
    return Line(entry, best_own, best, tuple(chosen))
