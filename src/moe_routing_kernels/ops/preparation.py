"""Compiles all kernels in CuTe DSL that the operators may choose for a model, before it runs: `prepare`."""

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.errors import bad, whole
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import arguments, backends, feeding
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute.layout import RowLayout, capacity_of
from moe_routing_kernels.routers import scaled

MOST_TOKENS = 16384
_EXPERTS = "sm_90a"  # of the kernels of experts
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
    if not backends.installed("cutlass"):
        raise bad(
            "nvidia-cutlass-dsl",
            "not installed",
            "CuTe DSL, whose kernels are compiled ahead",
            "pip install nvidia-cutlass-dsl",
        )
    here = torch.cuda.is_available()
    if arch is None and not here:
        raise bad("arch", None, "an architecture such as sm_90a", "there is no GPU here to take it from")
    cache, ahead, compilation = (
        importlib.import_module(f"moe_routing_kernels.cute.{name}") for name in ("cache", "ahead", "compilation")
    )
    compiled_for = compilation.current_arch() if arch is None else arch
    _capability(compiled_for)
    names = {name: _name(value, name) for name, value in (("dtype", dtype), ("logits", logits), ("weights", weights))}
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": top_k,
        "most_tokens": most_tokens,
    }
    rule = _checked(rule, scale, activation, dtype, ids, weights, **sizes)
    formats = (names["dtype"],) * 3
    with cache.noting() as asked:
        for tokens in _numbers(most_tokens):
            capacity = None if capacity_factor is None else capacity_of(capacity_factor, tokens, top_k, experts)
            layout = RowLayout(tokens, top_k, experts, capacity)
            problem = Layer(layout, hidden, intermediate, *formats, router=rule, activation=activation)
            _ask(problem, compiled_for, names, str(ids).removeprefix("torch."), training)
    count = ahead.compile_all(asked, workers)
    if here and compiled_for == compilation.current_arch():
        # The first call of any custom operator imports it, for seconds.
        importlib.import_module("torch._dynamo")
        for one in asked:
            one.kernel()
    return count


def _checked(
    rule: str, scale: float | None, activation: str, dtype: torch.dtype, ids: torch.dtype, weights: torch.dtype, **sizes: int
) -> str:  # fmt: skip
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


def _ask(problem: Layer, arch: str, names: dict[str, str], ids: str, training: bool) -> None:
    """Ask for every kernel of a layer, as the operators would."""
    layout, dtype = problem.layout, problem.dtype
    tokens, top_k, capability = layout.tokens, layout.top_k, _capability(arch)
    _precompile(Gate(tokens, layout.experts, top_k, names["logits"], problem.router), arch, capability)
    _precompile(replace(layout.problem, ids=ids), arch, capability)
    combine = Combine(tokens, problem.hidden, top_k, dtype, dropping=True, weights=names["weights"])
    for add in (False, True):
        _precompile(combine, arch, capability, add=add)
    way = feeding.way(problem, capability) if arch == _EXPERTS else None
    if training or way is None or not way.gathers:
        _precompile(Pack(tokens, problem.hidden, top_k, layout.rows, dtype, dtype, padding=True), arch, capability)
    if way is not None and hasattr(way.module, "precompile"):
        way.module.precompile(problem if way.gathers else problem.experts, arch)
    if training and arch == _EXPERTS:
        from moe_routing_kernels.experts import cute_training

        if cute_training.unsupported(problem.experts) is None:
            cute_training.precompile(problem.experts, arch)
            _precompile(replace(combine, weights="fp32"), arch, capability, add=False)


def _precompile(problem: Any, arch: str, capability: tuple[int, int], **options: Any) -> None:
    module = backends.kernel(problem, capability)
    if module is not None and hasattr(module, "precompile"):
        module.precompile(problem, arch, **options)


def _capability(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture: (9, 0) of sm_90a. Raises `UserError` for what no GPU with these kernels is called."""
    found = re.fullmatch(r"sm_([1-9]\d?)(\d)(a?)", arch) if isinstance(arch, str) else None
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    known = importlib.import_module("cutlass.base_dsl.enums").Arch.__members__
    if not found or arch not in known or (found[3] == "a") != (capability >= (9, 0)):
        raise bad("arch", arch, "what a GPU is called, such as sm_80, sm_90a or sm_100a")
    return capability
