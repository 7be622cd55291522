"""Which measured cell is nearest to a question. Nothing is interpolated.

Sizes are apart by octaves (doublings), skews by units, and another routing rule or activation counts as an octave, except where the rule is
most of the work. Formats, phase, ranks, capacity limit and trace must match. Beyond `FAR` octaves altogether a cell does not answer.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_routing_bench.answers.stored import Cell
from moe_routing_bench.config.axes import AXES
from moe_routing_kernels.formats import weights

FAR = 2.0
RULE = 1.0  # octaves that another routing rule or activation counts for
_RULES = ("router", "activation")
_GATING = ("gate", "router")  # benches that are mostly their routing rule
FAMILIES = ("int8", "int4", "int2", "fp8")  # of weight formats; `fp8` are those of 8-bit floats


@dataclass(frozen=True)
class Gap:
    """In what a cell differs from a question: infinitely many octaves where the axis must match."""

    axis: str
    asked: Any
    measured: Any
    octaves: float


def formats_of(asked: str) -> tuple[str, ...]:
    """The weight formats that a name or a family such as int4 stands for, the plainest first; none for an unknown name."""
    if asked in weights.NAMES:
        return (asked,)
    starts = ("e4m3_", "e5m2_") if asked == "fp8" else (f"{asked}_", f"{asked}z_")
    found = [name for name in weights.NAMES if name.startswith(starts)] if asked in FAMILIES else []
    return tuple(
        sorted(found, key=lambda name: ("g128" not in name and "block128" not in name, starts.index(_start(name))))
    )


def _start(name: str) -> str:
    return name.partition("_")[0] + "_"


def rules(bench: str) -> tuple[str, ...]:
    """The axes of names that count as an octave in a bench; all others must match."""
    return () if bench in _GATING else _RULES


def gaps(cell: Cell, question: Mapping[str, Any]) -> list[Gap]:
    """The axes in which a cell differs from a question, which leaves out those that may have any value."""
    found = []
    for name, asked in question.items():
        measured = _held(cell, name)
        if name in cell.axes or measured is not None or (asked is not None and of_ranks(name)):
            octaves = distance(name, asked, measured, cell.bench)
            if octaves:
                found.append(Gap(name, asked, measured, octaves))
    return found


def _held(cell: Cell, name: str) -> Any:
    """What a cell has of an axis. Experts of a bench that does not read the format of weights have that of its activations."""
    plain = name == "weights" and name not in cell.axes and "intermediate" in cell.axes
    return cell.axes.get("dtype" if plain else name)


def of_ranks(name: str) -> bool:
    """Whether an axis must match where a question has it."""
    return AXES[name].sparse or name == "ranks"


def distance(name: str, asked: Any, measured: Any, bench: str) -> float:
    """How far apart two values of an axis are in a bench."""
    if asked == measured or (name == "weights" and measured in formats_of(str(asked))):
        return 0.0
    axis = AXES[name]
    if name in rules(bench):
        return RULE
    if asked is None or measured is None or axis.kind is str or of_ranks(name):
        return math.inf
    if axis.least == 0:
        return abs(measured - asked)
    return abs(math.log2(measured / asked))


def away(octaves: float) -> str:
    """A distance in words."""
    return f"{octaves:.2g} octave{'' if octaves == 1 else 's'} away"


@dataclass(frozen=True)
class Found:
    """A cell with its distance from a question."""

    cell: Cell
    gaps: list[Gap]

    @property
    def octaves(self) -> float:
        """The distance, in octaves."""
        return sum(gap.octaves for gap in self.gaps)


def ranked(
    cells: Iterable[Cell],
    question: Mapping[str, Any],
    model: str | None = None,
    has: Callable[[Cell], bool] = lambda cell: True,
) -> list[Found]:
    """Cells with a time, the nearest first.

    Between cells that are as near, usual values of axes that the question leaves open decide, then the label of the model, the number of
    implementations with a time, and the day. `has` is what a cell must have, too.
    """
    found = [Found(cell, gaps(cell, question)) for cell in cells if cell.timed and has(cell)]

    def key(one: Found) -> tuple[Any, ...]:
        cell = one.cell
        plain = formats_of(str(question.get("weights")))
        exact = plain.index(cell.axes["weights"]) if cell.axes.get("weights") in plain else 0
        labelled = model is None or cell.rows[0]["model"] == model
        absolute = sum(gap.octaves == math.inf for gap in one.gaps)
        near = sum(gap.octaves for gap in one.gaps if gap.octaves < math.inf)
        return (absolute, near, _odd(cell, question), exact, not labelled, -len(cell.timed), _later(cell))

    return sorted(found, key=key)


def _later(cell: Cell) -> tuple[int, ...]:
    return tuple(-int(part) for part in cell.day.split("-") if part)


def _odd(cell: Cell, question: Mapping[str, Any]) -> int:
    """How many axes that a question leaves open have an unusual value in a cell."""
    open_axes = [AXES[name] for name in cell.axes if name not in question and name not in ("model", "phase", "weights")]
    usual = [cell.axes[axis.follows] if axis.follows else axis.default for axis in open_axes]
    return sum(cell.axes[axis.name] != value for axis, value in zip(open_axes, usual, strict=True) if value is not None)
