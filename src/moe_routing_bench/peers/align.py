"""`moe_align_block_size` of vLLM (0.33.0) and SGLang (sglang-kernel 0.4.3) as optional peers, for experts in blocks of rows.

Strategy: one block counts the assignments of all experts in shared memory and adds the counts up, rounded up to blocks; another
fills `order` with T k, which means padding; then a thread per assignment takes a row by an atomic addition. Small batches with
few experts are done by one block. Rows of an expert lie in another order in each call.

It answers less than our permute: which assignment lies in which row, and the expert of each block, which we have as offsets.
Their Triton products store results by assignment, so they need neither the inverse nor counts. These are neither written nor
checked, and the time is that of the library's call alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import LIBRARIES
from moe_routing_kernels.permute import Permute


def unsupported(problem: Permute, *, library: str) -> str | None:
    """Why a library, `vLLM` or `SGLang`, cannot run a problem, or None."""
    if problem.limit is not None:
        return f"{library} has no capacity limit"
    if problem.align == 1:
        return f"{library}'s moe_align_block_size makes blocks of rows (layouts block64 and block128)"
    if problem.experts >= 1024:
        return f"{library}'s moe_align_block_size takes less than 1024 experts"
    return LIBRARIES[library].missing()


def bind(
    problem: Permute, *, topk_ids: Tensor, counts: Tensor, offsets: Tensor, order: Tensor, inverse: Tensor, library: str
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32 -> order (rows,) int32, T k or more in padding. counts, offsets and inverse are not written."""
    operators, (experts, block) = LIBRARIES[library].operators(), (problem.experts, problem.align)
    blocks = torch.empty(len(order) // block, dtype=torch.int32, device=order.device)
    outputs = (order, blocks, torch.empty(1, dtype=torch.int32, device=order.device))
    if library == "vLLM":
        return lambda: operators.moe_align_block_size(topk_ids, experts, block, *outputs, None, None)
    sums = torch.empty(experts + 2, dtype=torch.int32, device=order.device)  # it counts an expert -1 too
    return lambda: operators.moe_align_block_size(topk_ids, experts + 1, block, *outputs, sums, True)
