"""Experts with quantised weights: all weights are dequantised into a workspace by a Triton kernel, which `cute_experts` multiplies with.

The strongest baseline that dequantises first: one pass over the weights at the speed of memory, then our 16-bit GEMMs. A kernel that
dequantises as it loads saves writing and reading the workspace: 4 bytes per weight.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from moe_routing_kernels.experts import Experts, cute_experts, dequant, triton_dequantise
from moe_routing_kernels.experts.common import not_quantised
from moe_routing_kernels.target import Target


def unsupported(problem: Experts, target: Target | None = None) -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    reason = not_quantised(problem) or triton_dequantise.unsupported(problem)
    return reason or cute_experts.unsupported(_plain(problem), target)


def precompile(problem: Experts, arch: str) -> None:
    """Put the kernels of the GEMMs into the cache; needs no GPU."""
    cute_experts.precompile(_plain(problem), arch)


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **quantisation: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, the elements w13 and w2, their `quantisation` parts by name, and biases -> y (R, H)."""
    weight_format, dense = problem.quantised_weights, dequant.kept_workspace(problem, problem.experts, packed.device)
    assert weight_format is not None, f"{problem.weights} is not quantised"
    pairs = zip(dequant.parts(w13, w2, quantisation), dense, strict=True)
    fill_up, fill_down = (triton_dequantise.launcher(parts, weight_format, out) for parts, out in pairs)
    biases = {} if b13 is None or b2 is None else {"b13": b13, "b2": b2}
    up, down = dense
    multiply = cute_experts.bind(_plain(problem), packed=packed, offsets=offsets, w13=up, w2=down, y=y, **biases)

    def run() -> None:
        fill_up()
        fill_down()
        multiply()

    return run


def _plain(problem: Experts) -> Experts:
    """The problem of the GEMMs, whose weights are of the format of the activations."""
    return replace(problem, weights=problem.dtype)
