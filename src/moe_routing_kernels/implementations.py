"""Our implementations of operations: what a line of a package's table says, and the tables by operation.

The table is `IMPLEMENTATIONS` of ``moe_routing_kernels.<operation>``. It is the only place where an implementation is listed: benches
measure what it has, and `choices.chooser` chooses from it. Nothing here imports torch: Snakemake reads the tables.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

from moe_routing_kernels.target import Target

KERNELS = __name__.partition(".")[0]
NEEDS = ("gpu", "nvidia", "cuda", "triton", "cutlass", "compiler")  # what an implementation may require
NVIDIA = ("nvidia", "cuda")  # of these what only a GPU by NVIDIA meets
_BACKENDS = {"cutlass": "cute", "triton": "triton"}  # by the package that they need
OPERATIONS = ("gate", "permute", "pack", "experts", "combine")  # of `ops`, whose kernels are chosen by name


@dataclass(frozen=True)
class Implementation:
    """One way to do an operation.

    `module` is a module of the operation's package that offers ``bind`` (the contract is in `moe_routing_kernels`), or ``module:entry`` for
    one of several in a module (`load`). `options` are keyword arguments of its functions. `requires` names what must be there: a ``gpu`` of any vendor, as for Triton and torch;
    ``nvidia``, a GPU of that vendor, as for CuTe DSL and CUDA (``cuda`` is its older name); ``triton``, ``cutlass`` or ``compiler`` (what
    torch.compile needs).

    In an operation that is made of stages, `parts` names the implementation of each stage (``torch`` where it names none); a key such as
    ``"pack+experts"`` names a fused module, ``<operation>.<module>``, that does several stages at once. `layout` is the row layout
    that is used inside. `declares` are keywords of the bench's ``check``: in what an implementation is less exact than others, or
    lays rows otherwise, by design.
    """

    name: str
    module: str = ""
    requires: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    layout: str | None = None
    declares: tuple[str, ...] = ()

    def place(self, operation: str) -> str:
        """The absolute name of its module, as one of this operation."""
        return f"{KERNELS}.{operation}.{self.module}"

    def fused(self, part: str) -> str:
        """The absolute name of the module that does a part of several stages."""
        return f"{KERNELS}.{self.parts[part]}"

    def modules(self, operation: str) -> Iterator[str]:
        """Its modules: where the closure of what it imports starts."""
        if self.module:
            yield module_of(self.place(operation))
        yield from (module_of(self.fused(part)) for part in self.parts if "+" in part)


@dataclass(frozen=True)
class Candidate(Implementation):
    """A line of our tables: an implementation, and what choosing it depends on.

    The one with the least `rank` that can run is preferred, unless measured layers say otherwise; without a rank it is never chosen.
    `waits`: it reads loads on the host. `quantised` says what it takes only in quantised formats: the ``weights``, or also the ``rows``.
    Experts are given packed rows, unless it `gathers` them itself; one that `trains` has a forward and a backward pass in place of
    ``bind``. `layer` says what the layer around these experts has otherwise: another name, another layout.
    """

    rank: float | None = None
    waits: bool = False
    quantised: str = ""
    gathers: bool = False
    trains: bool = False
    layer: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """What its kernels are written in: ``cute``, ``triton`` or ``torch``."""
        return next((name for package, name in _BACKENDS.items() if package in self.requires), "torch")


@dataclass(frozen=True)
class Entry:
    """One of several implementations in a module: its ``bind`` is the module's ``bind_<name>``, and so are its other functions."""

    module: ModuleType
    name: str

    def __getattr__(self, function: str) -> Any:
        return getattr(self.module, f"{function}_{self.name}")


def load(place: str) -> Any:
    """What offers ``bind``: the module of an absolute name, or the `Entry` of ``module:entry``."""
    module, entry = importlib.import_module(module_of(place)), place.partition(":")[2]
    return Entry(module, entry) if entry else module


def module_of(place: str) -> str:
    """The module of ``module`` or ``module:entry``."""
    return place.partition(":")[0]


def listed(operation: str) -> tuple[Candidate, ...]:
    """The table of an operation, in the order of legends."""
    return importlib.import_module(f"{KERNELS}.{operation}").IMPLEMENTATIONS


def ranked(operation: str) -> list[Candidate]:
    """Those of an operation's table that may be chosen, preferred first."""
    return sorted((line for line in listed(operation) if line.rank is not None), key=lambda line: line.rank or 0)


def chosen_by_name() -> list[str]:
    """The modules that the operators may choose: what measures operators depends on these, which no import shows."""
    return sorted(
        module_of(candidate.place(operation))
        for operation in OPERATIONS
        for candidate in ranked(operation)
        if not candidate.quantised and candidate.backend != "torch"
    )


def reason(
    module: Any, problem: Any, target: Target | None = None, options: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Why what `load` gives cannot run a problem on a target (None: on any), or None.

    Its `unsupported` is given the target where it has a parameter of that name: the answer of most depends on the problem alone.
    """
    asked = getattr(module, "unsupported", None)
    if asked is None:
        return None
    if "target" not in options and _takes_target(asked):
        return asked(problem, target=target, **options)
    return asked(problem, **options)


@functools.cache
def _takes_target(unsupported: Callable[..., str | None]) -> bool:
    return "target" in inspect.signature(unsupported).parameters
