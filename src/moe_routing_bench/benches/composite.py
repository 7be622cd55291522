"""Operations made of stages: `routing` and `layer` run one implementation per stage, or a fused one for several, in turn.

Operands are named: a stage reads what earlier stages wrote and what the composite is given. Buffers between the stages are
allocated once, at the row limit of the layout, so that nothing waits for the host.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import nvtx
from torch import Tensor

from moe_routing_bench.benches.bench import Bench, Implementation, Stage, find
from moe_routing_bench.benches.checks import Check, both
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.implementations import load, reason
from moe_routing_kernels.target import Target


@dataclass(frozen=True)
class Part:
    """One or, fused, several stages of a composite in a row, and the way they are done: an implementation of the stage's
    bench, or of a fused part a module."""

    name: str
    stages: tuple[Stage, ...]
    way: str

    def reads(self) -> list[str]:
        """The operands that come from outside the part, by the composite's names."""
        inside, found = set[str](), dict[str, None]()
        for stage in self.stages:
            bench = find(stage.bench)
            found |= dict.fromkeys(name for name in _called(stage, bench.reads) if name not in inside)
            inside |= set(_called(stage, bench.writes))
        return list(found)

    def writes(self) -> list[str]:
        """The operands that its stages write, by the composite's names."""
        return [name for stage in self.stages for name in _called(stage, find(stage.bench).writes)]


def parts(bench: Bench, implementation: Implementation) -> list[Part]:
    """The parts that an implementation of a composite is made of, in order; stages that it does not name are in torch."""
    fused = {name.split("+")[0]: name for name in implementation.parts if "+" in name}
    by_name, found, covered = {stage.name: stage for stage in bench.stages}, [], set[str]()
    for stage in bench.stages:
        if stage.name in covered:
            continue
        name = fused.get(stage.name, stage.name)
        stages = tuple(by_name[one] for one in name.split("+"))
        covered |= {one.name for one in stages}
        way = implementation.fused(name) if len(stages) > 1 else implementation.parts.get(name, "torch")
        found.append(Part(name, stages, way))
    return found


def supports(bench: Bench, implementation: Implementation, cell: Cell, target: Target | None = None) -> str | None:
    """The first part's reason why it cannot run on a target (None: on any), or None."""
    if implementation.layout == "padded" and cell.capacity_factor is None:
        return "padded rows need a capacity factor"
    for part in parts(bench, implementation):
        if why := _unsupported(bench, part, cell, implementation, target):
            return f"{part.name}: {why}"
    return None


def precompile(bench: Bench, implementation: Implementation, cell: Cell, target: Target) -> None:
    """Compile the kernels of every part."""
    for part in parts(bench, implementation):
        if len(part.stages) == 1:
            bench.operation(part.stages[0]).precompile(part.way, _cell(cell, part.stages[0], implementation), target)
        elif hasattr(_fused(part), "precompile"):
            _fused(part).precompile(bench.definition().problem(cell), target.arch)


def bind(bench: Bench, implementation: Implementation, cell: Cell, tensors: Mapping[str, Tensor]) -> "Staged":
    """Bind all parts; buffers that `tensors` does not hold are allocated."""
    scope, bound, chosen = _Scope(dict(tensors)), [], parts(bench, implementation)
    buffers: dict[str, Tensor] = {}
    for i, part in enumerate(chosen):
        needed = {*bench.writes, *(name for later in chosen[i + 1 :] for name in later.reads())}
        buffers |= (made := _buffers(part, cell, implementation, scope.tensors, needed))
        scope.tensors |= made
        bound.append((part.name, _Bound(scope, part, _binder(bench, implementation, part, cell))))
    return Staged(tuple(bound), scope, buffers)


def check(bench: Bench, implementation: Implementation, cell: Cell, tensors: Mapping[str, Tensor]) -> Check:
    """Every stage's outputs among `tensors`, given the inputs that it found there; of a fused part, those that it shows."""
    result = Check()
    for part in parts(bench, implementation):
        for stage in part.stages:
            own, inner = bench.operation(stage), _cell(cell, stage, implementation)
            named = dict(tensors) | {n: tensors[c] for n, c in stage.called.items() if c in tensors}
            if not {own.reads[0], own.writes[0]} <= named.keys():
                continue
            way = part.way if len(part.stages) == 1 else own.baseline  # which declares nothing
            expected = own.definition().reference(inner, named)
            result = both(result, own.check(way, inner, named, named, expected))
            if result.error:  # what follows would be given nonsense
                return replace(result, error=f"{stage.name}: {result.error}")
    return result


@dataclass(frozen=True)
class Staged:
    """A call made of named parts, each under an NVTX range; the timer measures the whole and every part."""

    stages: tuple[tuple[str, Callable[[], None]], ...]
    scope: "_Scope"
    buffers: Mapping[str, Tensor]

    def __call__(self) -> dict[str, Tensor]:
        """Run all parts in order; returns all tensors by the composite's names. `buffers` are those allocated for it."""
        for name, stage in self.stages:
            with nvtx.annotate(name):
                stage()
        return dict(self.scope.tensors)

    def configuration(self) -> str:
        """What the tuners of the parts chose, by part; empty where they have none."""
        said = [(name, getattr(getattr(part, "call", None), "configuration", None)) for name, part in self.stages]
        return "; ".join(f"{name}: {one()}" for name, one in said if one)


@dataclass
class _Scope:
    """The composite's tensors by name; `version` counts how often a part has put a tensor of its own in place of one."""

    tensors: dict[str, Tensor]
    version: int = 0


@dataclass
class _Bound:
    """A part bound to the tensors of a scope; bound again where an earlier part has returned other ones since. It is given what it
    was given at first: what it returns beyond that is no operand of its own."""

    scope: _Scope
    part: Part
    make: Callable[[Mapping[str, Tensor]], Callable[[], Any]]
    names: frozenset[str] = field(init=False)
    version: int = field(init=False)
    call: Callable[[], Any] = field(init=False)
    pointers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(self.scope.tensors)
        self._bind()

    def _bind(self) -> None:
        self.version, self.pointers = self.scope.version, self._now()
        self.call = self.make({name: tensor for name, tensor in self.scope.tensors.items() if name in self.names})

    def _now(self) -> list[int]:
        return [self.scope.tensors[name].data_ptr() for name in self.part.reads() if name in self.scope.tensors]

    def __call__(self) -> None:
        if self.version != self.scope.version:
            if self.pointers != self._now():
                self._bind()
            self.version = self.scope.version
        returned = self.call()
        if isinstance(returned, dict):
            self.scope.tensors |= returned
            self.scope.version += 1


def _binder(
    bench: Bench, implementation: Implementation, part: Part, cell: Cell
) -> Callable[[Mapping[str, Tensor]], Callable[[], Any]]:
    """Binds a part to tensors that have the composite's names."""
    if len(part.stages) == 1:
        (stage,) = part.stages
        own, inner = bench.operation(stage), _cell(cell, stage, implementation)
        names = {name: stage.called.get(name, name) for name in (*own.reads, *own.writes)}

        def bind_stage(tensors: Mapping[str, Tensor]) -> Callable[[], Any]:
            return own.bind(part.way, inner, {n: tensors[given] for n, given in names.items() if given in tensors})

        return bind_stage
    problem, operands = bench.definition().problem(cell), (*part.reads(), *part.writes())

    def bind_fused(tensors: Mapping[str, Tensor]) -> Callable[[], Any]:
        given = {name: tensors[name] for name in operands if name in tensors}
        return _fused(part).bind(problem, **given, **implementation.options)

    return bind_fused


def _buffers(
    part: Part, cell: Cell, implementation: Implementation, scope: Mapping[str, Tensor], needed: set[str]
) -> dict[str, Tensor]:
    """New outputs of a part that the scope does not hold; of a fused part, those that a later part reads."""
    found = dict(scope)
    for stage in part.stages:
        own = find(stage.bench)
        given = {
            name: found[call] for name, call in zip(own.reads, _called(stage, own.reads), strict=True) if call in found
        }
        if all(name in found for name in _called(stage, own.writes)):
            continue
        found = own.definition().empty_outputs(_cell(cell, stage, implementation), given) | found
    fused = len(part.stages) > 1
    return {name: one for name, one in found.items() if name not in scope and (not fused or name in needed)}


def _unsupported(
    bench: Bench, part: Part, cell: Cell, implementation: Implementation, target: Target | None
) -> str | None:
    if len(part.stages) == 1:
        return bench.operation(part.stages[0]).supports(part.way, _cell(cell, part.stages[0], implementation), target)
    return reason(_fused(part), bench.definition().problem(cell), target, implementation.options)


def _cell(cell: Cell, stage: Stage, implementation: Implementation) -> Cell:
    """The cell that a stage sees: rows lie in the implementation's layout."""
    return cell.but(bench=stage.bench, **{"layout": implementation.layout} | dict(stage.values))


def _called(stage: Stage, operands: tuple[str, ...]) -> Iterator[str]:
    return (stage.called.get(name, name) for name in operands)


def _fused(part: Part) -> Any:
    return load(part.way)
