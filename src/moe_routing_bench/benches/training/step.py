"""One step of a layer: forward under autograd, then the gradients of tokens, logits and weights in one call.

A way is a module of ``moe_routing_kernels.training``, a layer for ids and weights that are given: in plain torch behind the rule in plain torch,
of a library behind our gate. `ops` is `moe_routing_kernels.ops.layer`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_routing_bench.peers import liger, moe_ops, sonicmoe, transformers
from moe_routing_kernels import ops
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.implementations import listed, load
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import preparation
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.target import Target

_LIBRARIES = {"sonicmoe": sonicmoe, "liger": liger, "moe_ops": moe_ops, "transformers": transformers}
_LEARNED = ("x", "logits", "w13", "w2")
T = TypeVar("T")


def unsupported(problem: Layer, *, way: str, **options: Any) -> str | None:
    """Why this problem cannot run, or None."""
    known = activation_of(problem.activation)
    if known.limit is not None:
        biases = "; its biases have none here" if known.biased else ""
        return f"gradients of {problem.activation} jump where it clamps, so that roundings look like faults{biases}"
    return None if way == "ops" else _module(way).unsupported(problem, **options)


def bind(
    problem: Layer,
    *,
    way: str,
    logits: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    d_combined: Tensor,
    bias: Tensor | None = None,
    combined: Tensor,
    d_x: Tensor,
    d_logits: Tensor,
    d_w13: Tensor,
    d_w2: Tensor,
    **options: Any,
) -> Callable[[], dict[str, Tensor]]:
    """Bind logits (T, E) float32, x and d_combined (T, H), w13 (E, N, H), w2 (E, H, I); the call returns the result and all gradients.

    torch allocates them: a copy of the gradients of weights to the bound outputs, which are not written, would be traffic of its own.
    """
    forward = _forward(problem, way, bias, **options)
    return _saying(differentiated(forward, (x, logits, w13, w2), d_combined), forward)


def differentiated(
    forward: Callable[..., Tensor], learned: tuple[Tensor, ...], d_combined: Tensor
) -> Callable[[], dict[str, Tensor]]:
    """A step of `forward`, a layer of x, logits, w13 and w2 (`learned`): its result and their gradients, by name."""
    given = zip(_LEARNED, learned, strict=True)
    leaves = {name: one.detach().requires_grad_() for name, one in given}

    def run() -> dict[str, Tensor]:
        with torch.enable_grad():
            result = forward(**leaves)
        gradients = torch.autograd.grad(result, list(leaves.values()), d_combined)
        found = {f"d_{name}": one for name, one in zip(leaves, gradients, strict=True)}
        return {
            "combined": result.detach()
        } | found  # an autograd graph that lives on would tie a capture to its stream

    return run


def _forward(problem: Layer, way: str, bias: Tensor | None, **options: Any) -> Callable[..., Tensor]:
    """A layer as a differentiable function of x, logits, w13 and w2."""
    top_k, rule, capacity = problem.layout.top_k, problem.router, problem.layout.capacity
    if way == "ops":
        return lambda x, logits, w13, w2: ops.layer(x, logits, w13, w2, top_k, rule, bias, capacity, problem.activation)
    module = _module(way)
    layer, plain = module.layer(problem, **options), ROUTERS[rule].load()

    def forward(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        ids, weights = plain(logits, top_k, bias) if way not in _LIBRARIES else ops.gate(logits, top_k, rule, bias)
        return layer(x, ids, weights, w13, w2)

    return _saying(forward, layer)


def _module(way: str) -> Any:
    """The module of a library, or of a layer of ours in plain torch."""
    if way in _LIBRARIES:
        return _LIBRARIES[way]
    return next(load(one.place("training")) for one in listed("training") if one.name == way)


def _saying(call: Callable[..., T], tuned: Callable[..., Any]) -> Callable[..., T]:
    """The call, which also says what the tuner of `tuned` chose, where that does."""
    if hasattr(tuned, "configuration"):
        call.configuration = tuned.configuration  # pyright: ignore[reportFunctionMemberAccess]
    return call


def precompile(problem: Layer, arch: str, *, way: str, **options: Any) -> None:
    """Put the kernels in CuTe DSL that the operators choose into the cache; needs no GPU."""
    if way == "ops":
        preparation.compile_layer(problem, Target.named(arch), inference=False, training=True)
    elif way in _LIBRARIES:
        preparation.compile_gate(problem, Target.named(arch))
