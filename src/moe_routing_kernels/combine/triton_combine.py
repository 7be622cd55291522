"""Combine in Triton: each token's weighted sum of the expert output rows of its k assignments.

Strategy: one program for a few tokens and a column tile; row numbers and weights first, then the loads of up to CHUNK
rows, then their sum, so that many loads are in flight. Dropped assignments load nothing.
Compulsory bytes: (kept + T) * H * itemsize + 8 * T * k; floor: a stream that reads k rows and writes one.

Invariant: the sum runs over j = 0 .. k-1 in fp32, whatever the block shape.
"""

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from moe_routing_kernels.combine import Combine
from moe_routing_kernels.target import Target

LOADS_IN_FLIGHT = 16  # 16-byte vectors that a thread loads before the first use
ENOUGH_PROGRAMS = 8  # per multiprocessor


@triton.jit
def combine_kernel(
    y_ptr,
    inverse_ptr,
    weights_ptr,
    residual_ptr,
    combined_ptr,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: TOKENS tokens x COLUMNS columns; CHUNK rows of a token are loaded together. No residual: None."""
    tiles: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    token = (program // tiles) * TOKENS + tl.arange(0, TOKENS)
    column = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < H
    live = token < tokens

    rows = ()
    scales = ()
    for j in tl.static_range(K):
        rows = rows + (tl.load(inverse_ptr + token * K + j, mask=live, other=-1)[:, None],)  # noqa: RUF005
        scales = scales + (tl.load(weights_ptr + token * K + j, mask=live, other=0.0)[:, None],)  # noqa: RUF005
    if residual_ptr is None:
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    else:
        pointers = residual_ptr + token[:, None].to(tl.int64) * H + column
        total = tl.load(pointers, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    for first in tl.static_range(0, K, CHUNK):
        # load
        terms = ()
        for j in tl.static_range(first, min(first + CHUNK, K)):
            pointers = y_ptr + rows[j].to(tl.int64) * H + column
            terms = terms + (tl.load(pointers, mask=(rows[j] >= 0) & inside, other=0.0),)  # noqa: RUF005
        # accumulate
        for j in tl.static_range(first, min(first + CHUNK, K)):
            # The weight of a dropped assignment may be anything.
            total += tl.where(rows[j] >= 0, scales[j], 0.0) * terms[j - first].to(tl.float32)
    # store
    pointers = combined_ptr + token[:, None].to(tl.int64) * H + column
    tl.store(pointers, total.to(combined_ptr.dtype.element_ty), mask=live[:, None] & inside)


def choose_block(
    tokens: int, hidden: int, itemsize: int, top_k: int, enough: int, num_warps: int = 4
) -> tuple[int, int]:
    """(tokens, columns) of one program: as many vectors per thread as k allows, fewer with fewer programs than `enough`."""
    vectors = max(1, min(4, LOADS_IN_FLIGHT // top_k))
    block_bytes = 32 * num_warps * 16 * (1 << vectors.bit_length() - 1)  # a block's extent is a power of two
    columns = min(triton.next_power_of_2(hidden), block_bytes // itemsize)
    while columns * itemsize > 1024 and tokens * math.ceil(hidden / columns) < enough:
        columns //= 2
    rows = max(1, 32 * num_warps * 16 // (columns * itemsize))
    return min(rows, triton.next_power_of_2(math.ceil(tokens / enough))), columns


def bind(
    problem: Combine,
    *,
    y: torch.Tensor,
    inverse: torch.Tensor,
    topk_weights: torch.Tensor,
    combined: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> Callable[[], None]:
    """Bind combine: y (R, H), inverse (T, k) int32, topk_weights (T, k) of `problem.weights` -> combined (T, H), of y's dtype.

    Each token's sum starts from its `residual` (T, H).
    """
    enough = ENOUGH_PROGRAMS * Target.here(y.device).multiprocessors
    block = choose_block(problem.tokens, problem.hidden, y.element_size(), problem.top_k, enough)
    return launcher(y, inverse, topk_weights, combined, block, residual=residual)


def launcher(
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    combined: torch.Tensor,
    block: tuple[int, int],
    num_warps: int = 4,
    residual: torch.Tensor | None = None,
) -> Callable[[], None]:
    """The launch of combine for these tensors and (tokens, columns) per program; a sum starts at its residual (T, H)."""
    (tokens, top_k), hidden = inverse.shape, combined.shape[1]
    grid = (math.ceil(tokens / block[0]) * math.ceil(hidden / block[1]),)
    vectors = max(1, block[0] * block[1] * y.element_size() // (32 * num_warps * 16))
    chunk = max(1, LOADS_IN_FLIGHT // vectors)
    arguments = (y, inverse, weights, residual, combined, tokens, hidden, top_k, *block, min(chunk, top_k))
    if not triton.knobs.runtime.interpret:
        # Compile and load now: neither may happen while a CUDA graph is captured.
        _ = combine_kernel.warmup(*arguments, grid=grid, num_warps=num_warps).run
    return functools.partial(combine_kernel[grid], *arguments, num_warps=num_warps)
