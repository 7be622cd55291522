"""Compiles all kernels in CuTe DSL that the operators may choose for a model, before it runs: `prepare`."""

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moe_routing_bench.errors import bad
from moe_routing_bench.formats import FORMATS, PLAIN
from moe_routing_bench.kernels.combine import Combine
from moe_routing_bench.kernels.experts import activation_of
from moe_routing_bench.kernels.gate import Gate
from moe_routing_bench.kernels.layer import Layer
from moe_routing_bench.kernels.pack import Pack
from moe_routing_bench.kernels.permute.layout import RowLayout, capacity_of
from moe_routing_bench.ops import arguments, backends, feeding
from moe_routing_bench.routers import scaled

MOST_TOKENS = 16384
_EACH = 1024  # up to so many tokens each number is asked for
_FINE = 128  # from there on in steps of this part: choices change less often

_NAMES = {FORMATS[name].torch_dtype: name for name in PLAIN}


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
        importlib.import_module(f"moe_routing_bench.kernels.cute.{name}") for name in ("cache", "ahead", "compilation")
    )
    compiled_for = arch or compilation.current_arch()
    names = {name: _name(value, name) for name, value in (("dtype", dtype), ("logits", logits), ("weights", weights))}
    rule = _checked(rule, scale, activation, experts, top_k, most_tokens)
    formats = (names["dtype"],) * 3
    with cache.noting() as asked:
        for tokens in _numbers(most_tokens):
            capacity = None if capacity_factor is None else capacity_of(capacity_factor, tokens, top_k, experts)
            layout = RowLayout(tokens, top_k, experts, capacity)
            problem = Layer(layout, hidden, intermediate, *formats, router=rule, activation=activation)
            _ask(problem, compiled_for, names, str(ids).removeprefix("torch."), training)
    count = ahead.compile_all(asked, workers)
    if here and compiled_for == compilation.current_arch():
        importlib.import_module(
            "torch._dynamo"
        )  # which torch imports in the first call of any custom operator: seconds
        for one in asked:
            one.kernel()
    return count


def _checked(rule: str, scale: float | None, activation: str, experts: int, top_k: int, most_tokens: int) -> str:
    """The rule's name with its scale. Raises `UserError` for what the operators would not take."""
    if most_tokens < 1:
        raise bad("most_tokens", most_tokens, "at least 1")
    activation_of(activation)
    logits = torch.empty(1, experts, device="meta")
    arguments.check_gate(logits, top_k, rule, None, scale)
    return scaled(rule, scale)


def _name(dtype: torch.dtype, what: str) -> str:
    """The format of a dtype. Raises `UserError` for one that has no kernels."""
    if dtype not in _NAMES:
        raise bad(what, dtype, ", ".join(map(str, _NAMES)))
    return _NAMES[dtype]


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
    way = feeding.way(problem, capability)
    if training or way is None or not way.gathers:
        _precompile(Pack(tokens, problem.hidden, top_k, layout.rows, dtype, dtype, padding=True), arch, capability)
    if way is not None and hasattr(way.module, "precompile"):
        way.module.precompile(problem if way.gathers else problem.experts, arch)
    if training:
        from moe_routing_bench.kernels.experts import cute_training

        if cute_training.unsupported(problem.experts) is None:
            cute_training.precompile(problem.experts, arch)
            _precompile(replace(combine, weights="fp32"), arch, capability, add=False)


def _precompile(problem: Any, arch: str, capability: tuple[int, int], **options: Any) -> None:
    module = backends.kernel(problem, capability)
    if module is not None and hasattr(module, "precompile"):
        module.precompile(problem, arch, **options)


def _capability(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture: (9, 0) of sm_90a. Raises `UserError` for what is none."""
    if not (found := re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)):
        raise bad("arch", arch, "an architecture such as sm_80, sm_90a or sm_100a")
    return int(found[1]), int(found[2])
