"""The implementation `auto` of a layer: another one, chosen by sizes and formats from the table of `choices`."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_routing_bench.benches.layer.sharing import Sharing
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.choices import CANDIDATES, candidates, choose, table

AUTO = "auto"


class Choosing(Sharing):
    """A bench whose implementation `auto` is, for each cell, one of its others: that one's parts, layout and checks."""

    def chosen(self, cell: Cell, architecture: str | None = None) -> str | None:
        """The implementation that `auto` is in a cell, on this machine where no architecture is given; None where none can run it."""
        here = architecture or _architecture()
        able = [
            name for name in CANDIDATES if self._there(name, here) and not super(Choosing, self).supports(name, cell)
        ]
        entries = table.load()
        table.check_names(entries, (one.name for one in self.implementations))
        shape = table.Shape(**{name: cell.get(name) for name in table.SIZES}, architecture=here)
        return choose(shape, candidates(able, here), entries)

    def supports(self, implementation: str, cell: Cell) -> str | None:
        """Why an implementation cannot run a cell, or None."""
        if implementation != AUTO:
            return super().supports(implementation, cell)
        return None if self.chosen(cell) else f"none of {', '.join(CANDIDATES)} can run it here"

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

    def precompile(self, implementation: str, cell: Cell, arch: str) -> None:
        """Compile the kernels of an implementation; of `auto` those of what it is on that architecture."""
        if implementation == AUTO:
            implementation = self.chosen(cell, arch.removesuffix("a")) or self.baseline
        super().precompile(implementation, cell, arch)

    def _named(self, cell: Cell, tensors: Mapping[str, Any]) -> str:
        """What `auto` is where the tensors are, which may be a CPU beside a GPU."""
        name = self.chosen(cell, "cpu" if tensors["x"].device.type == "cpu" else None)
        assert name is not None, "asked for without asking `supports`"
        return name

    def _there(self, name: str, architecture: str) -> bool:
        """Whether what an implementation needs is there: a GPU, and the packages that it is made with."""
        needs = self[name].requires
        packages = (one for one in needs if one != "cuda")
        return ("cuda" not in needs or architecture != "cpu") and all(map(importlib.util.find_spec, packages))


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


def _architecture() -> str:
    """That of this machine's GPU, or ``cpu``."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
