"""The implementation `auto` of a layer: another one, chosen by sizes and formats from the table of `choices`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_routing_bench.benches.layer.sharing import Sharing
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.choices import chooser, table
from moe_routing_kernels.errors import one_line
from moe_routing_kernels.implementations import ranked
from moe_routing_kernels.target import Target

AUTO = "auto"


class Choosing(Sharing):
    """A bench whose implementation `auto` is, for each cell, one of its others: that one's parts, layout and checks."""

    def chosen(self, cell: Cell, target: Target | None = None) -> str | None:
        """The implementation that `auto` is in a cell, on this machine where no target is given; None where none can run it."""
        target = target or Target.here()
        table.check_names(table.load(), (one.name for one in self.implementations))
        shape = table.Shape(**{name: cell.get(name) for name in table.SIZES}, architecture=target.generation)
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
