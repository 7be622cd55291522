"""Sort-and-index permutation in plain torch: a stable argsort, a search for the boundaries, a scatter for the inverse.

No host synchronisation, so it can be captured in a CUDA graph (`torch.bincount` could not).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.grid import Cell


def permute(cell: Cell, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts (E,), offsets (E + 1,), order (row limit,) and inverse (T, k), all int64, of topk_ids (T, k) int32."""
    experts, device = cell.experts or 0, topk_ids.device
    flat = topk_ids.reshape(-1)
    sorted_ids, by_expert = flat.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(experts + 1, device=device, dtype=flat.dtype))
    loads = bounds.diff()
    limit = flat.numel() if cell.capacity is None else cell.capacity
    counts = loads.clamp_max(limit)
    size = (
        torch.full_like(counts, limit)
        if cell.layout == "padded"
        else (counts + cell.block - 1) // cell.block * cell.block
    )
    offsets = torch.cat([torch.zeros(1, dtype=size.dtype, device=device), size.cumsum(0)])
    expert = sorted_ids.long()
    rank = torch.arange(flat.numel(), device=device) - bounds[expert]
    kept = rank < limit
    row = offsets[expert] + rank
    spare = (
        cell.row_limit
    )  # dropped assignments are written to one row past the end, so that nothing is masked on the host
    order = torch.full((spare + 1,), -1, dtype=torch.int64, device=device)
    order[torch.where(kept, row, spare)] = by_expert
    inverse = torch.empty_like(row).scatter_(0, by_expert, torch.where(kept, row, -1))
    return counts, offsets, order[:spare], inverse.view(topk_ids.shape)


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32; the call writes counts, offsets, order and inverse as int32."""

    def run(ids: Tensor, counts_out: Tensor, offsets_out: Tensor, order_out: Tensor, inverse_out: Tensor) -> None:
        counts, offsets, order, inverse = permute(cell, ids)
        counts_out.copy_(counts)
        offsets_out.copy_(offsets)
        order_out.copy_(order)
        inverse_out.copy_(inverse)

    call = torch.compile(run, dynamic=False) if compiled else run
    return lambda: call(inputs["topk_ids"], outputs["counts"], outputs["offsets"], outputs["order"], outputs["inverse"])
