"""The bench of layers: one more stage in cells with shared experts, and the implementation `auto`.

The stage of shared experts comes before all others, and `combine` starts from what it writes; of libraries that do a layer as one piece, torch
adds it to the result. All implementations have it from torch, whose GEMMs are what dense GEMMs are held against anyway.
`auto` is another implementation, chosen by sizes and formats from the table of `choices`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_routing_bench.benches.bench import Bench, Stage, find
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels import choices
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.errors import one_line
from moe_routing_kernels.implementations import ranked
from moe_routing_kernels.target import Target

STAGE = Stage("shared", "shared_experts")


class Sharing(Bench):
    """A composite with one more stage where a cell has shared experts; elsewhere it is what its table says."""

    def staged(self, cell: Cell) -> Bench:
        """The bench with the stages of a cell."""
        return replace(self, stages=(STAGE, *self.stages)) if "shared_intermediate" in cell else self

    def supports(self, implementation: str, cell: Cell, target: Target | None = None) -> str | None:
        """Why an implementation cannot run a cell on a target (None: on any), or None."""
        return Bench.supports(self.staged(cell), implementation, cell, target)

    def bind(self, implementation: str, cell: Cell, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """The call of an implementation, bound to the operands among `tensors`."""
        return Bench.bind(self.staged(cell), implementation, cell, tensors)

    def check_stages(self, implementation: str, cell: Cell, tensors: Mapping[str, Any]) -> Any:
        """Compare what the stages hand on. What `combine` is by itself starts from nothing, so its sums are compared by the layer."""
        staged = self.staged(cell)
        if staged is self:
            return Bench.check_stages(self, implementation, cell, tensors)
        others = {name: one for name, one in tensors.items() if name not in self.writes}
        found = Bench.check_stages(staged, implementation, cell, others)
        return found if found.error else self.definition().check_sums(cell, tensors, found)

    def precompile(self, implementation: str, cell: Cell, target: Target) -> None:
        """Compile the kernels of an implementation for a cell and target."""
        Bench.precompile(self.staged(cell), implementation, cell, target)

    def modules(self) -> Iterator[str]:
        """The modules that a measurement imports by name."""
        yield from super().modules()
        yield from find(STAGE.bench).modules()


AUTO = "auto"


class Choosing(Sharing):
    """A bench whose implementation `auto` is, for each cell, one of its others: that one's parts, layout and checks."""

    def chosen(self, cell: Cell, target: Target | None = None) -> str | None:
        """The implementation that `auto` is in a cell, on this machine where no target is given; None where none can run it."""
        target = target or Target.here()
        choices.check_names(choices.load(), (one.name for one in self.implementations))
        shape = choices.Shape(**{name: cell.get(name) for name in choices.SIZES}, architecture=target.generation)
        return chooser.fastest(shape, [name for name, why in self._reasons(cell, target).items() if why is None])

    def supports(self, implementation: str, cell: Cell, target: Target | None = None) -> str | None:
        """Why an implementation cannot run a cell, or None; `auto` on this machine where no target is given, others then on any."""
        if implementation != AUTO:
            return super().supports(implementation, cell, target)
        if self.chosen(cell, target):
            return None
        whys = (f"{name}: {why}" for name, why in self._reasons(cell, target or Target.here()).items())
        return one_line(f"none of its candidates can run it: {'; '.join(whys)}")

    def _reasons(self, cell: Cell, target: Target) -> dict[str, str | None]:
        """Why each candidate cannot run a cell on a target, preferred first; None for those that can."""
        return {
            one.name: chooser.unmet(one.requires, target) or super(Choosing, self).supports(one.name, cell, target)
            for one in ranked(self.name)
        }

    def bind(self, implementation: str, cell: Cell, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        """The call of an implementation; that of `auto` says in its `configuration` what was chosen."""
        if implementation != AUTO:
            return super().bind(implementation, cell, tensors)
        name = self._named(cell, tensors)
        return _Chosen(name, super().bind(name, cell, tensors))

    def check(self, implementation: str, cell: Cell, *compared: Mapping[str, Any]) -> Any:
        """Compare outputs with what is expected, and the roundings that what was chosen declares."""
        if implementation == AUTO:
            implementation = self._named(cell, compared[0])
        return super().check(implementation, cell, *compared)

    def check_stages(self, implementation: str, cell: Cell, tensors: Mapping[str, Any]) -> Any:
        """Compare what the stages hand on."""
        if implementation == AUTO:
            implementation = self._named(cell, tensors)
        return super().check_stages(implementation, cell, tensors)

    def precompile(self, implementation: str, cell: Cell, target: Target) -> None:
        """Compile the kernels of an implementation; of `auto` those of what it is on that target."""
        if implementation == AUTO:
            implementation = self.chosen(cell, target) or self.baseline
        super().precompile(implementation, cell, target)

    def _named(self, cell: Cell, tensors: Mapping[str, Any]) -> str:
        """What `auto` is where the tensors are, which may be a CPU beside a GPU."""
        name = self.chosen(cell, Target.here(tensors["x"].device))
        assert name is not None, "asked for without asking `supports`"
        return name


@dataclass(frozen=True)
class _Chosen:
    """The call of what was chosen, a `composite.Staged`, and its name."""

    chosen: str
    call: Any

    def __call__(self) -> dict[str, Any]:
        """Run it; returns all tensors by the composite's names."""
        return self.call()

    @property
    def stages(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        """Its named parts."""
        return self.call.stages

    @property
    def buffers(self) -> Mapping[str, Any]:
        """What was allocated for it, which is poisoned before it is checked."""
        return self.call.buffers

    def configuration(self) -> str:
        """What was chosen, and what the tuners of its parts chose."""
        return "; ".join(filter(None, (self.chosen, self.call.configuration())))
