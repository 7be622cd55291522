"""Experts in plain torch.

`grouped_mm`: grouped GEMMs over rows sorted by expert; nothing is read on the host. `loop`: one expert after the other, two GEMMs per expert
that has rows. `gather_loop`: likewise, and every expert gathers its token rows as it computes them (pack and experts fused); no packed copy
is kept. `bmm`: batched GEMMs over rows padded to one capacity; padding is computed too.

`scaled_grouped_mm`: e4m3 rows and e4m3 weights by scaled grouped GEMMs, with a scale per row of both; nothing is read on the host. Between
the GEMMs torch activates and quantises each row again, to e4m3 with a scale per row: a rounding that 16-bit GEMMs do not have, which the
implementation declares (`rounded_inner`). Accumulators are promoted to float32 (no fast accumulation).
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
from moe_routing_kernels.formats import FORMATS, LEAST_AMAX
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


_ROWS = FORMATS["fp8_row"]


def unsupported_scaled_grouped_mm(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_grouped_mm"
    if (problem.dtype, problem.packed, problem.weights) != ("bf16", _ROWS.name, "e4m3_row"):
        given = f"{problem.dtype}, {problem.packed} and {problem.weights}"
        return (
            f"torch.nn.functional.scaled_grouped_mm takes rows {_ROWS.name} and weights e4m3_row to bf16, not {given}"
        )
    if problem.hidden % 16 or problem.intermediate % 16:
        return "torch.nn.functional.scaled_grouped_mm needs hidden and intermediate that are multiples of 16"
    return "torch.nn.functional.scaled_grouped_mm has no biases" if problem.biased else None


def bind_scaled_grouped_mm(
    problem: Experts,
    *,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scales: Tensor,
    w2_scales: Tensor,
    y: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H) e4m3 and scales (R,) float32, offsets (E + 1,) int32, w13 (E, N, H) and w2 (E, H, I) e4m3 with scales (E, N, 1)
    and (E, H, 1); the call returns y (R, H) bfloat16, which torch allocates.

    Scales of weights become float32 when bound, as a model holds them.
    """
    up, down = ((w.transpose(1, 2), s.squeeze(2).float()) for w, s in ((w13, w13_scales), (w2, w2_scales)))
    ends = offsets[1:]

    def run() -> dict[str, Tensor]:
        inner = activate(problem.activation, _multiply(packed, scales, *up, ends))
        return {"y": _multiply(*quantise_rows(inner), *down, ends)}

    return run


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (R, C) -> e4m3 (R, C) and scales (R,) float32, as `formats.quantise` does it, in fewer passes."""
    amax = x.abs().amax(1, keepdim=True).float()
    scales = torch.where(amax < LEAST_AMAX, 1, amax / _ROWS.largest)
    return (x / scales).clamp_(-_ROWS.largest, _ROWS.largest).to(_ROWS.torch_dtype), scales.squeeze(1)


def _multiply(rows: Tensor, row_scales: Tensor, weights: Tensor, weight_scales: Tensor, ends: Tensor) -> Tensor:
    """Rows (R, K) times weights (E, K, N), scaled by (R,) and (E, N): (R, N) bfloat16."""
    kind = F.ScalingType.RowWise
    multiply = F.scaled_grouped_mm  # pyright: ignore[reportAttributeAccessIssue]: torch's stubs lack it
    return multiply(rows, weights, row_scales, kind, weight_scales, kind, offs=ends)
