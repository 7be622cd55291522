"""How token rows reach the experts on a GPU: packed, or gathered by the first product, and which kernels do it.

The choice is that of `choices`; its names are implementations of the bench `layer`, of which the experts' part counts here: the
routing around them is done by the kernels that `backends` chooses in any case.
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

from moe_routing_kernels.choices import candidates, choose, table
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import backends

# By the name of an implementation: the backend of its kernels (of its routing, where the products are torch's), and their module.
_MODULES = {
    "cute": ("cute", "cute_experts"),
    "cute_gather": ("cute", "cute_gather"),
    "triton_gather": ("triton", "triton_gather"),
    "triton": ("triton", "triton_experts"),
    "cute_grouped_mm": ("cute", "torch_grouped_mm"),
}
# Those that `prepare` compiles. Where one of them can run, no other is chosen: Triton compiles when it first sees a size, and was ahead
# by 0.3 % in one of the measured layers, and behind in the others.
AHEAD = ("cute", "cute_gather")


@dataclass(frozen=True)
class Way:
    """The module of ``kernels.experts`` that runs, and whether it gathers rows: then it takes a `Layer`, else an `Experts`."""

    name: str
    module: ModuleType

    @property
    def gathers(self) -> bool:
        """Whether rows are never packed."""
        return self.name.endswith("_gather")


@functools.lru_cache(backends.MOST_PROBLEMS)
def way(problem: Layer, capability: tuple[int, int], phase: str | None = None) -> Way | None:
    """The way for a layer of rows that are packed in the format of the activations; None where none of these kernels takes it.

    Remembered: a first call asks each kernel, later ones cost a look-up. Raises `UserError` for a table that cannot be read.
    """
    ways = {name: found for name in _MODULES if (found := _able(name, problem, capability)) is not None}
    if not ways.keys().isdisjoint(AHEAD):
        ways = {name: found for name, found in ways.items() if name in AHEAD}
    layout, architecture = problem.layout, "sm_{}{}".format(*capability)
    mean = layout.tokens * layout.top_k / layout.experts
    shape = table.Shape(
        tokens=layout.tokens,
        experts=layout.experts,
        top_k=layout.top_k,
        hidden=problem.hidden,
        intermediate=problem.intermediate,
        activation=problem.activation,
        dtype=problem.dtype,
        packed=problem.packed,
        weights=problem.weights,
        capacity_factor=None if layout.capacity is None else layout.capacity / mean,
        architecture=architecture,
    )
    name = choose(shape, candidates(ways, architecture), table.load(), phase)
    return None if name is None else ways[name]


def _able(name: str, problem: Layer, capability: tuple[int, int]) -> Way | None:
    """The way of that name, where its kernels are there and take the problem."""
    backend, module = _MODULES[name]
    if not backends.available(backend, capability):
        return None
    found = Way(name, importlib.import_module(f"moe_routing_kernels.experts.{module}"))
    return None if found.module.unsupported(problem if found.gathers else problem.experts) else found
