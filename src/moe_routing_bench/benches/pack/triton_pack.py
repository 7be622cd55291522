"""Pack in Triton: copy every token's row to the output rows of its k assignments, in one launch.

Strategy: token-major, as in cute_pack. A program reads a block of token rows once and writes it k times; where
padding rows are possible it also writes zeros to those among its `SLAB` output rows a token. The k row numbers are
loaded before the first store, because a load after a store could not be moved ahead of it.
Compulsory bytes: (T + R) * H * itemsize + 4 * T * k, and 4 * R more with padding; floor: a stream of that mix.

Invariant: every output row is written by exactly one program: `inverse` names the kept rows, `order` < 0 the others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from moe_routing_bench.benches.pack import triton_pack_fp8
from moe_routing_bench.grid import FP8

MAX_SLAB = 16
BLOCK_BYTES = 8192  # of a row tile in one program: 128 threads with four 16-byte vectors each
ENOUGH_PROGRAMS = 132 * 16


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
    SLAB: tl.constexpr,
):
    """One program: TOKENS tokens x COLUMNS columns, and SLAB output rows a token checked for padding."""
    tiles: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    token = (program // tiles) * TOKENS + tl.arange(0, TOKENS)
    column = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < H
    live = token < tokens

    targets = ()
    for j in tl.static_range(K):
        targets = targets + (tl.load(inverse_ptr + token * K + j, mask=live, other=-1),)  # noqa: RUF005
    sources = ()
    for i in tl.static_range(SLAB):
        row = token * SLAB + i
        sources = sources + (tl.load(order_ptr + row, mask=row < rows, other=0),)  # noqa: RUF005
    value = tl.load(x_ptr + token[:, None].to(tl.int64) * H + column, mask=live[:, None] & inside)

    for j in tl.static_range(K):
        row = targets[j][:, None]
        tl.store(packed_ptr + row.to(tl.int64) * H + column, value, mask=(row >= 0) & inside)
    zero = tl.zeros([TOKENS, COLUMNS], packed_ptr.dtype.element_ty)
    for i in tl.static_range(SLAB):
        row = (token * SLAB + i)[:, None]
        tl.store(packed_ptr + row.to(tl.int64) * H + column, zero, mask=(sources[i][:, None] < 0) & inside)


def choose_block(tokens: int, hidden: int, itemsize: int, block_bytes: int = BLOCK_BYTES) -> tuple[int, int]:
    """(tokens, columns) of one program: a power of two of a row, several rows where rows are short or few programs."""
    columns = min(triton.next_power_of_2(hidden), block_bytes // itemsize)
    while columns * itemsize > 1024 and tokens * math.ceil(hidden / columns) < ENOUGH_PROGRAMS:
        columns //= 2
    rows = max(1, block_bytes // 4 // (columns * itemsize))
    return min(rows, triton.next_power_of_2(math.ceil(tokens / ENOUGH_PROGRAMS))), columns


def choose_slab(cell: Any, tokens: int, rows: int) -> int:
    """Output rows a token that a program checks for padding: an even share, 0 where no row can be padding."""
    if cell.layout == "compact" and cell.capacity_factor is None and rows == tokens * cell.top_k:
        return 0
    return min(MAX_SLAB, math.ceil(rows / tokens))


def supports(cell: Any) -> str | None:
    """Why this cell cannot run, or None."""
    return triton_pack_fp8.supports(cell) if cell.dtype in FP8 else None


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind pack: x (T, H), order (R,) int32, inverse (T, k) int32 -> packed (R, H), of x's dtype or quantised."""
    x, order, inverse, packed = inputs["x"], inputs["order"], inputs["inverse"], outputs["packed"]
    slab = choose_slab(cell, len(x), len(order))
    if cell.dtype in FP8:
        return triton_pack_fp8.prepare(cell, inputs, outputs, slab)
    return launcher(x, order, inverse, packed, slab, choose_block(len(x), cell.hidden, x.element_size()))


def launcher(
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    packed: torch.Tensor,
    slab: int,
    block: tuple[int, int],
    num_warps: int = 4,
) -> Callable[[], None]:
    """The launch of pack for these tensors, `slab` padding rows a token and (tokens, columns) of a program."""
    (tokens, hidden), rows = x.shape, len(order)
    groups = max(tokens, math.ceil(rows / slab)) if slab else tokens
    grid = (math.ceil(groups / block[0]) * math.ceil(hidden / block[1]),)
    arguments = (x, order, inverse, packed, tokens, rows, hidden, inverse.shape[1], *block, slab)
    if not triton.knobs.runtime.interpret:
        # Compile and load now: neither may happen while a CUDA graph is captured.
        _ = pack_kernel.warmup(*arguments, grid=grid, num_warps=num_warps).run
    return functools.partial(pack_kernel[grid], *arguments, num_warps=num_warps)
