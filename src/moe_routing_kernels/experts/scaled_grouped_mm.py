"""Experts of e4m3 rows and e4m3 weights by torch's scaled grouped GEMMs, with a scale per row of both; nothing is read on the host.

Between the GEMMs torch activates and quantises each row again, to e4m3 with a scale per row: a rounding that 16-bit GEMMs do not
have, which the implementation declares (`rounded_inner`). Accumulators are promoted to float32 (no fast accumulation).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.formats import FORMATS, LEAST_AMAX

_ROWS = FORMATS["fp8_row"]


def unsupported(problem: Experts) -> str | None:
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


def bind(
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
