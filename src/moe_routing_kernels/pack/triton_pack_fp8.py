"""Pack to fp8 in Triton: quantise every token once and write it to the output rows of its k assignments, in one launch.

Strategy: token-major, as in triton_pack. An item is the elements of a token that share a scale: a row, or a group of
its elements. A program holds a block of items, reduces each to its largest absolute value in registers, and writes
elements and scale k times; where padding rows are possible it also writes zeros of scale 1 to those among its
`CHECKED_ROWS` output rows per token. The k row numbers are loaded before the first store, because a load after a store
could not be moved ahead of it.

Compulsory bytes: T * H * 2 + R * H + 4 * R * scales of a row + 4 * T * k, and 4 * R more with padding; floor: a stream
of that mix.

Invariant: every output row and scale is written by exactly one program: `inverse` names the kept rows, `order` < 0 the
others.
"""

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from moe_routing_kernels.formats import LEAST_AMAX
from moe_routing_kernels.pack import LARGEST, Pack, no_conversion, other_element
from moe_routing_kernels.target import Target

BLOCK_ELEMENTS = 4096  # of a program: 128 threads with four 16-byte vectors of bf16 each
ENOUGH_PROGRAMS = 16  # per multiprocessor
MAX_GROUP = 32768  # elements that share a scale: one program holds them


@triton.jit
def pack_fp8_kernel(
    x_ptr,
    order_ptr,
    inverse_ptr,
    packed_ptr,
    scales_ptr,
    tokens,
    rows,
    H: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEMS: tl.constexpr,
    CHECKED_ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
):
    """One program: ITEMS items of GROUP elements, in WIDTH columns, and CHECKED_ROWS output rows per token."""
    groups: tl.constexpr = (H + GROUP - 1) // GROUP
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    token, group = item // groups, item % groups
    lane = tl.arange(0, WIDTH)[None, :]
    column = group[:, None] * GROUP + lane
    inside = (lane < GROUP) & (column < H)
    live = token < tokens

    # load
    targets = ()
    for j in tl.static_range(K):
        targets = targets + (tl.load(inverse_ptr + token * K + j, mask=live, other=-1).to(tl.int64),)  # noqa: RUF005
    sources = ()
    for i in tl.static_range(CHECKED_ROWS):
        row = token * CHECKED_ROWS + i
        sources = sources + (tl.load(order_ptr + row, mask=row < rows, other=0),)  # noqa: RUF005
    value = tl.load(x_ptr + token[:, None] * H + column, mask=live[:, None] & inside, other=0).to(tl.float32)

    # quantise
    amax = tl.max(tl.abs(value), axis=1)
    small = amax < LEAST_AMAX
    scale = tl.where(small, 1.0, amax * (1 / LARGEST))
    inverse_scale = tl.where(small, 1.0, LARGEST / tl.where(small, 1.0, amax))
    quotient = tl.clamp(value * inverse_scale[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    quantised = quotient.to(packed_ptr.dtype.element_ty)

    # store
    for j in tl.static_range(K):
        row = targets[j]
        tl.store(packed_ptr + row[:, None] * H + column, quantised, mask=(row >= 0)[:, None] & inside)
        tl.store(scales_ptr + row * groups + group, scale, mask=row >= 0)
    zero = tl.zeros([ITEMS, WIDTH], packed_ptr.dtype.element_ty)
    for i in tl.static_range(CHECKED_ROWS):
        row, empty = token * CHECKED_ROWS + i, sources[i] < 0
        tl.store(packed_ptr + row[:, None] * H + column, zero, mask=empty[:, None] & inside)
        tl.store(scales_ptr + row * groups + group, 1.0, mask=empty)


def unsupported(problem: Pack) -> str | None:
    """Why the kernel cannot run a problem, or None."""
    if problem.group > MAX_GROUP:
        return f"the triton pack holds up to {MAX_GROUP} elements that share a scale, not {problem.group}"
    return other_element(problem.packed_format) or no_conversion(problem.packed_format)


def choose_items(items: int, width: int, enough: int) -> int:
    """Items of a program: a power of two; fewer with fewer programs than `enough`."""
    most = max(1, BLOCK_ELEMENTS // width)
    return min(most, triton.next_power_of_2(math.ceil(items / enough)))


def bind(
    problem: Pack,
    *,
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    checked_rows: int,
) -> Callable[[], None]:
    """Bind pack: x (T, H), order (R,) int32, inverse (T, k) int32 -> packed (R, H) float8_e4m3fn and scales float32.

    `checked_rows` is the number of output rows per token that are checked for padding, 0 where none can be.
    """
    (tokens, hidden), rows, group = x.shape, len(order), problem.group
    items = (max(tokens, math.ceil(rows / checked_rows)) if checked_rows else tokens) * problem.scales
    width = triton.next_power_of_2(group)
    block = choose_items(items, width, ENOUGH_PROGRAMS * Target.here(x.device).multiprocessors)
    arguments = (
        x,
        order,
        inverse,
        packed,
        scales,
        tokens,
        rows,
        hidden,
        inverse.shape[1],
        group,
        width,
        block,
        checked_rows,
        LARGEST,
        LEAST_AMAX,
    )
    grid, num_warps = (math.ceil(items / block),), 4 if block * width <= 8192 else 8 if block * width <= 16384 else 16
    if not triton.knobs.runtime.interpret:
        # Compile and load now: neither may happen while a CUDA graph is captured.
        _ = pack_fp8_kernel.warmup(*arguments, grid=grid, num_warps=num_warps).run
    return functools.partial(pack_fp8_kernel[grid], *arguments, num_warps=num_warps)
