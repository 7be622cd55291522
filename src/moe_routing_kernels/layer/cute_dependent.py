"""permute, pack, experts and combine fused, in CuTe DSL for Hopper: each kernel starts before the one ahead of it is over.

Strategy: with few rows a layer is a chain of short kernels, and about a microsecond passes between the end of one and the first load
of the next. Here each is launched dependent on the one ahead of it (programmatic dependent launch). The first GEMM sets up its
barriers while permute orders the rows, the second loads weights while the first still multiplies, and combine loads row numbers,
weights and the residual while the last rows are multiplied. The kernels are those of `cute_permute`, `cute_experts`, whose first
GEMM gathers tokens, and `cute_combine`; so are their results, bit by bit.

Floor: that of the experts.

Invariants: those of `grouped_gemm` for kernels that overlap. What permute reads, and the residual, is complete before permute starts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.combine import Combine, cute_combine
from moe_routing_kernels.experts import cute_experts
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.permute import cute_permute
from moe_routing_kernels.target import Target


def unsupported(problem: Layer, target: Target | None = None) -> str | None:
    """Why it cannot run on a target (None: on any), or None."""
    if problem.layout.rows > cute_experts.OVERLAP_ROWS:
        return f"is for at most {cute_experts.OVERLAP_ROWS} rows, with which kernels may overlap"
    return cute_permute.unsupported(problem.layout.problem) or cute_experts.unsupported_gather(problem, target)


def precompile(problem: Layer, arch: str) -> None:
    """Put the kernels of a problem, without a residual, into the cache; needs no GPU."""
    cute_permute.precompile(problem.layout.problem, arch, signals=True)
    cute_experts.precompile(problem.experts, arch, problem.layout.top_k, waits=True, signals=True)
    cute_combine.precompile(_combine(problem), arch, waits=True)


def bind(
    problem: Layer,
    *,
    topk_ids: Tensor,
    topk_weights: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32, topk_weights (T, k) float32, x (T, H), w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H)
    of activations that have them -> combined (T, H), to which a `residual` (T, H) is added."""
    rows, experts, top_k = problem.layout.rows, problem.layout.experts, problem.layout.top_k
    counts, offsets, order, inverse = (
        torch.empty(shape, dtype=torch.int32, device=x.device) for shape in (experts, experts + 1, rows, topk_ids.shape)
    )
    y = torch.empty((rows, problem.hidden), dtype=x.dtype, device=x.device)
    permute = cute_permute.bind(
        problem.layout.problem,
        **{"topk_ids": topk_ids, "counts": counts, "offsets": offsets, "order": order, "inverse": inverse},
        signals=True,
    )
    multiply = cute_experts.launches(
        problem.experts, x, order, top_k, offsets, w13, w2, b13, b2, y, waits=True, signals=True
    )
    operands = {"y": y, "inverse": inverse, "topk_weights": topk_weights, "combined": combined, "residual": residual}
    combine = cute_combine.bind(_combine(problem), **operands, waits=True)

    def run() -> None:
        permute()
        multiply()
        combine()

    return run


def _combine(problem: Layer) -> Combine:
    layout = problem.layout
    return Combine(layout.tokens, problem.hidden, layout.top_k, problem.dtype, dropping=layout.dropping)
