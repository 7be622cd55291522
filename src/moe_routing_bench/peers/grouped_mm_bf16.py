"""Experts by the Triton grouped products of grouped-mm-bf16 (0.1.7), which has the interface of torch's and no tuner: untuned.

Strategy: a kernel for each expert's rows up to a multiple of a tile, another for whole tiles; masked loads, no TMA. Torch's
activation stands between the products.

FLOPs: 6 R H I; floor: as in `triton_experts`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats, other_rows, unaligned


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.biased:
        return "grouped-mm-bf16 has no biases"
    return other_rows(problem) or unaligned(problem, "grouped-mm-bf16") or mixed_formats(problem)


def bind(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor | None = None
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I); the call returns y (R, H).

    The library allocates its results, so a bound `y` is not written.
    """
    from grouped_mm_bf16 import grouped_mm  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    ends, w13, w2 = offsets[1:], w13.transpose(1, 2), w2.transpose(1, 2)

    def run() -> dict[str, Tensor]:
        with torch.no_grad():
            inner = activate(problem.activation, grouped_mm(packed, w13, offs=ends))
            return {"y": grouped_mm(inner, w2, offs=ends)}

    return run
