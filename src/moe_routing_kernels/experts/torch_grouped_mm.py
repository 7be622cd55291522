"""Experts in plain torch as grouped GEMMs over rows sorted by expert; nothing is read on the host."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, experts_of_rows, mixed_formats, unaligned


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if problem.packed != "bf16":
        return f"torch.nn.functional.grouped_mm takes bf16 rows, not {problem.packed}"
    return unaligned(problem) or mixed_formats(problem)


def bind(
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
