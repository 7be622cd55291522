"""Experts in plain torch as batched GEMMs over rows padded to one capacity: padding is computed too."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats, plain_rows


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if not problem.padded:
        return "torch.bmm needs padded rows, as many for every expert"
    return mixed_formats(problem)


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    scales: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind packed (R, H), scales of a quantised format, w13 (E, N, H), w2 (E, H, I) and biases; the call writes y (R, H).

    R is a multiple of E, and expert e has rows e R / E to (e + 1) R / E, as in the layout `padded`: `offsets`
    is not read.
    """
    shape = (problem.experts, len(packed) // problem.experts, problem.hidden)
    w13, w2, result = w13.transpose(1, 2), w2.transpose(1, 2), y.view(shape)

    def run() -> None:
        rows = plain_rows(problem, packed, scales).view(shape)
        preact = torch.bmm(rows, w13) if b13 is None else torch.baddbmm(b13.unsqueeze(1), rows, w13)
        inner = activate(problem.activation, preact)
        torch.bmm(inner, w2, out=result) if b2 is None else torch.baddbmm(b2.unsqueeze(1), inner, w2, out=result)

    return run
