"""Sort-and-index permutation in plain torch: a stable argsort, a search for the boundaries, a scatter for the inverse.

No host synchronisation, so it can be captured in a CUDA graph (`torch.bincount` could not).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.permute import Permute


def permute(problem: Permute, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts (E,), offsets (E + 1,), order (rows,) and inverse (T, k), all int64, of topk_ids (T, k) int32."""
    experts, spare, device = problem.experts, problem.rows, topk_ids.device
    flat = topk_ids.reshape(-1)
    if problem.outside:  # these sort last
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    sorted_ids, by_expert = flat.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(experts + 1, device=device, dtype=flat.dtype))
    limit = flat.numel() if problem.limit is None else problem.limit
    counts = bounds.diff().clamp_max(limit)
    align = problem.align
    size = torch.full_like(counts, limit) if problem.padded else (counts + align - 1) // align * align
    offsets = torch.cat([torch.zeros(1, dtype=size.dtype, device=device), size.cumsum(0)])
    expert = sorted_ids.long()
    rank = torch.arange(flat.numel(), device=device) - bounds[expert]
    kept = (rank < limit) & (expert < experts) if problem.outside else rank < limit
    row = offsets[expert] + rank
    # Dropped assignments are written to one row past the end, so that nothing is masked on the host.
    order = torch.full((spare + 1,), -1, dtype=torch.int64, device=device)
    order[torch.where(kept, row, spare)] = by_expert
    inverse = torch.empty_like(row).scatter_(0, by_expert, torch.where(kept, row, -1))
    return counts, offsets, order[:spare], inverse.view(topk_ids.shape)


def bind(
    problem: Permute,
    *,
    topk_ids: Tensor,
    counts: Tensor,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,
    compiled: bool = False,
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32 -> counts (E,), offsets (E + 1,), order (rows,), inverse (T, k), all int32."""

    def run(ids: Tensor, *outputs: Tensor) -> None:
        for output, value in zip(outputs, permute(problem, ids), strict=True):
            output.copy_(value)

    call = torch.compile(run, dynamic=False) if compiled else run
    return lambda: call(topk_ids, counts, offsets, order, inverse)
