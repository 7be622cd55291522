"""Shared experts of a layer: one more stage, in the cells that have them.

It comes before all others, and `combine` starts from what it writes; of libraries that do a layer as one piece, torch adds it to the
result. All implementations have it from torch, whose library's products are what dense products are held against anyway.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from moe_routing_bench.benches.bench import Bench, Stage, find
from moe_routing_bench.grid.cell import Cell
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
