"""Experts in plain torch.

`grouped_mm`: grouped GEMMs over rows sorted by expert; nothing is read on the host. `loop`: one expert after the other, two GEMMs per expert
that has rows. `gather_loop`: likewise, and every expert gathers its token rows as it computes them (pack and experts fused); no packed copy
is kept. `bmm`: batched GEMMs over rows padded to one capacity; padding is computed too.

"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import (
    activate,
    experts_of_rows,
    feed_forward,
    mixed_formats,
    plain_rows,
    unaligned,
)
from moe_routing_kernels.layer import Layer


def unsupported_grouped_mm(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if problem.packed != "bf16":
        return f"torch.nn.functional.grouped_mm takes bf16 rows, not {problem.packed}"
    return unaligned(problem) or mixed_formats(problem)


def bind_grouped_mm(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H) bfloat16, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I) and biases; the call returns y (R, H).

    torch allocates the result, which is returned as {"y": result}. So a bound `y` is neither needed nor written: copying to it would add R rows of traffic.
    """
    ends, w13, w2 = offsets[1:], w13.transpose(1, 2), w2.transpose(1, 2)

    def run() -> dict[str, Tensor]:
        preact = F.grouped_mm(packed, w13, offs=ends)
        if b13 is None or b2 is None:
            return {"y": F.grouped_mm(activate(problem.activation, preact), w2, offs=ends)}
        expert = experts_of_rows(offsets, len(packed))
        return {"y": F.grouped_mm(activate(problem.activation, preact + b13[expert]), w2, offs=ends) + b2[expert]}

    return run


def unsupported_loop(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    return mixed_formats(problem)


def bind_loop(
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
    """Bind packed (R, H) and its scales, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I) and biases; the call writes y (R, H).

    The call reads the offsets on the host: its true cost is the wall time, and a CUDA graph cannot hold it.
    """

    def run() -> None:
        for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                rows = plain_rows(problem, packed[first:end], None if scales is None else scales[first:end])
                feed_forward(problem.activation, rows, e, w13, w2, b13, b2, out=y[first:end])

    return run


def unsupported_gather_loop(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return problem.repacked or mixed_formats(problem.experts)


def bind_gather_loop(
    problem: Layer,
    *,
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), order (R,), offsets (E + 1,), w13 (E, N, H), w2 (E, H, I) and biases; the call writes y (R, H).

    Loads are read on the host in every call, so the true cost is the wall time.
    """
    top_k = problem.layout.top_k

    def run() -> None:
        for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                rows = x[order[first:end].clamp_min(0) // top_k]
                feed_forward(problem.activation, rows, expert, w13, w2, b13, b2, out=y[first:end])

    return run


def unsupported_bmm(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if not problem.padded:
        return "torch.bmm needs padded rows, as many for every expert"
    return mixed_formats(problem)


def bind_bmm(
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
