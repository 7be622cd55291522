"""Compiles kernels in CuTe DSL ahead of time: all that the operators may choose for a model (`prepare`), or those for a layer of known sizes,
which needs no GPU.
"""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.errors import bad, whole
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.implementations import KERNELS
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import arguments, backends
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import RowLayout, capacity_of
from moe_routing_kernels.routers import scaled
from moe_routing_kernels.target import Target

MOST_TOKENS = 16384
_EACH = 1024  # up to so many tokens each number is asked for
_FINE = 128  # from there on in steps of this part: choices change less often


def prepare(
    *,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    rule: str = "softmax_topk_renorm",
    scale: float | None = None,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
    logits: torch.dtype = torch.float32,
    ids: torch.dtype = torch.int32,
    weights: torch.dtype = torch.float32,
    capacity_factor: float | None = None,
    most_tokens: int = MOST_TOKENS,
    training: bool = False,
    arch: str | None = None,
    workers: int | None = None,
) -> int:
    """Compile the kernels of a layer for 1 to `most_tokens` tokens, side by side on all cores, into the kernel cache.

    Afterwards `ops.layer` and `ops.fused_experts` of these sizes compile nothing, in any process with the same versions, with
    a residual or without; `training` adds their backward passes. Sizes, `rule`, `scale` and `activation` are as of `ops.layer`;
    `dtype` is that of tokens and experts, `logits` that of the router's logits, `ids` and `weights` those of a router of one's
    own, and `capacity_factor` that of `ops.capacity_of`. `arch` is an architecture such as ``sm_90a`` (None: that of the current
    GPU, into whose process the kernels are loaded, too), `workers` the number of processes (None: one for each core).
    Experts have kernels in CuTe DSL for sm_90a, in 16 bits, of sizes that are multiples of 8. For any others the kernels around them are
    compiled alone, and where Triton runs the experts, it compiles in first calls.

    Returns how many kernels were compiled: 0 where all were in the cache. Raises `UserError` for sizes that the kernels do not
    take, without CuTe DSL, and without a GPU or an architecture.
    """
    if not chooser.installed("cutlass"):
        raise bad(
            "nvidia-cutlass-dsl",
            "not installed",
            "CuTe DSL, whose kernels are compiled ahead",
            "pip install nvidia-cutlass-dsl",
        )
    here = torch.cuda.is_available()
    if arch is None and not here:
        raise bad("arch", None, "an architecture such as sm_90a", "there is no GPU here to take it from")
    cache, ahead = (importlib.import_module(f"{KERNELS}.cute.{name}") for name in ("cache", "ahead"))
    target = _target(Target.here().arch if arch is None else arch)
    name = _name(dtype, "dtype")
    of_logits, of_weights, of_ids = _name(logits, "logits"), _name(weights, "weights"), str(ids).removeprefix("torch.")
    ask = functools.partial(compile_layer, logits=of_logits, weights=of_weights, ids=of_ids)
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": top_k,
        "most_tokens": most_tokens,
    }
    rule = _checked(rule, scale, activation, dtype, ids, weights, **sizes)
    with cache.noting() as asked:
        for tokens in _numbers(most_tokens):
            capacity = None if capacity_factor is None else capacity_of(capacity_factor, tokens, top_k, experts)
            layout = RowLayout(tokens, top_k, experts, capacity)
            problem = Layer(layout, hidden, intermediate, name, name, name, router=rule, activation=activation)
            ask(problem, target, training=training, adds=(False, True))
    count = ahead.compile_all(asked, workers)
    if here and target == Target.here():
        # The first call of any custom operator imports it, for seconds.
        importlib.import_module("torch._dynamo")
        for compiled in asked:
            compiled.kernel()
    return count


def _checked(
    rule: str,
    scale: float | None,
    activation: str,
    dtype: torch.dtype,
    ids: torch.dtype,
    weights: torch.dtype,
    **sizes: int,
) -> str:
    """The rule's name with its scale. Raises `UserError` for what the operators would not take: these are asked, with tensors without data."""
    for name, size in sizes.items():
        if not whole(size) or size < 1:
            raise bad(name, size, "a whole number, at least 1")
    hidden, intermediate, experts, top_k, tokens = sizes.values()
    known = activation_of(activation)
    wide_rows = intermediate * (2 if known.gated else 1)

    def of(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    biases = (of(experts, wide_rows), of(experts, hidden)) if known.biased else (None, None)
    arguments.check_gate(of(1, experts, dtype=torch.float32), top_k, rule, None, scale)
    arguments.check_permute(of(tokens, top_k, dtype=ids), experts, None, "compact")
    offsets, index = of(experts + 1, dtype=torch.int32), of(1, top_k, dtype=torch.int32)
    network = of(experts, wide_rows, hidden), of(experts, hidden, intermediate)
    arguments.check_experts(of(1, hidden), offsets, *network, activation, *biases)
    arguments.check_combine(of(1, hidden), index, of(1, top_k, dtype=weights), None)
    return scaled(rule, scale)


def _name(dtype: torch.dtype, what: str) -> str:
    """The format of a dtype. Raises `UserError` for one that has no kernels."""
    if dtype not in backends.FORMAT_NAMES:
        raise bad(what, dtype, ", ".join(map(str, backends.FORMAT_NAMES)))
    return backends.FORMAT_NAMES[dtype]


def _numbers(most: int) -> Iterator[int]:
    """Numbers of tokens that between them make every choice: each up to _EACH, then some, and the last."""
    tokens = 1
    while tokens < most:
        yield tokens
        tokens += max(1, tokens // _FINE if tokens >= _EACH else 1)
    yield most


def _target(arch: str) -> Target:
    """The target of an architecture. Raises `UserError` for what no GPU with these kernels is called."""
    known = importlib.import_module("cutlass.base_dsl.enums").Arch.__members__
    target = Target.named(arch)
    if arch not in known or arch.endswith("a") != (target.capability >= (9, 0)) or arch.endswith("f"):
        raise bad("arch", arch, "what a GPU is called, such as sm_80, sm_90a or sm_100a")
    return target


def compile_gate(problem: Layer, target: Target, logits: str = "fp32") -> None:
    """Put the kernel of a layer's gate, of scores in the format `logits`, into the cache."""
    layout = problem.layout
    _compile(Gate(layout.tokens, layout.experts, layout.top_k, logits, problem.router), target)


def compile_layer(
    problem: Layer,
    target: Target,
    *,
    logits: str = "fp32",
    ids: str = "int32",
    weights: str = "fp32",
    inference: bool = True,
    training: bool = False,
    adds: tuple[bool, ...] = (False,),
    gate: bool = True,
) -> None:
    """Put the kernels of all operators of a layer into the cache: those of `inference`, and those of `training`, with its `gate` or without.

    `logits`, `ids` and `weights` are the formats of the scores, and of what a router of its own gives; `adds` says whether combine has
    a residual. What runs in Triton or torch compiles when it runs.
    """
    layout, dtype = problem.layout, problem.dtype
    if gate:
        compile_gate(problem, target, logits)
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


def compile_ep_layer(
    problem: Layer, ranks: int, target: Target, *, spare: int = 0, training: bool = False, pushes: bool = False
) -> None:
    """Put the kernels of `ops.ep.layer` into the cache, for a layer whose tokens are those of all ranks; `pushes` is with a mailbox.

    A rank's experts, and `spare` more, are asked for as many rows as there are tokens: nearly all of them go to each of few ranks.
    """
    layout, dtype = problem.layout, problem.dtype
    # Rows of a rank's tokens go to ranks, which are what experts are elsewhere.
    own = RowLayout(-(-layout.tokens // ranks), ranks, ranks)
    compile_gate(replace(problem, layout=replace(layout, tokens=own.tokens)), target)
    if pushes:
        kernels = importlib.import_module(f"{KERNELS}.exchange.cute_exchange")
        sizes = (ranks, layout.experts // ranks, own.tokens, problem.hidden, layout.top_k, dtype)
        kernels.precompile(*sizes, target, training=training)
    else:
        _compile(own.problem, target)
        _compile(Pack(own.tokens, problem.hidden, ranks, own.rows, dtype, dtype, padding=True), target)
        _compile(Combine(own.tokens, problem.hidden, ranks, dtype, dropping=True), target, add=False)
    # Kernels of inference are chosen for the rows that a rank expects.
    local = RowLayout(layout.tokens, layout.top_k, layout.experts // ranks + spare, ranks=1 if training else ranks)
    compile_layer(replace(problem, layout=local), target, inference=not training, training=training, gate=False)


def _compile(problem: Any, target: Target, **options: Any) -> None:
    module = chooser.kernel(problem, target)
    if module is not None and hasattr(module, "precompile"):
        module.precompile(problem, target.arch, **options)
