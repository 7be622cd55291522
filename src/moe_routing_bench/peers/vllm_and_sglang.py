"""Kernels that vLLM (0.33.0) and SGLang (sglang-kernel 0.4.3) both have, with one interface.

`align` (`moe_align_block_size`): permute, for experts in blocks of rows. One block counts the assignments of all experts in shared memory and adds the counts up, rounded up to blocks; another
fills `order` with T k, which means padding; then a thread per assignment takes a row by an atomic addition. Small batches with
few experts are done by one block. Rows of an expert lie in another order in each call.

It answers less than our permute: which assignment lies in which row, and the expert of each block, which we have as offsets.
Their Triton products store results by assignment, so they need neither the inverse nor counts. These are neither written nor
checked, and the time is that of the library's call alone.

`shuffle` (`shuffle_rows`): pack. A block of 256 threads copies a row. Each thread copies 16 bytes at a time; rows are in the order of the output. The kernel takes the token of each row where
`order` holds assignments, so each call divides them (R int32, read and written), which is part of the cost.

Compulsory bytes: (T + R) * H * itemsize + 4 * R; floor: those over the copy bandwidth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.loading import LIBRARIES
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import Permute


def unsupported_align(problem: Permute, *, library: str) -> str | None:
    """Why a library, `vLLM` or `SGLang`, cannot run a problem, or None."""
    if problem.limit is not None:
        return f"{library} has no capacity limit"
    if problem.align == 1:
        return f"{library}'s moe_align_block_size makes blocks of rows (layouts block64 and block128)"
    if problem.experts >= 1024:
        return f"{library}'s moe_align_block_size takes less than 1024 experts"
    return LIBRARIES[library].missing()


def bind_align(
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


def unsupported_shuffle(problem: Pack, *, library: str) -> str | None:
    """Why a library, `vLLM` or `SGLang`, cannot run a problem, or None."""
    if problem.packed != problem.dtype:
        return f"{library}'s shuffle_rows copies rows as they are, not as {problem.packed}"
    if problem.padding:
        return f"{library}'s shuffle_rows writes no padding rows"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return f"{library}'s shuffle_rows takes rows of whole 16 bytes"
    return LIBRARIES[library].missing()


def bind_shuffle(
    problem: Pack, *, x: Tensor, order: Tensor, inverse: Tensor, packed: Tensor, library: str
) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H)."""
    operators, top_k, tokens = LIBRARIES[library].operators(), problem.top_k, torch.empty_like(order)

    def run() -> None:
        torch.div(order, top_k, rounding_mode="floor", out=tokens)
        operators.shuffle_rows(x, tokens, packed)

    return run
