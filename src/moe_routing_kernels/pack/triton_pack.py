"""Pack in Triton: copy every token's row to the output rows of its k assignments, in one launch.

Strategy: token-major, as in cute_pack. A program reads a block of token rows once and writes it k times; where padding
rows are possible it also writes zeros to those among its `CHECKED_ROWS` output rows per token. The k row numbers are
loaded before the first store, because a load after a store could not be moved ahead of it.

Compulsory bytes: (T + R) * H * itemsize + 4 * T * k, and 4 * R more with padding; floor: a stream of that mix.

Invariant: every output row is written by exactly one program: `inverse` names the kept rows, `order` < 0 the others.
"""

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from moe_routing_kernels.pack import Pack, choose_checked_rows, triton_pack_fp8
from moe_routing_kernels.target import Target

BLOCK_BYTES = 8192  # of a row tile in one program: 128 threads with four 16-byte vectors each
ENOUGH_PROGRAMS = 16  # per multiprocessor


@triton.jit
def pack_kernel(
    x_ptr,
    order_ptr,
    inverse_ptr,
    packed_ptr,
    tokens,
    rows,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED_ROWS: tl.constexpr,
):
    """One program: TOKENS tokens x COLUMNS columns, and CHECKED_ROWS output rows per token checked for padding."""
    tiles: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    token = (program // tiles) * TOKENS + tl.arange(0, TOKENS)
    column = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < H
    live = token < tokens

    # load
    targets = ()
    for j in tl.static_range(K):
        targets = targets + (tl.load(inverse_ptr + token * K + j, mask=live, other=-1),)  # noqa: RUF005
    sources = ()
    for i in tl.static_range(CHECKED_ROWS):
        row = token * CHECKED_ROWS + i
        sources = sources + (tl.load(order_ptr + row, mask=row < rows, other=0),)  # noqa: RUF005
    value = tl.load(x_ptr + token[:, None].to(tl.int64) * H + column, mask=live[:, None] & inside)

    # store
    for j in tl.static_range(K):
        row = targets[j][:, None]
        tl.store(packed_ptr + row.to(tl.int64) * H + column, value, mask=(row >= 0) & inside)
    zero = tl.zeros([TOKENS, COLUMNS], packed_ptr.dtype.element_ty)
    for i in tl.static_range(CHECKED_ROWS):
        row = (token * CHECKED_ROWS + i)[:, None]
        tl.store(packed_ptr + row.to(tl.int64) * H + column, zero, mask=(sources[i][:, None] < 0) & inside)


def choose_block(
    tokens: int, hidden: int, itemsize: int, enough: int, block_bytes: int = BLOCK_BYTES
) -> tuple[int, int]:
    """(tokens, columns) of one program: a power of two of a row, several rows where rows are short.

    Fewer of both with fewer programs than `enough`.
    """
    columns = min(triton.next_power_of_2(hidden), block_bytes // itemsize)
    while columns * itemsize > 1024 and tokens * math.ceil(hidden / columns) < enough:
        columns //= 2
    rows = max(1, block_bytes // 4 // (columns * itemsize))
    return min(rows, triton.next_power_of_2(math.ceil(tokens / enough))), columns


def unsupported(problem: Pack) -> str | None:
    """Why this problem cannot run, or None."""
    return triton_pack_fp8.unsupported(problem) if problem.packed_format.quantised else None


def bind(
    problem: Pack,
    *,
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> Callable[[], None]:
    """Bind pack: x (T, H), order (R,) int32, inverse (T, k) int32 -> packed (R, H), copied or quantised."""
    checked_rows = choose_checked_rows(problem, len(order))
    if problem.packed_format.quantised:
        assert scales is not None, f"{problem.packed} has scales"
        return triton_pack_fp8.bind(
            problem, x=x, order=order, inverse=inverse, packed=packed, scales=scales, checked_rows=checked_rows
        )
    enough = ENOUGH_PROGRAMS * Target.here(x.device).multiprocessors
    block = choose_block(len(x), problem.hidden, x.element_size(), enough)
    return launcher(x, order, inverse, packed, checked_rows, block)


def launcher(
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    packed: torch.Tensor,
    checked_rows: int,
    block: tuple[int, int],
    num_warps: int = 4,
) -> Callable[[], None]:
    """The launch of pack for these tensors, (tokens, columns) per program, and `checked_rows` output rows per token to
    check for padding."""
    (tokens, hidden), rows = x.shape, len(order)
    groups = max(tokens, math.ceil(rows / checked_rows)) if checked_rows else tokens
    grid = (math.ceil(groups / block[0]) * math.ceil(hidden / block[1]),)
    arguments = (x, order, inverse, packed, tokens, rows, hidden, inverse.shape[1], *block, checked_rows)
    if not triton.knobs.runtime.interpret:
        # Compile and load now: neither may happen while a CUDA graph is captured.
        _ = pack_kernel.warmup(*arguments, grid=grid, num_warps=num_warps).run
    return functools.partial(pack_kernel[grid], *arguments, num_warps=num_warps)
