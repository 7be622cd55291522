"""vLLM's sort of assignments as an optional peer (vllm 0.33.0, `moe_prepare_scatter`), for compact rows of all experts.

Strategy: CUB's stable radix sort of (expert, assignment), then a kernel for the experts' first rows and the inverse. It is what
vLLM's `moe_permute` does before it copies rows. First rows come as int64: two kernels of torch make offsets and counts of them,
which is part of this peer's cost.

Compulsory bytes: 12 * T * k + 8 * E; floor: launches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import VLLM
from moe_routing_kernels.permute import Permute


def unsupported(problem: Permute) -> str | None:
    """Why vLLM cannot run a problem, or None."""
    if problem.limit is not None:
        return "vLLM has no capacity limit"
    if problem.align != 1:
        return "vLLM's sort makes compact rows; its moe_align_block_size, which makes blocks, is vllm_align"
    return VLLM.missing()


def bind(
    problem: Permute, *, topk_ids: Tensor, counts: Tensor, offsets: Tensor, order: Tensor, inverse: Tensor
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32 -> counts (E,), offsets (E + 1,), order (T k,), inverse (T, k), all int32."""
    operators, experts = VLLM.operators(), problem.experts
    first = torch.empty(experts + 1, dtype=torch.int64, device=topk_ids.device)
    assignments = torch.arange(topk_ids.numel(), dtype=torch.int32, device=topk_ids.device).view_as(topk_ids)
    size = operators.moe_permute_sort_workspace_size(topk_ids.numel(), experts)
    workspace = torch.empty(size, dtype=torch.int8, device=topk_ids.device)
    sorted_ids, mapped_ids = torch.empty_like(topk_ids), torch.empty_like(topk_ids)
    scratch = (workspace, sorted_ids, order.view_as(topk_ids), mapped_ids)

    def run() -> None:
        operators.moe_prepare_scatter(topk_ids, assignments, None, experts, experts, first, inverse, *scratch)
        offsets.copy_(first)
        torch.sub(offsets[1:], offsets[:-1], out=counts)

    return run
