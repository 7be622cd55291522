"""Which implementation runs a problem on a target, in which module, and why not the others.

Operators, `ops.prepare`, ``compile`` and `auto` ask here. Candidates are the lines of the tables (`implementations`) that have a rank. Of
an operation, the first that can run does (`kernel`). Of a layer, the measured layers decide between those that can (`fastest`): an
operator runs only its experts (`way`), as the routing around them is done by the kernels that `kernel` chooses in any case.

Choices are remembered: a first call imports and asks modules, later ones cost a look-up. Nothing here imports torch.
"""

import functools
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from moe_routing_kernels import choices
from moe_routing_kernels.choices import Shape, choose
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.implementations import NVIDIA, Candidate, listed, load, ranked, reason
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.target import Target

LEAST = {"cutlass": (8, 0), "triton": (7, 0)}  # compute capability that a compiler has, by its package
MOST_PROBLEMS = 4096  # that are remembered


@functools.cache
def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def unmet(requires: tuple[str, ...], target: Target) -> str | None:
    """Why what an implementation requires is not there for a target, or None."""
    for need in requires:
        if need == "gpu" and not target.vendor:
            return f"needs a GPU, not {target.arch}"
        if need in NVIDIA and target.vendor != "nvidia":
            return f"needs an NVIDIA GPU, not {target.arch}"
        if need in LEAST and not installed(need):
            return f"{need} is not installed"
        if need in LEAST and target.vendor == "nvidia" and target.capability < LEAST[need]:
            return f"{need} compiles for no {target.arch}"
    return None


@functools.lru_cache(MOST_PROBLEMS)
def kernel(problem: Any, target: Target, trains: bool = False) -> Any:
    """The kernel of a problem, as `load` gives it (`gate.Gate`, `pack.Pack`, ...); None where plain torch must do.

    `trains`: that of a forward and a backward pass.
    """
    operation = _operation(problem)
    for candidate in ranked(operation):
        if _fits(candidate, problem, trains) and unmet(candidate.requires, target) is None:
            module = load(candidate.place(operation))
            if reason(module, problem, target) is None:
                return module
    return None


def reasons(problem: Any, target: Target, trains: bool = False) -> dict[str, str | None]:
    """Why each candidate of a problem's operation cannot run it, preferred first; None for those that can."""
    operation, answers = _operation(problem), dict[str, str | None]()
    for candidate in ranked(operation):
        if _fits(candidate, problem, trains):
            missing = unmet(candidate.requires, target)
            answers[candidate.name] = missing or reason(load(candidate.place(operation)), problem, target)
    return answers


@dataclass(frozen=True)
class Way:
    """What runs of ``moe_routing_kernels.experts``, as `load` gives it, and whether it gathers rows: then it takes a `Layer`, else an `Experts`."""

    name: str
    module: Any
    gathers: bool


@functools.lru_cache(MOST_PROBLEMS)
def way(problem: Layer, target: Target, phase: str | None = None) -> Way | None:
    """How experts are run in a layer of rows that are packed in the format of the activations; None where no kernel takes it.

    Where a kernel that is compiled ahead can run, no other is chosen: Triton compiles when it first sees a size, and was ahead by 0.3 %
    in one of the measured layers, and behind in the others. Raises `UserError` for a table that cannot be read.
    """
    able: dict[str, tuple[Way, bool]] = {}
    for candidate in ranked("layer"):
        experts = _experts_of(candidate)
        if experts is None or candidate.quantised or candidate.backend == "torch" or unmet(candidate.requires, target):
            continue
        module = load(experts.place("experts"))
        if reason(module, problem if experts.gathers else problem.experts, target) is None:
            able[candidate.name] = Way(candidate.name, module, experts.gathers), experts.backend == "cute"
    ahead = any(compiled for _, compiled in able.values())
    ways = {name: option for name, (option, compiled) in able.items() if compiled or not ahead}
    name = fastest(_shape(problem, target), ways, phase)
    return None if name is None else ways[name]


def fastest(shape: Shape, able: Collection[str], phase: str | None = None) -> str | None:
    """The implementation of a layer among `able`, by the table of measured layers; None where none is able.

    On a GPU those that read loads on the host take part only where there is no other. Raises `UserError` for a table that cannot be read.
    """
    return choose(shape, preferred(able, shape.architecture), choices.load(), phase)


def preferred(able: Collection[str], architecture: str) -> list[str]:
    """Those of `able` that are candidates, preferred first; on a GPU those that wait for it only where there is no other."""
    candidates = [candidate for candidate in ranked("layer") if candidate.name in able]
    names = [candidate.name for candidate in candidates if architecture == "cpu" or not candidate.waits]
    return names or [candidate.name for candidate in candidates]


def _operation(problem: Any) -> str:
    return type(problem).__module__.rpartition(".")[2]


def _fits(candidate: Candidate, problem: Any, trains: bool) -> bool:
    """Whether a candidate is of kernels that take packed rows in formats like those of a problem."""
    quantised = isinstance(problem, Experts) and problem.quantised_weights is not None
    return (
        candidate.backend != "torch"
        and not candidate.gathers
        and candidate.trains == trains
        and bool(candidate.quantised) == quantised
    )


def _experts_of(layer: Candidate) -> Candidate | None:
    """The experts of a layer that an operator can run by themselves, with the pack before them or without it; None where it has none."""
    name, fused = layer.parts.get("experts"), layer.parts.get("pack+experts")
    of_layer = (each for each in listed("experts") if each.name == name or f"experts.{each.module}" == fused)
    return next(of_layer, None)


def _shape(problem: Layer, target: Target) -> Shape:
    layout = problem.layout
    experts = layout.experts * layout.ranks
    mean = layout.tokens * layout.top_k / experts
    return Shape(
        tokens=layout.tokens,
        experts=experts,
        top_k=layout.top_k,
        hidden=problem.hidden,
        intermediate=problem.intermediate,
        activation=problem.activation,
        dtype=problem.dtype,
        packed=problem.packed,
        weights=problem.weights,
        capacity_factor=None if layout.capacity is None else layout.capacity / mean,
        architecture=target.generation,
    )
