"""What a bench says of its operation, and how its implementations are bound to the tensors of a cell.

Nothing here imports torch: Snakemake reads the tables. An implementation is named by a string and is imported only by the
worker that measures it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import resolve_name
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from moe_routing_bench import packages
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels import implementations
from moe_routing_kernels.errors import NoForm
from moe_routing_kernels.implementations import listed, load, module_of, reason
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.target import Target

_PACKAGE = "moe_routing_bench"
_PEERS = f"{_PACKAGE}.peers"
_KERNELS = "moe_routing_kernels"
_HARNESS = f"{_PACKAGE}.measure.supervisor"
_COMPOSITE = f"{_PACKAGE}.benches.composite"


@dataclass(frozen=True)
class Peer:
    """An optional package that an implementation needs: the module that it imports, its distribution, and how to get it."""

    module: str
    distribution: str
    install: str


@dataclass(frozen=True)
class Implementation(implementations.Implementation):
    """One way to do an operation: a line of our own tables (`ours`), or one of this bench alone.

    `peer` is another package, whose adapters are in ``moe_routing_bench.peers``. A module such as ``.definition`` is in the
    bench's own folder: a baseline of a few lines may stand there. One such as ``..messages`` is next to it, for several benches.
    """

    peer: Peer | None = None

    def place(self, bench: str) -> str:
        """The absolute name of its module, as one of this bench."""
        if self.module.startswith("."):
            return resolve_name(self.module, f"{_PACKAGE}.benches.{bench}")
        return f"{_PEERS}.{self.module}" if self.peer else super().place(bench)

    def fused(self, part: str) -> str:
        """The absolute name of the module that does a part of several stages."""
        return f"{_PEERS}.{self.parts[part]}" if self.peer else super().fused(part)


def ours(operation: str) -> tuple[Implementation, ...]:
    """The implementations of an operation that this repository has, from the table of its package; of experts those of packed rows."""
    names = [one.name for one in fields(implementations.Implementation)]
    lines = (one for one in listed(operation) if operation != "experts" or not (one.gathers or one.trains))
    return tuple(Implementation(**{name: getattr(one, name) for name in names}) for one in lines)


@dataclass(frozen=True)
class Stage:
    """A step of a composite: the bench whose operation it is, values that replace those of the composite's cell, and the
    composite's names of operands that are called otherwise there."""

    name: str
    bench: str
    values: Mapping[str, str] = field(default_factory=dict)
    called: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """An operation under test.

    `axes` are the axes of the grid that it reads; `baseline` is what speed-ups are against. `reads` and `writes` name the operands
    (a read one may be absent where it is optional). `shared` names inputs that all input sets of a cell have in common. `stages` are the
    steps of a composite. `streams`: its ceiling is also a stream with its own mix of reads and writes. `row_passes` counts how often all
    packed rows are written or read (pack and combine once each). `kept` are outputs that a call on several ranks may return in memory of
    its own: they are fetched from there after a turn. `others` are implementations from outside this package, by bench.
    """

    name: str
    summary: str
    axes: tuple[str, ...]
    baseline: str
    implementations: tuple[Implementation, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    streams: bool = False
    row_passes: int = 0
    kept: tuple[str, ...] = ()
    others: Mapping[str, tuple[Implementation, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject a table with two implementations of one name, without its baseline, or with parts that are no stages."""
        names = [one.name for one in self.implementations]
        if len(set(names)) != len(names) or self.baseline not in names:
            raise ValueError(f"bench {self.name}: duplicate implementation or missing baseline in {names}")
        stages = [stage.name for stage in self.stages]
        for one in self.implementations:
            covered = [name for part in one.parts for name in part.split("+")]
            if any(name not in stages for name in covered) or len(set(covered)) != len(covered):
                raise ValueError(f"bench {self.name}: {one.name} has parts {list(one.parts)}, the stages are {stages}")

    def __getitem__(self, name: str) -> Implementation:
        """The implementation of that name; KeyError when there is none."""
        return {one.name: one for one in self.implementations}[name]

    def definition(self) -> ModuleType:
        """The bench's ``definition`` module: problem, inputs, outputs, reference, check and cost. Imports torch."""
        return importlib.import_module(f"{_PACKAGE}.benches.{self.name}.definition")

    def load(self, implementation: str) -> Any:
        """The functions of one implementation; of a composite, what runs its parts."""
        return load(_COMPOSITE if self.stages else self[implementation].place(self.name))

    def operation(self, stage: Stage) -> "Bench":
        """The bench of a stage, with the implementations from outside that this one has."""
        return find(stage.bench, self.others)

    def supports(self, implementation: str, cell: Cell, target: Target | None = None) -> str | None:
        """Why an implementation cannot run a cell on a target (None: on any), or None."""
        module, one = self.load(implementation), self[implementation]
        if self.stages:
            return module.supports(self, one, cell, target)
        return reason(module, self.definition().problem(cell), target, one.options)

    def bind(self, implementation: str, cell: Cell, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """The call of an implementation, bound to the operands among `tensors`."""
        module, one = self.load(implementation), self[implementation]
        if self.stages:
            return module.bind(self, one, cell, tensors)
        operands = {name: tensors[name] for name in (*self.reads, *self.writes) if name in tensors}
        return module.bind(self.definition().problem(cell), **operands, **one.options)

    def check(self, implementation: str, cell: Cell, *compared: Mapping[str, Any]) -> Any:
        """Compare inputs, outputs and expected outputs of an implementation: a `checks.Check`."""
        return self.definition().check(cell, *compared, **dict.fromkeys(self[implementation].declares, True))

    def check_stages(self, implementation: str, cell: Cell, tensors: Mapping[str, Any]) -> Any:
        """Compare what the stages of a composite hand on, among the tensors that its call returned: a `checks.Check`."""
        return self.load(implementation).check(self, self[implementation], cell, tensors)

    def precompile(self, implementation: str, cell: Cell, target: Target) -> None:
        """Compile the CuTe DSL kernels of an implementation, if it has any, for a cell and target; needs no GPU.

        Raises `NoForm` where it can run the cell, but not on this target.
        """
        if Bench.supports(self, implementation, cell):
            return
        if why := Bench.supports(self, implementation, cell, target):
            raise NoForm(f"{self.name} {implementation}: {why}")
        module, one = self.load(implementation), self[implementation]
        if self.stages:
            module.precompile(self, one, cell, target)
        elif hasattr(module, "precompile"):
            module.precompile(self.definition().problem(cell), target.arch, **one.options)

    def modules(self) -> Iterator[str]:
        """The modules that a measurement of this bench imports by name: where the closure of imports starts."""
        yield f"{_PACKAGE}.benches.{self.name}.definition"
        if self.stages:
            yield _COMPOSITE
        for one in self.implementations:
            yield from one.modules(self.name)
        if "router" in self.axes:
            yield from sorted({module_of(f"{_KERNELS}.routers.{router.module}") for router in ROUTERS.values()})
        for stage in self.stages:
            yield from find(stage.bench).modules()

    def code_files(self) -> list[Path]:
        """Every source file whose edit makes measurements of this bench stale."""
        return packages.closure((_HARNESS, *self.modules()))

    def code_fingerprint(self) -> str:
        """Their fingerprint: the column of this name in rows that are measured now."""
        return packages.fingerprint(self.code_files())


def find(name: str, others: Mapping[str, tuple[Implementation, ...]] = MappingProxyType({})) -> Bench:
    """The bench of that name, without the list of all: a measurement does not depend on other benches.

    `others` are implementations from outside this package, by bench; they come after its own.
    """
    bench: Bench = importlib.import_module(f"{_PACKAGE}.benches.{name}").BENCH
    if not others:
        return bench
    return replace(bench, implementations=(*bench.implementations, *others.get(name, ())), others=others)
