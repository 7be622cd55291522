"""What a bench says of its operation, and how its implementations are bound to the tensors of a cell.

Nothing here imports torch: Snakemake reads the tables. An implementation is named by a string and is imported only by the
worker that measures it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from moe_routing_bench import packages
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.routers import ROUTERS

_PACKAGE = "moe_routing_bench"
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
class Implementation:
    """One way to do an operation.

    `module` is a module of ``moe_routing_kernels.<bench>`` that offers ``bind`` (the contract is in `moe_routing_kernels`), or, as
    ``.definition``, one of the bench's own folder: a baseline of a few lines may stand there. `options` are keyword arguments of its
    functions. `requires` names what must be there: ``cuda`` (an NVIDIA GPU), ``triton``, ``cutlass`` or
    ``compiler`` (what torch.compile needs); `peer` is another package, whose adapters are in ``moe_routing_bench.peers.<bench>``.

    Of a composite bench, `parts` names the implementation of each stage (``torch`` where it names none); a key such as
    ``"pack+experts"`` names a fused module, ``<operation>.<module>`` of the same room, that does several stages at once. `layout` is the
    row layout that a composite uses inside. `declares` are keywords of the bench's ``check``: in what an implementation is less exact
    than others, by design.
    """

    name: str
    module: str = ""
    requires: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    peer: Peer | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    layout: str | None = None
    declares: tuple[str, ...] = ()

    def place(self, bench: str) -> str:
        """The absolute name of its module, as one of this bench."""
        own = self.module.startswith(".")
        return f"{_PACKAGE}.benches.{bench}{self.module}" if own else f"{self._room}.{bench}.{self.module}"

    def fused(self, part: str) -> str:
        """The absolute name of the module that does a part of several stages."""
        return f"{self._room}.{self.parts[part]}"

    @property
    def _room(self) -> str:
        """The package of its kernels, or of adapters to those of another package."""
        return f"{_PACKAGE}.peers" if self.peer else _KERNELS

    def modules(self, bench: str) -> Iterator[str]:
        """Its modules of our packages: where the closure of what it imports starts."""
        if self.module:
            yield self.place(bench)
        yield from (self.fused(part) for part in self.parts if "+" in part)


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
    packed rows are written or read (pack and combine once each). `others` are implementations from outside this package, by bench.
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

    def load(self, implementation: str) -> ModuleType:
        """The module of one implementation; of a composite, what runs its parts."""
        return importlib.import_module(_COMPOSITE if self.stages else self[implementation].place(self.name))

    def operation(self, stage: Stage) -> "Bench":
        """The bench of a stage, with the implementations from outside that this one has."""
        return find(stage.bench, self.others)

    def supports(self, implementation: str, cell: Cell) -> str | None:
        """Why an implementation cannot run a cell, or None."""
        module, one = self.load(implementation), self[implementation]
        if self.stages:
            return module.supports(self, one, cell)
        problem = self.definition().problem(cell)
        return module.unsupported(problem, **one.options) if hasattr(module, "unsupported") else None

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

    def precompile(self, implementation: str, cell: Cell, arch: str) -> None:
        """Compile the CuTe DSL kernels of an implementation, if it has any, for a cell and architecture; needs no GPU."""
        module, one = self.load(implementation), self[implementation]
        if self.stages:
            module.precompile(self, one, cell, arch)
        elif hasattr(module, "precompile") and not self.supports(implementation, cell):
            module.precompile(self.definition().problem(cell), arch, **one.options)

    def modules(self) -> Iterator[str]:
        """The modules that a measurement of this bench imports by name: where the closure of imports starts."""
        yield f"{_PACKAGE}.benches.{self.name}.definition"
        if self.stages:
            yield _COMPOSITE
        for one in self.implementations:
            yield from one.modules(self.name)
        if "router" in self.axes:
            yield from sorted({f"{_KERNELS}.routers.{router.module}" for router in ROUTERS.values()})
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
