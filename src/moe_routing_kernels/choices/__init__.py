"""Which implementation of a layer runs a problem: that of the nearest cell of a table that was measured, `choices.json`.

A choice is a pure function of sizes and formats. It reads no tensor, so it never waits for a GPU; the loads of experts, which
only the GPU knows, take no part: what is known of them is their mean, T k / E, and their limit, the capacity. Nothing here imports torch.

`moe-routing-bench choices --out` writes the file from stored rows. It is data, not code: rows do not become stale when it
changes, because it is made of them; a row of `auto` says what was chosen in its column `configuration`.
"""

import functools
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.formats.weights import bits

FILE = Path(__file__).with_name("choices.json")
VERSION = 1  # of the file's form
_AGAIN = f"write it again: moe-routing-bench choices --out {FILE.name}"


@dataclass(frozen=True)
class Shape:
    """What a choice depends on: sizes, activation, formats by name, the capacity factor (None: no limit) and the
    architecture, ``cpu`` or such as ``sm_90``."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str
    dtype: str
    packed: str
    weights: str
    capacity_factor: float | None
    architecture: str

    @property
    def mean_rows(self) -> float:
        """Rows per expert, in the mean: T k / E, or less where the capacity is."""
        return self.tokens * self.top_k / self.experts * min(1.0, self.capacity_factor or 1.0)

    def comparable(self, other: "Shape") -> bool:
        """Whether the times of one say anything of the other: the same architecture, and formats of equal widths."""
        return (self.architecture, *self._bits) == (other.architecture, *other._bits)

    @property
    def _bits(self) -> tuple[int, ...]:
        return tuple(map(bits, (self.dtype, self.packed, self.weights)))


@dataclass(frozen=True)
class Entry:
    """A measured cell: the median time in µs of every implementation that was ok, and where they come from.

    `verdicts` says how an implementation compares with the fastest other one, where that was judged; `suspect` what speaks
    against the times, by implementation; `commit` ends with ``+`` where the code had local changes.
    """

    cell: str
    phase: str
    shape: Shape
    times: Mapping[str, float]
    model: str = ""
    verdicts: Mapping[str, str] = field(default_factory=dict)
    suspect: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    measured: str = ""
    card: str = ""
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The cell in few words, for people."""
        one = self.shape
        sizes = f"H{one.hidden} I{one.intermediate} E{one.experts} k{one.top_k}"
        formats = " ".join(dict.fromkeys((one.dtype, one.packed, one.weights)))
        limit = "" if one.capacity_factor is None else f", capacity {one.capacity_factor:g}"
        return f"{self.model or sizes}, {self.phase}, T={one.tokens}, {one.activation}, {formats}{limit}"


def text(entries: Iterable[Entry]) -> str:
    """The content of a file of these entries: the same bytes for the same entries."""
    found = [asdict(one) for one in entries]
    return json.dumps({"version": VERSION, "sha256": _digest(found), "entries": found}, indent=1) + "\n"


@functools.cache
def load(path: Path = FILE) -> tuple[Entry, ...]:
    """The entries of a file, read once. Raises `UserError` if the file is damaged, edited, or of another version."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        version, digest, found = held["version"], held["sha256"], held["entries"]
        whole = version != VERSION or digest == _digest(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise bad("table of choices", str(path), "a readable table", f"{_AGAIN} ({type(error).__name__})") from error
    if version != VERSION:
        raise bad(f"version of {path}", version, VERSION, _AGAIN)
    if not whole:
        raise bad("table of choices", str(path), "one whose entries are those that were written", _AGAIN)
    return tuple(_entry(one) for one in found)


def check_names(entries: Iterable[Entry], names: Iterable[str]) -> None:
    """Raise `UserError` where an entry has a time of an implementation that is not among `names`: it is of other code."""
    known = set(names)
    if others := sorted({name for one in entries for name in one.times} - known):
        raise bad("implementations of the table of choices", ", ".join(others), "those of the bench layer", _AGAIN)


def _entry(one: Mapping[str, Any]) -> Entry:
    values: dict[str, Any] = {**one, "shape": Shape(**one["shape"])}
    return Entry(**values)


def _digest(entries: list[Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


SIZES = tuple(one.name for one in fields(Shape) if one.name != "architecture")  # axes of the grid by the same names


PHASES = ("prefill", "decode")
# Octaves, more than sizes can be apart: with another activation, others of the able may have been measured.
OTHER_ACTIVATION = 1000.0
_SAME = 1e-9  # distances that differ by less are equal


def check_phase(phase: str | None) -> None:
    """Raise `UserError` for a phase that is none of `PHASES`; None is no hint."""
    if phase is not None:
        pick("phase", phase, PHASES)


def choose(shape: Shape, able: Collection[str], entries: Iterable[Entry], phase: str | None = None) -> str | None:
    """The implementation among `able`, which are in the order of preference, for a layer of this shape; None where none is.

    It is the fastest of `able` in the nearest of `entries`, the measured cells: those of the same architecture and widths of
    formats, of the phase that is hinted at, in which one of `able` has a time. Several equally near cells are asked together.
    Where there is no such cell, it is the first of `able`. Raises `UserError` for an unknown phase.
    """
    check_phase(phase)
    wanted = set(able)
    near: list[Mapping[str, float]] = []
    least = math.inf
    for entry in entries:
        if not entry.shape.comparable(shape) or phase not in (None, entry.phase):
            continue
        if times := {name: us for name, us in entry.times.items() if name in wanted}:
            apart = distance(shape, entry.shape)
            if apart < least - _SAME:
                near, least = [], apart
            if apart <= least + _SAME:
                near.append(times)
    return fastest(near, list(able)) if near else next(iter(able), None)


def distance(one: Shape, other: Shape) -> float:
    """How far apart two shapes are, in octaves: rows per expert, which decide most, count twice; tokens, sizes and experts once.

    Cells of another activation are farther than all of the same: an implementation that lacks it has no time there.
    """
    sizes = ((one.mean_rows, other.mean_rows),) * 2 + (
        (one.tokens, other.tokens),
        (one.experts, other.experts),
        (one.hidden, other.hidden),
        (one.intermediate, other.intermediate),
    )
    octaves = sum(abs(math.log2(mine / theirs)) for mine, theirs in sizes)
    return octaves + OTHER_ACTIVATION * (one.activation != other.activation)


def fastest(cells: list[Mapping[str, float]], order: list[str]) -> str:
    """The name with the least geometric mean of its time over that of each cell's fastest, among those that most cells have.

    Of names that tie, the first in `order`.
    """
    behind: dict[str, list[float]] = {}
    for times in cells:
        least = min(times.values())
        for name, us in times.items():
            behind.setdefault(name, []).append(math.log(us / least))
    return min(behind, key=lambda name: (-len(behind[name]), sum(behind[name]) / len(behind[name]), order.index(name)))
