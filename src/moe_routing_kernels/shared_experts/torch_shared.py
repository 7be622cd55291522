"""Shared experts in plain torch: two dense GEMMs, with the activation between them."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.shared_experts import SharedExperts


def unsupported(problem: SharedExperts) -> str | None:
    """Why it cannot run, or None."""
    if problem.weights == problem.dtype:
        return None
    return f"activations and weights need one format, not {problem.dtype} and {problem.weights}"


def bind(
    problem: SharedExperts,
    *,
    x: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    residual: Tensor,
    shared_gate: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), shared_w13 (N, H), shared_w2 (H, I) and shared_gate (H,) or None; the call writes residual (T, H).

    A token's score multiplies the input of the down GEMM, which is narrower than its output.
    """
    up, down = shared_w13.T, shared_w2.T

    def run() -> None:
        inner = activate(problem.activation, x @ up)
        if shared_gate is not None:
            inner.mul_(torch.sigmoid(x @ shared_gate).unsqueeze(1))
        torch.mm(inner, down, out=residual)

    return run
