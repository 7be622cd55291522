"""Compiles the kernels in CuTe DSL that the operators choose for a layer of known sizes, ahead of time and without a GPU."""

from dataclasses import replace
from typing import Any

from moe_routing_kernels.choices import chooser
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.target import Target


def gate(problem: Layer, target: Target, logits: str = "fp32") -> None:
    """Put the kernel of a layer's gate, of scores in the format `logits`, into the cache."""
    layout = problem.layout
    _compile(Gate(layout.tokens, layout.experts, layout.top_k, logits, problem.router), target)


def layer(
    problem: Layer,
    target: Target,
    *,
    logits: str = "fp32",
    ids: str = "int32",
    weights: str = "fp32",
    inference: bool = True,
    training: bool = False,
    adds: tuple[bool, ...] = (False,),
) -> None:
    """Put the kernels of all operators of a layer into the cache: those of `inference`, and those of `training`.

    `logits`, `ids` and `weights` are the formats of the scores, and of what a router of its own gives; `adds` says whether combine has
    a residual. What runs in Triton or torch compiles when it runs.
    """
    layout, dtype = problem.layout, problem.dtype
    gate(problem, target, logits)
    _compile(replace(layout.problem, ids=ids), target)
    way = chooser.way(problem, target) if inference else None
    if training or way is None or not way.gathers:
        _compile(Pack(layout.tokens, problem.hidden, layout.top_k, layout.rows, dtype, dtype, padding=True), target)
    if way is not None and hasattr(way.module, "precompile"):
        way.module.precompile(problem if way.gathers else problem.experts, target.arch)
    trainer = chooser.kernel(problem.experts, target, trains=True) if training else None
    if trainer is not None:
        trainer.precompile(problem.experts, target.arch)
    combine = Combine(layout.tokens, problem.hidden, layout.top_k, dtype, dropping=True, weights=weights)
    for add in adds if inference else ():
        _compile(combine, target, add=add)
    if training:
        _compile(replace(combine, weights="fp32"), target, add=False)


def _compile(problem: Any, target: Target, **options: Any) -> None:
    module = chooser.kernel(problem, target)
    if module is not None and hasattr(module, "precompile"):
        module.precompile(problem, target.arch, **options)
