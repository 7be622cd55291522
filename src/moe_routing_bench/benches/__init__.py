"""The benches: one folder an operation, each whose ``__init__`` is a literal table of its implementations.

Nothing here imports torch: Snakemake reads these tables. An implementation is named by a string, ``module`` below this
package, and is imported only by the worker that measures it.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

OPERATIONS = ("gate", "router", "permute", "pack", "combine", "routing", "layer")


@dataclass(frozen=True)
class Implementation:
    """One way to do an operation.

    `module` (relative to the bench's folder) offers ``prepare(cell, inputs, outputs, **options)``, which returns the
    callable that is timed, and optionally ``supports(cell, **options)``, which returns why a cell cannot run, or None.
    `requires` names what must be there: packages, ``cuda`` (an NVIDIA GPU) or ``compiler`` (what torch.compile needs).
    `layout` names the row layout that a composite uses inside, where the cell leaves it open.
    """

    name: str
    module: str
    requires: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = None


@dataclass(frozen=True)
class Bench:
    """An operation under test. `axes` are the grid axes it depends on; `baseline` is what speed-ups are against."""

    name: str
    summary: str
    axes: tuple[str, ...]
    baseline: str
    implementations: tuple[Implementation, ...]

    def __post_init__(self) -> None:
        """Reject a table with two implementations of one name, or without its baseline."""
        names = [i.name for i in self.implementations]
        if len(set(names)) != len(names) or self.baseline not in names:
            raise ValueError(f"bench {self.name}: duplicate implementation or missing baseline in {names}")

    def __getitem__(self, name: str) -> Implementation:
        """The implementation of that name; KeyError when there is none."""
        return {i.name: i for i in self.implementations}[name]

    def definition(self) -> ModuleType:
        """The bench's ``definition`` module: inputs, outputs, reference, check and cost. Imports torch."""
        return importlib.import_module(f"{__name__}.{self.name}.definition")

    def load(self, implementation: str) -> ModuleType:
        """The module of one implementation."""
        return importlib.import_module(self[implementation].module, f"{__name__}.{self.name}")


BENCHES: Mapping[str, Bench] = MappingProxyType(
    {name: importlib.import_module(f"{__name__}.{name}").BENCH for name in OPERATIONS}
)
