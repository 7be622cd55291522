"""permute and pack fused, by vLLM's `moe_permute` (vllm 0.33.0), with the buffers that vLLM keeps from layer to layer.

Strategy: CUB's stable radix sort of (expert, assignment), a kernel for the experts' first rows, and one that copies rows, a block of
256 threads each, while its first thread writes the inverse.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import VLLM
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.routing import Routing


def unsupported(problem: Routing) -> str | None:
    """Why it cannot run, or None."""
    if problem.layout.capacity is not None:
        return "vLLM has no capacity limit"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return "vLLM's moe_permute takes rows of whole 16 bytes"
    return VLLM.missing()


def bind(
    problem: Routing, *, topk_ids: Tensor, x: Tensor, inverse: Tensor, packed: Tensor
) -> Callable[[], dict[str, Tensor]]:
    """Bind topk_ids (T, k) int32 and x (T, H) -> inverse (T, k) int32 and packed (T k, H); returns order (T k,) int32."""
    operators, (experts, top_k) = VLLM.operators(), (problem.layout.experts, problem.layout.top_k)
    rows = topk_ids.numel()
    first = torch.empty(experts + 1, dtype=torch.int64, device=x.device)
    assignments = torch.arange(rows, dtype=torch.int32, device=x.device).view_as(topk_ids)
    order = torch.empty(rows, dtype=torch.int32, device=x.device)
    workspace = torch.empty(operators.moe_permute_sort_workspace_size(rows, experts), dtype=torch.int8, device=x.device)
    scratch = (workspace, *(torch.empty_like(topk_ids) for _ in range(3)))
    given = (x, topk_ids, assignments, None, experts, experts, top_k)

    def run() -> dict[str, Tensor]:
        operators.moe_permute_with_scratch(*given, packed, first, inverse, order, *scratch)
        return {"order": order}

    return run
