"""Which implementation of a layer runs a problem: that of the nearest cell of a table that was measured, `choices.json`.

A choice is a pure function of sizes and formats. It reads no tensor, so it never waits for a GPU; the loads of experts, which
only the GPU knows, take no part: what is known of them is their mean, T k / E, and their limit, the capacity. Nothing here imports torch.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from moe_routing_kernels.choices.table import Entry, Shape
from moe_routing_kernels.errors import pick

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
